"""The file of a SQLite database: opening it, and reading its header without taking locks."""

from __future__ import annotations

import ctypes
import os
import random
import sqlite3
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from replaydb.database.sqlite.guard import GuardedConnection, check_usable
from replaydb.errors import (
    DatabaseReadOnlyError,
    DatabaseReplacedError,
    DatabaseUnavailableError,
    NotSupportedError,
)
from replaydb.packs import Instance

#: At most this many files are named in an error.
_SHOWN_FILES = 5
#: Pause in seconds between attempts to configure a file that another connection configures.
_LONGEST_PAUSE = 0.005
#: Constants of `statx` on Linux: relative to the current folder, and the field of the birth time.
_AT_FDCWD, _STATX_BTIME = -100, 0x800


class DatabaseFile:
    """The file that all connections of a store use.

    Attributes:
        path: Absolute path, which does not depend on the current folder of the process.
        is_immutable: Whether it had to be opened with `immutable=1`. SQLite then does not detect
            changes, so each connection is used only once and the next one sees them.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path.absolute()
        self.is_read_only = read_only
        self.is_immutable = False
        self._identity: tuple[int, int] | None = None

    def connect(
        self, pragmas: Sequence[str] = (), *, timeout: float, create: bool = False
    ) -> GuardedConnection:
        """Open a connection.

        Args:
            pragmas: Statements that configure the connection.
            timeout: Seconds to wait inside SQLite for locks.
            create: Create the file if it does not exist.

        Raises:
            DatabaseUnavailableError: The file or its folder does not exist, it is not a file, it is
                another file than before, or one of its files was changed without SQLite.
            DatabaseReadOnlyError: It cannot be read without creating files beside it.
            NotSupportedError: The filesystem does not support a write-ahead log.
            sqlite3.Error: Any other error of SQLite.
        """
        if not (create and self.is_new()):
            self.status()
        elif not self.path.parent.is_dir():
            raise DatabaseUnavailableError(f"{self.path}: there is no such folder")
        check_usable(self.path)
        connection = self._opened("mode=rwc" if create else "mode=rw", timeout)
        try:
            if self.is_read_only:
                connection = self._readable(connection, timeout)
            for pragma in pragmas:
                row = _when_free(connection, pragma, timeout)
                if "journal_mode" in pragma and row != ("wal",):
                    raise NotSupportedError(
                        f"{self.path}: this filesystem does not support write-ahead logging; use a "
                        "local disk"
                    )
            if self._identity is None:
                found = self.status()
                self._identity = found.st_dev, found.st_ino
            connection.guard(self)
        except BaseException:
            connection.close()
            raise
        return connection

    def check(self) -> os.stat_result:
        """Check that the file that was opened is still at its path. Returns its status.

        Raises:
            DatabaseUnavailableError: It was deleted or replaced.
        """
        found = self.status()
        if (found.st_dev, found.st_ino) != self._identity:
            raise DatabaseReplacedError(
                f"{self.path}: it was replaced by another file while it was open; close the store "
                "and open it again"
            )
        return found

    def header(self) -> tuple[int, int]:
        """Read `user_version` and `schema_version` from the file, ignoring its -wal file.

        Only SQLite may open the file: when a process closes any descriptor of a file, POSIX drops
        all locks of the process on it, including those of other SQLite connections.

        Raises:
            sqlite3.Error: It is not a database, or cannot be read.
        """
        with closing(self._opened("mode=ro&immutable=1", 0.0)) as connection:
            # During a checkpoint, the header may name more pages than the file has.
            connection.execute("PRAGMA writable_schema = ON")
            version, schema = (
                connection.execute(pragma).fetchone()[0]
                for pragma in ("PRAGMA user_version", "PRAGMA schema_version")
            )
            return version, schema

    def is_new(self) -> bool:
        """Whether the file does not exist or is empty.

        Raises:
            DatabaseUnavailableError: The path is invalid, for example too long.
        """
        try:
            found = os.stat(self.path)
            return stat.S_ISREG(found.st_mode) and found.st_size == 0
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            raise _unusable(self.path, error) from error

    def instance(self) -> Instance:
        """Return what distinguishes the file from copies of it: its inode and its time of birth.

        The inode alone does not: ext4 gives the inode of a deleted file to the next new file.
        """
        facts = {"inode": self.status().st_ino}
        if (birth := _birth(self.path)) is not None:
            facts["birth"] = birth
        return Instance(facts)

    def size(self) -> int:
        """Return the bytes of the file and of its -wal file."""
        return self.path.stat().st_size + self._num_in_wal()

    def status(self) -> os.stat_result:
        """Return the status of the file, or raise if it is not a file."""
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
        """Return the message for a missing file, which names databases in its folder."""
        try:
            files = sorted(path.name for path in self.path.parent.iterdir() if _is_database(path))
        except OSError:
            files = []
        others = f"; its folder has {', '.join(files[:_SHOWN_FILES])}" if files else ""
        return f"there is no such file{others}"

    def _num_in_wal(self) -> int:
        """Return the size of the -wal file in bytes; 0 if there is none."""
        with suppress(FileNotFoundError):
            return os.stat(f"{self.path.resolve()}-wal").st_size
        return 0

    def _opened(self, how: str, timeout: float) -> GuardedConnection:
        return sqlite3.connect(
            _uri(self.path, how),
            uri=True,
            timeout=timeout,
            # Disable the driver's implicit transactions: replaydb runs BEGIN itself.
            isolation_level=None,
            # SQLAlchemy sets attributes from the thread of the event loop.
            check_same_thread=False,
            factory=GuardedConnection,
        )

    def _readable(self, connection: GuardedConnection, timeout: float) -> GuardedConnection:
        """Return the connection, or an immutable one if its folder cannot be written.

        While another process writes, the -wal and -shm files exist, and an ordinary connection
        works.
        """
        try:
            connection.execute("PRAGMA schema_version")
        except sqlite3.OperationalError as error:
            connection.close()
            if not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
                raise
            if self._num_in_wal():
                raise DatabaseReadOnlyError(
                    f"{self.path}: there are commits in its -wal file, which SQLite cannot read in "
                    "a folder that is not writable; copy both files to a writable folder"
                ) from error
        else:
            return connection
        self.is_immutable = True
        return self._opened("mode=ro&immutable=1", timeout)


def _birth(path: Path) -> int | None:
    """Return when a file was created, in nanoseconds since 1970; None if the system does not tell.

    On Linux Python has no function for it yet, so this calls that of the C library.
    """
    seconds = getattr(os.stat(path), "st_birthtime", None)  # on macOS and FreeBSD
    if seconds is not None:
        return int(seconds * 1e9)
    answer = ctypes.create_string_buffer(256)
    try:
        failed = ctypes.CDLL(None).statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, answer)
    except (OSError, AttributeError):
        return None
    found, seconds, nanoseconds = struct.unpack_from("=I76xqI", answer)
    return None if failed or not found & _STATX_BTIME else seconds * 10**9 + nanoseconds


def _when_free(connection: sqlite3.Connection, pragma: str, timeout: float) -> Any:
    """Run a pragma and return its row. Wait for other connections up to `timeout` seconds.

    SQLite itself does not wait if two connections change the journal mode of a new file: the locks
    that they have could be a deadlock.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return connection.execute(pragma).fetchone()
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorname.startswith("SQLITE_BUSY")
            if not is_busy or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0, _LONGEST_PAUSE))  # noqa: S311


def _unusable(path: Path, error: OSError) -> DatabaseUnavailableError:
    return DatabaseUnavailableError(f"{path}: {error.strerror or error}")


def _uri(path: Path, how: str) -> str:
    return f"file:{quote(str(path))}?{how}"


def _is_database(path: Path) -> bool:
    """Whether SQLite can read a file. Only SQLite opens it: see `DatabaseFile.header`."""
    with suppress(OSError, sqlite3.Error):
        if path.is_file() and path.stat().st_size:  # reading a pipe would never end
            with closing(sqlite3.connect(_uri(path, "mode=ro&immutable=1"), uri=True)) as one:
                one.execute("PRAGMA user_version")
                return True
    return False
