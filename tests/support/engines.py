"""Decorators that choose the engines of a test in `make test`; nightly tests run on both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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


def in_turn(cases: Iterable[Any]) -> list[Any]:
    """Return cases that start with an `engine_name`, each on both engines.

    In `make test` one case runs on SQLite, the next one on PostgreSQL.
    """
    found = []
    for number, case in enumerate(cases):
        values, marks, name = case if isinstance(case, type(pytest.param())) else (case, (), None)
        row = values if isinstance(values, tuple) else (values,)
        for turn, engine in enumerate(("sqlite", "postgresql")):
            more = () if number % 2 == turn else (_NIGHTLY,)
            label = None if name is None else f"{engine}-{name}"
            found.append(pytest.param(engine, *row, marks=(*marks, *more), id=label))
    return found
