"""The file of a SQLite database: opening it, and finding out what it holds without its locks."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from replaydb.database.engines.sqlite_guard import GuardedConnection, check_usable
from replaydb.errors import (
    DatabaseReadOnlyError,
    DatabaseReplacedError,
    DatabaseUnavailableError,
    NotSupportedError,
)

#: How many files an error names.
_SHOWN_FILES = 5


class DatabaseFile:
    """A file, the same one for all connections of a store.

    Attributes:
        path: Where it is, absolute: it stays the same when the process goes to another folder.
        is_immutable: Whether it had to be read as one that does not change. SQLite then looks for
            no changes: a connection is to be used once, so that the next one sees them.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path.absolute()
        self.is_read_only = read_only
        self.is_immutable = False
        self._identity: tuple[int, int] | None = None

    def connect(
        self, pragmas: Sequence[str] = (), *, timeout: float, create: bool = False
    ) -> GuardedConnection:
        """Open it.

        Args:
            pragmas: Statements that configure the connection.
            timeout: Seconds to wait inside SQLite for locks.
            create: Make it if it is not there.

        Raises:
            DatabaseUnavailableError: There is no such file or folder, it is not a file, or not the
                same one as before; or one of its files was changed behind SQLite's back.
            DatabaseReadOnlyError: It cannot be read without writing beside it.
            NotSupportedError: The filesystem cannot hold a write-ahead log.
            sqlite3.Error: SQLite's own reasons.
        """
        if not (create and self.is_new()):
            self._look()
        elif not self.path.parent.is_dir():
            raise DatabaseUnavailableError(f"{self.path}: there is no such folder")
        check_usable(self.path)
        connection = self._opened("mode=rwc" if create else "mode=rw", timeout)
        try:
            if self.is_read_only:
                connection = self._readable(connection, timeout)
            for pragma in pragmas:
                row = connection.execute(pragma).fetchone()
                if "journal_mode" in pragma and row != ("wal",):
                    raise NotSupportedError(f"{self.path}: this filesystem cannot hold a WAL")
            if self._identity is None:
                found = self._look()
                self._identity = found.st_dev, found.st_ino
            connection.guard(self)
        except BaseException:
            connection.close()
            raise
        return connection

    def check(self) -> os.stat_result:
        """Find the file at its path.

        Raises:
            DatabaseUnavailableError: What was opened is no longer there.
        """
        found = self._look()
        if (found.st_dev, found.st_ino) != self._identity:
            raise DatabaseReplacedError(
                f"{self.path}: it was replaced by another file while it was open; "
                "open the store again"
            )
        return found

    def header(self) -> tuple[int, int]:
        """Read `user_version` and `schema_version` from the file, without what its -wal file has.

        Nothing but SQLite may open the file for that: if a process closes any descriptor of a file,
        POSIX drops all locks that the process has on it, and so those of its other connections.

        Raises:
            sqlite3.Error: It is not a database, or cannot be read.
        """
        with closing(self._opened("mode=ro&immutable=1", 0.0)) as connection:
            # A checkpoint may be writing a larger number of pages than the file has yet.
            connection.execute("PRAGMA writable_schema = ON")
            version, schema = (
                connection.execute(pragma).fetchone()[0]
                for pragma in ("PRAGMA user_version", "PRAGMA schema_version")
            )
            return version, schema

    def is_new(self) -> bool:
        """Whether nothing is at the path yet, or an empty file.

        Raises:
            DatabaseUnavailableError: The path cannot be used, such as one that is too long.
        """
        try:
            found = os.stat(self.path)
            return stat.S_ISREG(found.st_mode) and found.st_size == 0
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            raise _unusable(self.path, error) from error

    def size(self) -> int:
        """Bytes of it, and of commits that have not been moved into it."""
        return self.path.stat().st_size + self._num_in_wal()

    def _look(self) -> os.stat_result:
        """What the system knows of the file."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            what = self._not_there() if self._identity is None else "it was deleted"
            raise DatabaseUnavailableError(f"{self.path}: {what}") from error
        except OSError as error:
            raise _unusable(self.path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise DatabaseUnavailableError(f"{self.path}: it is not a file")
        return found

    def _not_there(self) -> str:
        """That there is no such file, and which there are: a name is easily misspelt."""
        try:
            files = sorted(path.name for path in self.path.parent.iterdir() if _is_database(path))
        except OSError:
            files = []
        others = f"; its folder has {', '.join(files[:_SHOWN_FILES])}" if files else ""
        return f"there is no such file{others}"

    def _num_in_wal(self) -> int:
        """Bytes of commits that have not been moved into the file."""
        with suppress(FileNotFoundError):
            return os.stat(f"{self.path.resolve()}-wal").st_size
        return 0

    def _opened(self, how: str, timeout: float) -> GuardedConnection:
        return sqlite3.connect(
            _uri(self.path, how),
            uri=True,
            timeout=timeout,
            # The driver's own transactions are off: BEGIN is ours.
            isolation_level=None,
            # SQLAlchemy sets attributes from the thread of the event loop.
            check_same_thread=False,
            factory=GuardedConnection,
        )

    def _readable(self, connection: GuardedConnection, timeout: float) -> GuardedConnection:
        """The connection, or where its folder cannot be written one that needs no file beside it.

        While somebody writes, the files beside it are there.
        """
        try:
            connection.execute("PRAGMA schema_version")
        except sqlite3.OperationalError as error:
            connection.close()
            if not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
                raise
            if self._num_in_wal():
                raise DatabaseReadOnlyError(
                    f"{self.path}: there are commits in its -wal file, which cannot be read where "
                    "nothing can be written; copy both files to a folder that can be"
                ) from error
        else:
            return connection
        self.is_immutable = True
        return self._opened("mode=ro&immutable=1", timeout)


def _unusable(path: Path, error: OSError) -> DatabaseUnavailableError:
    return DatabaseUnavailableError(f"{path}: {error.strerror or error}")


def _uri(path: Path, how: str) -> str:
    return f"file:{quote(str(path))}?{how}"


def _is_database(path: Path) -> bool:
    """Whether it is one, by SQLite's own reading: see `DatabaseFile.header`."""
    with suppress(OSError, sqlite3.Error):
        if path.is_file() and path.stat().st_size:  # not a pipe, which would never end
            with closing(sqlite3.connect(_uri(path, "mode=ro&immutable=1"), uri=True)) as one:
                one.execute("PRAGMA user_version")
                return True
    return False
