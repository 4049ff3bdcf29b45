"""What the connections of a store run: statements and commits.

Tests use this instead of events of an engine, so that only this module knows how a store connects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event

from replaydb import Store

#: Called with the connection, the SQL and the parameters of each statement before it runs.
Watch = Callable[[Connection, str, Any], object]


@contextmanager
def watched(store: Store, watch: Watch, *, writes: bool = True) -> Iterator[None]:
    """Call a function for each statement of the block: of reads, and of writes if so wanted."""
    database = store._database
    with ExitStack() as stack:
        for one in (database._reader, database._writer) if writes else (database._reader,):
            stack.enter_context(_listening(one.sync_engine, watch))
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
    """Record the connections of the commits of the block."""
    commits: list[object] = []
    engine = store._database._writer.sync_engine

    def note(connection: object) -> None:
        commits.append(connection)

    event.listen(engine, "commit", note)
    yield commits
    event.remove(engine, "commit", note)


@contextmanager
def _listening(engine: Engine, watch: Watch) -> Iterator[None]:
    def before(connection: Any, _cursor: Any, sql: str, parameters: Any, *_rest: Any) -> None:
        watch(connection, sql, parameters)

    event.listen(engine, "before_cursor_execute", before)
    yield
    event.remove(engine, "before_cursor_execute", before)
