"""Decorators that choose the engines of a test in `make test`; nightly tests run on both."""

from __future__ import annotations

import pytest

_NIGHTLY = pytest.mark.nightly

#: For behaviour that does not depend on the engine. Other tests run on both.
postgresql_nightly = pytest.mark.parametrize(
    "engine_name", ["sqlite", pytest.param("postgresql", marks=_NIGHTLY)]
)
#: For races that need concurrent write transactions.
sqlite_nightly = pytest.mark.parametrize(
    "engine_name", [pytest.param("sqlite", marks=_NIGHTLY), "postgresql"]
)
#: For behaviour that depends on the engine, in folders with an `engine_name` fixture like
#: `postgresql_nightly`.
both_engines = pytest.mark.parametrize("engine_name", ["sqlite", "postgresql"])
