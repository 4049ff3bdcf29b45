"""The meaning of errors of PostgreSQL, of its driver and of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
from sqlalchemy.exc import DBAPIError

from replaydb.database.postgresql import sequences, standby
from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    ReplayDBError,
)

#: Shut down, crashed, starting up, out of connections; no lock within `lock_timeout`.
_OUTAGES = {"57P01", "57P02", "57P03", "53300", "55P03"}
_CONFLICTS = {"40001", "40P01"}  # serialization, deadlock

#: Errors of limits that an administrator may have set, with the setting.
_LIMITS: Mapping[str, str] = {
    "57014": "statement_timeout of this role, database or server is too short for the statement, "
    "unless it was canceled by hand",
    "55P03": "a lock was not free within lock_timeout of this role, database or server",
    "25P03": "idle_in_transaction_session_timeout of this role, database or server is too short",
    "25P04": "transaction_timeout of this role, database or server is too short",
}
_HOW_TO_RAISE = (
    "raise it with ALTER ROLE ... SET, or in the URL, such as options=-c%20statement_timeout=60s"
)
#: What to do, added to the errors of these states.
_HINTS: Mapping[str, str] = {
    **{state: f"; {limit}; {_HOW_TO_RAISE}" for state, limit in _LIMITS.items()},
    "26000": "; pgbouncer=prepared takes PgBouncer 1.21 or later with max_prepared_statements > 0; "
    "pgbouncer=true takes any",
    "42501": "; if `replaydb db roles` created this role, run it with --apply again after each "
    "upgrade of the schema",
}


class PostgresqlErrors:
    """Errors of one database.

    Attributes:
        is_standby: Whether it was a standby when it was last connected to.
    """

    is_standby = False

    def __init__(self, shown: str) -> None:
        """Set the URL for messages."""
        self._shown = shown

    def typed(self, error: BaseException) -> ReplayDBError | None:
        """Choose the type by SQLSTATE, never by the error's text."""
        cause = cause_of(error)
        state = getattr(cause, "sqlstate", None)
        if isinstance(cause, MemoryError):
            return DatabaseUnavailableError(f"{self._shown}: not enough memory")
        if isinstance(cause, RefusedStatementError):
            return DatabaseError(f"{self._shown}: {cause}")
        if state is None:
            if isinstance(error, DBAPIError | LostConnectionError) or isinstance(
                cause, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError
            ):
                reason = str(cause) or "no answer in time"  # a TimeoutError has no text
                hint = standby.HINT if self.is_standby else ""
                return DatabaseUnavailableError(f"{self._shown}: {reason}{hint}")
            return None
        if state == sequences.UNIQUE_VIOLATION:
            reason = sequences.explain(cause, _text(cause))
            return DatabaseError(f"{self._shown}: {reason} (SQLSTATE {state})")
        kind: type[DatabaseError] = DatabaseError
        if state == "53100":
            kind = DatabaseFullError
        elif state == "25006":
            kind = DatabaseReadOnlyError
        elif state[:2] in {"08", "28", "3D", "53", "57"} or state in _LIMITS:
            kind = DatabaseUnavailableError
        hint = _HINTS.get(state, "")
        if self.is_standby and (state[:2] == "08" or state in {"40001", "57P01"}):
            kind, hint = DatabaseUnavailableError, standby.HINT
        return kind(f"{self._shown}: {_text(cause)} (SQLSTATE {state}){hint}")

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the transaction lost a race against another client and was rolled back."""
        cause = cause_of(error)
        state = getattr(cause, "sqlstate", None)
        if state == sequences.UNIQUE_VIOLATION:
            return sequences.is_race(cause)
        return state in _CONFLICTS

    def is_outage(self, error: BaseException) -> bool:
        """Whether the connection broke, or none can be opened at the moment."""
        if isinstance(error, LostConnectionError):
            return True
        if isinstance(error, DBAPIError) and error.connection_invalidated:
            return True
        cause = cause_of(error)
        if isinstance(cause, asyncpg.TargetServerAttributeNotMatched):
            return True  # until a standby is promoted, no host accepts writes
        # The server has ended the connection, or has announced that, before its first statement.
        if isinstance(cause, asyncpg.InterfaceError | asyncpg.InternalClientError):
            return True
        state = getattr(cause, "sqlstate", None) or ""
        return isinstance(cause, OSError) or state[:2] == "08" or state in _OUTAGES


def _text(error: BaseException) -> str:
    """Return the message of an error of the server. Its details may contain values."""
    return str(error.args[0]) if error.args else str(error)


def cause_of(error: BaseException) -> BaseException:
    """Return the error of the driver or of the network that led to an error."""
    if isinstance(error, DBAPIError):
        error = error.orig or error
        return error.__cause__ or error
    if isinstance(error, LostConnectionError):
        return error.__cause__ or error
    return error


#: A server closes the connection when it receives a message of 2^30 bytes or more.
MAX_BYTES = 1_000_000_000


class RefusedStatementError(Exception):
    """No server can accept a statement that has failed."""


class LostConnectionError(Exception):
    """The connection was lost while a statement ran, or cannot run it any more."""


def judge(
    error: BaseException, parameters: Sequence[Any], *, is_closed: bool
) -> BaseException | None:
    """Return what an error of the driver means for its connection.

    The server does not say that a message was too large, and asyncpg only of messages of 2^31
    bytes and more. It uses `InterfaceError` for lost connections, and for statements that it
    refuses itself, such as one with too many parameters.

    Args:
        error: The error.
        parameters: Parameters of the statement, or of several.
        is_closed: Whether the connection is closed now.

    Returns:
        A `RefusedStatementError`, a `LostConnectionError`, or the error itself if it is not one:
        the statement may still run. None: the connection can be used.
    """
    if not isinstance(error, Exception):
        return error
    if isinstance(error, BufferError) or message_bytes(parameters) > MAX_BYTES:
        return RefusedStatementError(
            f"a statement has more than {MAX_BYTES} bytes, which PostgreSQL does not accept. "
            "Nothing was stored: use smaller values"
        )
    # Its statements were prepared before a table was changed.
    if is_closed or isinstance(error, asyncpg.InvalidCachedStatementError):
        return LostConnectionError(str(error))
    if isinstance(error, asyncpg.InterfaceError):
        return RefusedStatementError(str(error))
    return None


def message_bytes(parameters: Sequence[Any]) -> int:
    """Return the size of the parameters of a statement, or of the largest row of parameters."""
    rows = [row for row in parameters if isinstance(row, tuple)]  # each is a message
    return max(map(_num_bytes, rows), default=_num_bytes(parameters))


def _num_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0
