"""What the connections of a store run: statements and commits.

Tests use this, so that only this module knows how a store connects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection

from replaydb import Store
from replaydb.database.runtime.session import Session
from replaydb.database.sqlite.guard import GuardedConnection
from replaydb.database.sqlite.transactions import SqliteTransactions

#: Called with the connection, the SQL and the parameters of each statement before it runs.
Watch = Callable[[Connection, str, Any], object]


@contextmanager
def watched(store: Store, watch: Watch, *, writes: bool = True) -> Iterator[None]:
    """Call a function for each statement of the block: of reads, and of writes if so wanted."""
    database: Any = store._database
    several = (database.reader, database.writer) if writes else (database.reader,)

    def before(session: Session, sql: str, parameters: Any) -> None:
        watch(session.core, sql, parameters)

    for one in several:
        one.watch = before
    try:
        yield
    finally:
        for one in several:
            one.watch = None


@contextmanager
def recorded(store: Store, *, writes: bool = True) -> Iterator[list[str]]:
    """Record the SQL of the statements of the block."""
    statements: list[str] = []
    with watched(
        store, lambda _connection, sql, _parameters: statements.append(sql), writes=writes
    ):
        yield statements


@contextmanager
def counted_commits(store: Store) -> Iterator[list[object]]:
    """Record the commits of the block that connections of the store make."""
    commits: list[object] = []
    writer: Any = store._database.writer
    if isinstance(writer, SqliteTransactions):
        kind, name = GuardedConnection, "commit"

        def is_mine(connection: object) -> bool:
            return any(one.driver is connection for one in writer.pool._used)

    else:
        kind, name = type(writer), "_commit"

        def is_mine(connection: object) -> bool:
            return connection is writer

    commit = getattr(kind, name)

    def counted(of: object, *arguments: Any) -> Any:
        if is_mine(of):
            commits.append(of)
        return commit(of, *arguments)

    with patch.object(kind, name, counted):
        yield commits


def num_used(store: Store) -> int:
    """Return the number of connections that calls use."""
    several: Any = (store._database.writer, store._database.reader)
    return sum(one.pool.num_used for one in several)
