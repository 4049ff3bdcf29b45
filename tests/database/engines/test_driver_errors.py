"""What errors of asyncpg mean: for the statement, for its connection, and for the call."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest
from asyncpg.exceptions import _base
from sqlalchemy import func, select

import replaydb as rdb
from replaydb.database.engines import backend_for
from replaydb.database.postgresql import errors
from replaydb.database.postgresql.errors import (
    LostConnectionError,
    PostgresqlErrors,
    RefusedStatementError,
    judge,
)
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.transactions import Database, end_in

MEANINGS: dict[str, tuple[BaseException, bool, type[BaseException] | None]] = {
    "of the server": (asyncpg.DivisionByZeroError("no"), False, None),
    "of the server, which then closes": (
        asyncpg.AdminShutdownError("terminating connection"),
        True,
        LostConnectionError,
    ),
    "closed before": (asyncpg.InterfaceError("connection is closed"), True, LostConnectionError),
    "closed meanwhile": (
        asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
        True,
        LostConnectionError,
    ),
    "of the network": (ConnectionResetError("reset"), True, LostConnectionError),
    "a changed table": (
        asyncpg.InvalidCachedStatementError("cached statement plan is invalid"),
        False,
        LostConnectionError,
    ),
    "too many parameters": (
        asyncpg.InterfaceError("the number of query arguments cannot exceed 32767"),
        False,
        RefusedStatementError,
    ),
    "a value of another type": (_base.DataError("invalid input"), False, RefusedStatementError),
    "too large for asyncpg": (BufferError("buffer overflow"), False, RefusedStatementError),
    "cancelled": (asyncio.CancelledError(), False, asyncio.CancelledError),
}


@pytest.mark.parametrize(("error", "is_closed", "kind"), MEANINGS.values(), ids=MEANINGS)
def test_what_an_error_means_for_its_connection(
    error: BaseException, is_closed: bool, kind: type[BaseException] | None
) -> None:
    found = judge(error, [1], is_closed=is_closed)
    assert type(found) is (type(None) if kind is None else kind)


def test_a_message_that_is_too_large_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the server does is to close the connection."""
    monkeypatch.setattr(errors, "MAX_BYTES", 10)
    lost = asyncpg.ConnectionDoesNotExistError("connection was closed")
    assert isinstance(judge(lost, [b"x" * 11], is_closed=True), RefusedStatementError)
    assert isinstance(judge(lost, [b"x" * 10], is_closed=True), LostConnectionError)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


CALLS: dict[str, tuple[Exception, bool, bool, type[rdb.DatabaseError]]] = {
    "lost": (
        caused(LostConnectionError(), asyncpg.InterfaceError("connection is closed")),
        True,
        False,
        rdb.DatabaseUnavailableError,
    ),
    "refused": (RefusedStatementError("too large"), False, False, rdb.DatabaseError),
    "deadlock": (asyncpg.DeadlockDetectedError("deadlock"), False, True, rdb.DatabaseError),
    "shut down": (
        asyncpg.AdminShutdownError("terminating"),
        True,
        False,
        rdb.DatabaseUnavailableError,
    ),
    "no connection": (OSError(111, "refused"), True, False, rdb.DatabaseUnavailableError),
    "a wrong statement": (asyncpg.UndefinedTableError("none"), False, False, rdb.DatabaseError),
}


@pytest.mark.parametrize(("error", "outage", "conflict", "kind"), CALLS.values(), ids=CALLS)
def test_what_an_error_means_for_its_call(
    error: Exception, outage: bool, conflict: bool, kind: type[rdb.DatabaseError]
) -> None:
    meaning = PostgresqlErrors("postgresql://host/replay")
    assert (meaning.is_outage(error), meaning.is_conflict(error)) == (outage, conflict)
    typed: Any = meaning.typed(error)
    assert type(typed) is kind
    assert str(typed).startswith("postgresql://host/replay: ")


async def test_a_statement_that_was_cancelled_is_not_its_own_cause(postgresql_url: str) -> None:
    """Code that follows `__cause__` from error to error must reach an end."""
    database = Database(backend_for(postgresql_url))
    sleep = prepared(lambda seconds: select(func.pg_sleep(seconds)))
    await database.read(lambda session: session.run(sleep(0.0)))  # connects
    with pytest.raises(rdb.DatabaseUnavailableError) as caught:
        await database.read(lambda session: session.run(sleep(60.0)), end=end_in(0.2))
    causes: list[BaseException] = []
    cause: BaseException | None = caught.value
    while cause is not None:
        assert not any(cause is one for one in causes)
        causes.append(cause)
        cause = cause.__cause__
    await database.close()
