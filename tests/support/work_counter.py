"""Work of calls that read: statements, parameters, and on SQLite the steps of its machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from replaydb import Store
from support.watching import watched


@dataclass(slots=True)
class Work:
    """Work that was counted.

    Attributes:
        statements: Number of statements.
        parameters: Number of their parameters; an array counts its elements.
        steps: Instructions of SQLite's virtual machine, which reads each row and index entry by
            some of them; 0 on PostgreSQL.
    """

    statements: int = 0
    parameters: int = 0
    steps: int = 0


@contextmanager
def counted_work(store: Store) -> Iterator[Work]:
    """Count the work of the reads of a store."""
    work = Work()

    def step() -> int:
        work.steps += 1
        return 0

    def count(connection: Any, _sql: str, parameters: Any) -> None:
        work.statements += 1
        values = parameters.values() if isinstance(parameters, dict) else parameters
        work.parameters += sum(len(it) if isinstance(it, list | tuple) else 1 for it in values)
        if connection.dialect.name == "sqlite":
            connection.connection.driver_connection.set_progress_handler(step, 1)

    with watched(store, count, writes=False):
        yield work
