"""The file of a SQLite database: opened as it is, and noticed when it is no longer there.

A connection goes on with a file that was deleted or replaced, and commits into what nobody can
open any more. So every transaction looks whether the name still means the same file.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from replaydb.errors import DatabaseReadOnlyError, DatabaseUnavailableError

#: How every file of SQLite begins.
_MAGIC = b"SQLite format 3\0"

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
        self._read_only = read_only
        self.is_immutable = False
        self._identity: tuple[int, int] | None = None

    def connect(self, *, timeout: float, create: bool = False) -> sqlite3.Connection:
        """Open it.

        Args:
            timeout: Seconds to wait inside SQLite for locks.
            create: Make it if it is not there.

        Raises:
            DatabaseUnavailableError: There is no such file or folder, it is not a file, or no
                longer the same one.
            DatabaseReadOnlyError: It cannot be read without writing beside it.
            sqlite3.Error: SQLite's own reasons.
        """
        if not (create and not self.path.exists()):
            self._look()
        elif not self.path.parent.is_dir():
            raise DatabaseUnavailableError(f"{self.path}: there is no such folder")
        connection = self._opened("mode=rwc" if create else "mode=rw", timeout)
        if self._read_only:
            connection = self._readable(connection, timeout)
        try:
            if self._identity is None:
                self._identity = self._look()
            self.check()
        except BaseException:
            connection.close()
            raise
        return connection

    def check(self) -> None:
        """Before a transaction, and before it is committed.

        Raises:
            DatabaseUnavailableError: What was opened is no longer there.
        """
        if self._look() != self._identity:
            raise DatabaseUnavailableError(
                f"{self.path}: it was replaced by another file while it was open; "
                "open the store again"
            )

    def size(self) -> int:
        """Bytes of it, and of commits that have not been moved into it."""
        return self.path.stat().st_size + self._num_in_wal()

    def _look(self) -> tuple[int, int]:
        """What tells this file from others."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            what = self._not_there() if self._identity is None else "it was deleted"
            raise DatabaseUnavailableError(f"{self.path}: {what}") from error
        if not stat.S_ISREG(found.st_mode):
            raise DatabaseUnavailableError(f"{self.path}: it is not a file")
        return found.st_dev, found.st_ino

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

    def _opened(self, how: str, timeout: float) -> sqlite3.Connection:
        return sqlite3.connect(
            f"file:{quote(str(self.path))}?{how}",
            uri=True,
            timeout=timeout,
            # The driver's own transactions are off: BEGIN is ours.
            isolation_level=None,
            # SQLAlchemy sets attributes from the thread of the event loop.
            check_same_thread=False,
        )

    def _readable(self, connection: sqlite3.Connection, timeout: float) -> sqlite3.Connection:
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


def _is_database(path: Path) -> bool:
    with suppress(OSError):
        if path.is_file():  # not a pipe, which would never end
            with path.open("rb") as file:
                return file.read(len(_MAGIC)) == _MAGIC
    return False
