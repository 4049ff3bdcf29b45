"""Detection of SQLite files that were deleted, replaced, truncated or overwritten while open.

SQLite keeps using the files that it has open, and commits into them even if no process can open
them again. So each transaction compares the three files of a database with those at their paths,
before it begins and before it commits.

The `-wal` and `-shm` files are identified by their inodes. SQLite itself does not change these: an
open connection holds a shared lock on the database, and SQLite removes these files only under an
exclusive one.

The database file is written in place by checkpoints of any process, so its contents may change. It
is identified by its generation: `PRAGMA user_version`, which is in its first page. The first commit
after a checkpoint increments the generation in the `-wal` file. The next checkpoint moves it into
the database file. So the database file has the generation that connections see, or the one before,
and its generation never decreases. A new database begins with a random one.
"""

from __future__ import annotations

import ctypes
import os
import random
import sqlite3
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol
from weakref import WeakSet, WeakValueDictionary

from sqlalchemy.dialects.sqlite.base import SQLiteDialect

from replaydb.database.sqlite.sql import set_user_version
from replaydb.errors import DatabaseReplacedError, DatabaseUnavailableError

#: Generations count from 1 to this, then from 1 again; 0 is none. SQLite has a signed 32-bit field.
_GENERATIONS = 2**31 - 1
#: A file that was changed within this time may change again without a change of its times: the
#: clock of file systems has ticks of up to 10 ms.
_TICK_NS = 10_000_000
#: Pauses before a file that looks wrong is read again: it may have been read during a write.
_REREAD_PAUSES = (0.01, 0.05)

#: Larger differences between generations are negative, because generations start over.
_FAR = _GENERATIONS // 2
#: SQLite's errors for a database, or a log, that was overwritten or truncated.
_DAMAGED = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_IOERR_SHORT_READ")

_Identity = tuple[int, int]
_DIALECT = SQLiteDialect()


class File(Protocol):
    """The database file, as `GuardedConnection` uses it."""

    @property
    def path(self) -> os.PathLike[str]:
        """Path of the file."""

    @property
    def is_read_only(self) -> bool:
        """Whether it must not be written."""

    @property
    def is_immutable(self) -> bool:
        """Whether it is read without locks and without the -wal and -shm files."""

    def check(self) -> os.stat_result:
        """Return its status, or raise `DatabaseUnavailableError` if it was deleted or replaced."""

    def header(self) -> tuple[int, int]:
        """Return `user_version` and `schema_version` of the file, ignoring its `-wal` file."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """The -wal or -shm file at its path is not the one that was opened.

    Attributes:
        path: Path of the file.
        is_taken: Whether other connections may have written to a file in its place.
        can_be_saved: Whether a checkpoint can move all commits into the database at once.
    """

    path: str
    is_taken: bool
    can_be_saved: bool


class _SideFiles:
    """The -wal and -shm files of a database that all connections of this process have open.

    The connections of a process share one open `-shm` file, even if another file is at its path. So
    a new connection does not help while an older one is open.
    """

    def __init__(self, path: str) -> None:
        self.wal_path, self._shm_path = f"{path}-wal", f"{path}-shm"
        self._wal, self._shm = _identity(self.wal_path), _identity(self._shm_path)
        #: Connections that have them open.
        self.users: WeakSet[GuardedConnection] = WeakSet()
        #: Why the connections of this process can no longer be used.
        self.failure: str | None = None

    def loss(self) -> _Loss | None:
        """Compare the files with those at their paths."""
        wal, shm = _identity(self.wal_path), _identity(self._shm_path)
        if self._wal is None and self._shm is None:  # no WAL mode until a writer opens the file
            self._wal, self._shm = wal, shm
        if (wal, shm) == (self._wal, self._shm):
            return None
        is_shm_ours = shm == self._shm
        is_wal_taken = wal not in (self._wal, None)
        if is_wal_taken and is_shm_ours and not _size(self.wal_path):
            # A connection has created it but not written to it. It cannot write, because the shared
            # index of the log names pages that the new file does not have.
            is_wal_taken = False
        return _Loss(
            self.wal_path if wal != self._wal else self._shm_path,
            is_taken=is_wal_taken or not (is_shm_ours or shm is None),
            # All connections use the locks in the -shm file at its path.
            can_be_saved=is_shm_ours and not is_wal_taken,
        )


#: By the identity of the database file. While an exception refers to it, an entry without users is
#: left. It is not used again: the -wal and -shm files are new then, or even the database file.
_all_side_files: WeakValueDictionary[_Identity, _SideFiles] = WeakValueDictionary()
_lock = threading.Lock()


def check_usable(path: os.PathLike[str]) -> None:
    """Check that this process has not given up a database, since opening it might change its files.

    Raises:
        DatabaseUnavailableError: The process has given it up.
    """
    identity = _identity(path)
    side_files = None if identity is None else _all_side_files.get(identity)
    if side_files is not None and side_files.failure is not None:
        raise DatabaseReplacedError(side_files.failure)


class GuardedConnection(sqlite3.Connection):
    """A connection that commits only into files that later connections will open."""

    _file: File | None = None
    _side_files: _SideFiles | None = None
    _is_kept = False
    #: Size and times of the database file when its generation was last read.
    _seen: tuple[int, int, int] | None = None
    #: Generation and `PRAGMA schema_version` of the database file at that time.
    _stored: tuple[int, int] | None = None
    #: Minimum size of the database file, unless it is vacuumed.
    _length = 0
    #: Size of the -wal file after the last commit, and `PRAGMA data_version` at that time. Commits
    #: and checkpoints of other connections change that version, but not those of this one.
    _log = (0, 0)
    #: `total_changes` when the last transaction ended.
    _num_changes = 0

    def guard(self, file: File) -> None:
        """Begin to guard the files, after the connection is configured.

        Raises:
            DatabaseUnavailableError: They do not belong together, or are not the ones that other
                connections of this process have open.
            sqlite3.Error: They cannot be read.
        """
        self._file = file
        self._read("PRAGMA schema_version")  # from now on all of them are open and stay open
        if not file.is_immutable:
            found = file.check()
            path = os.path.realpath(file.path)
            with _lock:
                identity = found.st_dev, found.st_ino
                side_files = _all_side_files.get(identity)
                if side_files is None or not side_files.users:
                    side_files = _all_side_files[identity] = _SideFiles(path)
                side_files.users.add(self)
                self._side_files = side_files
        self.check()

    def check(self) -> None:
        """Check that the files at their paths are those that are open. `commit` does so, too.

        Raises:
            DatabaseUnavailableError: They are not the files that this connection has open.
            sqlite3.Error: They cannot be read.
        """
        file, side_files = self._file, self._side_files
        assert file is not None  # noqa: S101 - it is guarded
        found = file.check()
        if side_files is None:
            return
        if side_files.failure is not None:
            raise DatabaseReplacedError(side_files.failure)
        if (loss := side_files.loss()) is not None:
            self._lose(file, side_files, loss)
        seen = found.st_size, found.st_mtime_ns, found.st_ctime_ns
        if seen != self._seen:
            self._check_contents(file, side_files)
            self._seen = seen if time.time_ns() - found.st_ctime_ns > _TICK_NS else None

    def commit(self) -> None:
        """Commit, if the files are those that later connections will open.

        Raises:
            DatabaseUnavailableError: They are not; nothing was committed.
            sqlite3.Error: Any other error of SQLite; nothing was committed.
        """
        if not self.in_transaction:
            return
        self.check()
        if self._side_files is None or self.total_changes == self._num_changes:
            super().commit()
            return
        version = self._read("PRAGMA data_version")
        size, last_version = self._log
        if version == last_version and _size(self._side_files.wal_path) < size:
            # A checkpoint of another connection may shorten it, but would change `version`.
            why = f"{self._side_files.wal_path} was truncated while it was open"
            self._fail(self._side_files, why)
        self._advance()
        super().commit()
        self._num_changes = self.total_changes
        self._log = _size(self._side_files.wal_path), version
        if self._file is not None:
            self._length = _size(self._file.path)  # the commit may have done a checkpoint

    def rollback(self) -> None:
        """Roll back the open transaction."""
        super().rollback()
        self._num_changes = self.total_changes

    def close(self) -> None:
        """Close, unless that could damage what other processes have written.

        The last connection that closes does a checkpoint, and removes the -wal and -shm files by
        name.
        """
        if self._is_kept:
            return
        side_files, self._side_files = self._side_files, None
        if side_files is not None and side_files.failure is None and self._is_at_its_path():
            loss = side_files.loss()
            if loss is not None and loss.is_taken:
                self._keep(side_files, _given_up(loss))
                return
            if loss is not None and loss.can_be_saved:
                self._save()
        if side_files is not None:
            with _lock:
                side_files.users.discard(self)
        super().close()

    def _read(self, pragma: str) -> int:
        value: int = self.execute(pragma).fetchone()[0]
        return value

    def _is_at_its_path(self) -> bool:
        """Whether the database file is at its path. If not, SQLite's close changes no file."""
        with suppress(DatabaseUnavailableError):
            return self._file is not None and self._file.check() is not None
        return False

    def _lose(self, file: File, side_files: _SideFiles, loss: _Loss) -> NoReturn:
        """Raise for a lost -wal or -shm file, after saving earlier commits if possible."""
        if loss.is_taken:
            self._fail(side_files, _given_up(loss))
        what = f"{loss.path} was deleted while it was open; nothing was stored"
        again = "close the store in every process that has it open, then open it again"
        if loss.can_be_saved and not file.is_read_only:
            self._check_contents(file, side_files)
            if self._save():
                safe = f"all earlier commits are safe in {os.fspath(file.path)}"
                raise DatabaseReplacedError(f"{what}, and {safe}; {again}")
        raise DatabaseReplacedError(
            f"{what}; the newest commits reach the database when the store is closed, so do not "
            f"kill its processes: {again}"
        )

    def _save(self) -> bool:
        """Move all commits into the database. Returns whether that was possible.

        Meanwhile, connections that were opened later cannot write or read wrong data. SQLite does
        not let them read pages that their own -wal file does not have until this is complete.
        """
        with suppress(sqlite3.Error):
            if self.in_transaction:
                self.rollback()
            return self._read("PRAGMA wal_checkpoint(TRUNCATE)") == 0
        return False

    def _check_contents(self, file: File, side_files: _SideFiles) -> None:
        """Give up if anything but checkpoints has written to the database file."""
        for pause in (0.0, *_REREAD_PAUSES):
            time.sleep(pause)
            if self._is_as_expected(file):
                return
        path = os.fspath(file.path)
        if self._stored is None:
            what = f"{path} and {side_files.wal_path} do not belong together"
        else:
            what = f"{path} was overwritten or truncated while it was open"
        self._fail(
            side_files,
            f"{what}; stop all processes that have it open, remove its -wal and -shm files, and "
            "restore the database from a backup",
        )

    def _is_as_expected(self, file: File) -> bool:
        length = _size(file.path)
        try:
            before, schema = file.header()
            latest = self._read("PRAGMA user_version")
            # Unless this connection has an open transaction, others may have committed meanwhile.
            after = before if _steps(before, latest) <= 1 else file.header()[0]
        except sqlite3.Error as error:
            if error.sqlite_errorname.startswith(_DAMAGED):
                return False
            raise
        if _steps(before, latest) > _FAR or 1 < _steps(after, latest) <= _FAR:
            return False
        if self._stored is not None:
            last, last_schema = self._stored
            # Only VACUUM makes a database smaller, and it changes `schema_version`.
            if _steps(last, before) > _FAR or (length < self._length and schema == last_schema):
                return False
        self._stored, self._length = (before, schema), length
        return True

    def _advance(self) -> None:
        """Begin a new generation in the first commit after a checkpoint."""
        latest = self._read("PRAGMA user_version")
        if latest == 0:
            latest = random.randint(1, _GENERATIONS)  # noqa: S311
        elif self._stored is not None and latest == self._stored[0]:
            latest = latest % _GENERATIONS + 1
        else:
            return
        self.execute(str(set_user_version(latest).compile(dialect=_DIALECT)))

    def _fail(self, side_files: _SideFiles, why: str) -> NoReturn:
        """Give up all connections of this process."""
        self._keep(side_files, why)
        raise DatabaseReplacedError(why)

    def _keep(self, side_files: _SideFiles, why: str) -> None:
        """Stay open, and so keep a lock on the database, until the process ends.

        While one connection of a process is open, closing the others changes no file. The extra
        reference keeps the interpreter from closing this one when it exits.
        """
        with suppress(sqlite3.Error):  # release the locks of an open transaction
            self.rollback()
        with _lock:
            if side_files.failure is None:
                side_files.failure = why
                self._side_files, self._is_kept = side_files, True
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


def _given_up(loss: _Loss) -> str:
    return (
        f"{loss.path} was deleted while it was open, and another process has made a new one; the "
        "newest commits of this process may be lost; stop all processes that have the store open, "
        "then run `replaydb verify`"
    )


def _steps(earlier: int, later: int) -> int:
    """Return how many generations `later` is after `earlier`; from 0 to any other it is 1."""
    if earlier == 0 or later == 0:
        return 0 if later == earlier else 1 if earlier == 0 else _GENERATIONS
    return (later - earlier) % _GENERATIONS


def _identity(path: str | os.PathLike[str]) -> _Identity | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _size(path: str | os.PathLike[str]) -> int:
    with suppress(FileNotFoundError):
        return os.stat(path).st_size
    return 0
