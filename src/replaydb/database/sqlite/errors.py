"""The meaning of errors of SQLite and of its driver."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    ReplayDBError,
)

_TOO_LARGE = (
    "; a row of SQLite has at most SQLITE_MAX_LENGTH bytes, 10^9 by default. Nothing was stored: "
    "use smaller values (SQLITE_TOOBIG)"
)


class SqliteErrors:
    """Errors of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def typed(self, error: BaseException) -> ReplayDBError | None:
        """Choose the type by the error's name, never by its text."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(cause, "sqlite_errorname", None)
        if isinstance(cause, MemoryError):
            return DatabaseUnavailableError(f"{self._path}: not enough memory")
        if isinstance(cause, OSError):
            return DatabaseUnavailableError(f"{self._path}: {cause.strerror or cause}")
        if name == "SQLITE_TOOBIG" or isinstance(cause, OverflowError):
            return DatabaseError(f"{self._path}: {cause}{_TOO_LARGE}")
        if name is None:
            # Damage in a file raises such errors: invalid JSON, or text that is not UTF-8.
            damage = isinstance(cause, sqlite3.Error | json.JSONDecodeError | UnicodeDecodeError)
            return DatabaseError(f"{self._path}: {cause}") if damage else None
        kind: type[DatabaseError] = DatabaseError
        if name in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):  # the latter: no space for the -shm
            kind = DatabaseFullError
        elif name.startswith("SQLITE_READONLY"):
            kind = DatabaseReadOnlyError
        elif name.startswith(("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_IOERR", "SQLITE_BUSY")):
            kind = DatabaseUnavailableError
        return kind(f"{self._path}: {cause} ({name})")

    def is_conflict(self, error: BaseException) -> bool:
        """Return False: after its BEGIN there is no other writer."""
        return False

    def is_outage(self, error: BaseException) -> bool:
        """Whether another process blocked the call, as while it resets or recovers the log."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(cause, "sqlite_errorname", None) or ""
        return name.startswith(("SQLITE_BUSY", "SQLITE_PROTOCOL"))
