"""On which engine a test runs in `make test`, where one of the two is enough; both do nightly."""

from __future__ import annotations

import pytest

_NIGHTLY = pytest.mark.nightly

#: For what does not depend on the engine: a test that runs on both would fail with it.
postgresql_nightly = pytest.mark.parametrize(
    "engine_name", ["sqlite", pytest.param("postgresql", marks=_NIGHTLY)]
)
#: For races that can be lost only where transactions write at the same time.
sqlite_nightly = pytest.mark.parametrize(
    "engine_name", [pytest.param("sqlite", marks=_NIGHTLY), "postgresql"]
)
#: For what depends on the engine, in folders whose own `engine_name` is `postgresql_nightly`.
both_engines = pytest.mark.parametrize("engine_name", ["sqlite", "postgresql"])
