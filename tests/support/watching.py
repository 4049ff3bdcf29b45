"""What the connections of a store run: statements and commits.

Tests use this, so that only this module knows how a store connects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection, event

from replaydb import Store
from replaydb.database.postgresql.transactions import PostgresqlTransactions
from replaydb.database.sqlite.guard import GuardedConnection
from replaydb.database.sqlite.session import SqliteSession
from replaydb.database.sqlite.transactions import SqliteTransactions

#: Called with the connection, the SQL and the parameters of each statement before it runs.
Watch = Callable[[Connection, str, Any], object]


@contextmanager
def watched(store: Store, watch: Watch, *, writes: bool = True) -> Iterator[None]:
    """Call a function for each statement of the block: of reads, and of writes if so wanted."""
    database: Any = store._database
    with ExitStack() as stack:
        for one in (database.reader, database.writer) if writes else (database.reader,):
            listening = _on_sqlite if isinstance(one, SqliteTransactions) else _on_postgresql
            stack.enter_context(listening(one, watch))
        yield


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
        commit = GuardedConnection.commit

        def counted(connection: GuardedConnection) -> None:
            if any(one.driver is connection for one in writer.pool._used):
                commits.append(connection)
            commit(connection)

        with patch.object(GuardedConnection, "commit", counted):
            yield commits
        return
    engine = writer._engine.sync_engine

    def note(connection: object) -> None:
        commits.append(connection)

    event.listen(engine, "commit", note)
    yield commits
    event.remove(engine, "commit", note)


def num_used(store: Store) -> int:
    """Return the number of connections that calls use."""
    writer, reader = store._database.writer, store._database.reader
    if isinstance(writer, SqliteTransactions) and isinstance(reader, SqliteTransactions):
        return writer.pool.num_used + reader.pool.num_used
    engines: Any = (writer, reader)
    return sum(one._engine.pool.checkedout() for one in engines)


@contextmanager
def _on_sqlite(transactions: SqliteTransactions, watch: Watch) -> Iterator[None]:
    def before(session: SqliteSession, sql: str, parameters: Any) -> None:
        watch(session.core, sql, parameters)

    transactions.watch = before
    try:
        yield
    finally:
        transactions.watch = None


@contextmanager
def _on_postgresql(transactions: PostgresqlTransactions, watch: Watch) -> Iterator[None]:
    def before(connection: Any, _cursor: Any, sql: str, parameters: Any, *_rest: Any) -> None:
        watch(connection, sql, parameters)

    engine = transactions._engine.sync_engine
    event.listen(engine, "before_cursor_execute", before)
    yield
    event.remove(engine, "before_cursor_execute", before)
