"""Detection of SQLite files that were deleted, replaced, truncated or overwritten while open.

SQLite goes on with whatever it has open, and commits into files that no process can open again. So
each transaction compares the three files of a database with what is at their paths, before it
begins and before it commits.

The `-wal` and `-shm` files are known by their inodes. That cannot change by itself: an open
connection holds a shared lock on the database, and SQLite removes these files only under an
exclusive one.

The database file is written in place by checkpoints of any process, so a change of its contents may
be right or wrong. It is known by its generation: `PRAGMA user_version`, which is in its first page.
The first commit after a checkpoint increments it, in the `-wal` file. The next checkpoint moves it
into the database file. So what the database file has is always the generation that connections
see, or the one before, and never decreases. A new database begins with a random one.
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
from weakref import WeakValueDictionary

from sqlalchemy.dialects.sqlite.base import SQLiteDialect

from replaydb.database.engines.sqlite_sql import set_user_version
from replaydb.errors import DatabaseReplacedError, DatabaseUnavailableError

#: Generations are 1 to this, then 1 again; 0 is none. SQLite has 32 bits with a sign.
_GENERATIONS = 2**31 - 1
#: A file whose last change is not older may change again and keep its times: the clock that file
#: systems go by has ticks of up to 10 ms.
_TICK_NS = 10_000_000
#: Pauses before a file that looks wrong is read again: it may have been read while it was written.
_SECOND_LOOKS = (0.01, 0.05)

#: More steps than these are steps back.
_FAR = _GENERATIONS // 2
#: What SQLite says of a database, or a log, that has been overwritten or cut.
_DAMAGED = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_IOERR_SHORT_READ")

_Identity = tuple[int, int]
_DIALECT = SQLiteDialect()


class File(Protocol):
    """What a guard needs of a database file."""

    @property
    def path(self) -> os.PathLike[str]:
        """Where it is."""

    @property
    def is_read_only(self) -> bool:
        """Whether nothing may be written."""

    @property
    def is_immutable(self) -> bool:
        """Whether it is read without locks, and without any file beside it."""

    def check(self) -> os.stat_result:
        """Find it at its path, or raise `DatabaseUnavailableError`."""

    def header(self) -> tuple[int, int]:
        """Its own `user_version` and `schema_version`, without what is in the `-wal` file."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """A file beside the database is not the one that was opened.

    Attributes:
        path: Its path.
        is_taken: Whether other connections may have written to a file in its place.
        can_be_saved: Whether a checkpoint can move all commits into the database at once.
    """

    path: str
    is_taken: bool
    can_be_saved: bool


class _Beside:
    """The files beside a database as this process has them open, with all its connections.

    SQLite shares one `-shm` file among the connections of a process, whatever is at its path. So a
    new connection does not help while an older one is open.
    """

    def __init__(self, path: str) -> None:
        self.wal_path, self._shm_path = f"{path}-wal", f"{path}-shm"
        self._wal, self._shm = _identity(self.wal_path), _identity(self._shm_path)
        #: Why no connection of this process can be used any more.
        self.failure: str | None = None

    def loss(self) -> _Loss | None:
        """Compare the files with those at their paths."""
        wal, shm = _identity(self.wal_path), _identity(self._shm_path)
        if self._wal is None and self._shm is None:  # not in WAL mode until a writer opens it
            self._wal, self._shm = wal, shm
        if (wal, shm) == (self._wal, self._shm):
            return None
        is_shm_ours = shm == self._shm
        is_wal_taken = wal not in (self._wal, None)
        if is_wal_taken and is_shm_ours and not _size(self.wal_path):
            # Created by a connection that has not written. It cannot: the shared index of the log
            # names pages that it does not have.
            is_wal_taken = False
        return _Loss(
            self.wal_path if wal != self._wal else self._shm_path,
            is_taken=is_wal_taken or not (is_shm_ours or shm is None),
            # The locks in the -shm file are those that every other connection respects.
            can_be_saved=is_shm_ours and not is_wal_taken,
        )


#: By the identity of the database file. An entry goes when no connection refers to it any more.
_all_beside: WeakValueDictionary[_Identity, _Beside] = WeakValueDictionary()
_lock = threading.Lock()


def check_usable(path: os.PathLike[str]) -> None:
    """Raise if this process has given up a database: opening it again might change its files.

    Raises:
        DatabaseUnavailableError: It has.
    """
    identity = _identity(path)
    beside = None if identity is None else _all_beside.get(identity)
    if beside is not None and beside.failure is not None:
        raise DatabaseReplacedError(beside.failure)


class GuardedConnection(sqlite3.Connection):
    """A connection that commits only what every later connection will find."""

    _file: File | None = None
    _beside: _Beside | None = None
    _is_kept = False
    #: Size and times of the database file when its generation was last read.
    _seen: tuple[int, int, int] | None = None
    #: Generation and `PRAGMA schema_version` of the database file at that time.
    _stored: tuple[int, int] | None = None
    #: The least size of the database file, unless it is vacuumed.
    _length = 0
    #: Size of the -wal file after the last commit, and `PRAGMA data_version` at that time: it
    #: changes with the commits and checkpoints of other connections, but not with one's own.
    _log = (0, 0)
    #: `total_changes` when the last transaction ended.
    _num_changes = 0

    def guard(self, file: File) -> None:
        """Begin to watch the files, once the connection is configured.

        Raises:
            DatabaseUnavailableError: They do not belong together, or are not those that other
                connections of this process have open.
            sqlite3.Error: They cannot be read.
        """
        self._file = file
        self._read("PRAGMA schema_version")  # from now on all of them are open, and stay
        if not file.is_immutable:
            found = file.check()
            path = os.path.realpath(file.path)
            with _lock:
                self._beside = _all_beside.setdefault((found.st_dev, found.st_ino), _Beside(path))
        self.check()

    def check(self) -> None:
        """Compare the files with those at their paths; `commit` does so, too.

        Raises:
            DatabaseUnavailableError: They are not those that this connection has open.
            sqlite3.Error: They cannot be read.
        """
        file, beside = self._file, self._beside
        assert file is not None  # noqa: S101 - it is guarded
        found = file.check()
        if beside is None:
            return
        if beside.failure is not None:
            raise DatabaseReplacedError(beside.failure)
        if (loss := beside.loss()) is not None:
            self._lose(file, beside, loss)
        seen = found.st_size, found.st_mtime_ns, found.st_ctime_ns
        if seen != self._seen:
            self._check_contents(file, beside)
            self._seen = seen if time.time_ns() - found.st_ctime_ns > _TICK_NS else None

    def commit(self) -> None:
        """Commit, if the files are those that every later connection will open.

        Raises:
            DatabaseUnavailableError: They are not; nothing was committed.
            sqlite3.Error: SQLite's own reasons; nothing was committed.
        """
        if not self.in_transaction:
            return
        self.check()
        if self._beside is None or self.total_changes == self._num_changes:
            super().commit()
            return
        version = self._read("PRAGMA data_version")
        size, last_version = self._log
        if version == last_version and _size(self._beside.wal_path) < size:
            # Others may shorten it, but not unnoticed; a transaction of ours that is open, never.
            self._fail(self._beside, f"{self._beside.wal_path} was truncated while it was open")
        self._advance()
        super().commit()
        self._num_changes = self.total_changes
        self._log = _size(self._beside.wal_path), version
        if self._file is not None:
            self._length = _size(self._file.path)  # the commit may have done a checkpoint

    def rollback(self) -> None:
        """Undo what is not committed."""
        super().rollback()
        self._num_changes = self.total_changes

    def close(self) -> None:
        """Close, unless that could damage what others have written.

        SQLite's last connection to close does a checkpoint, and removes the files beside the
        database by their names.
        """
        if self._is_kept:
            return
        beside, self._beside = self._beside, None
        if beside is not None and beside.failure is None and self._is_at_its_path():
            loss = beside.loss()
            if loss is not None and loss.is_taken:
                self._keep(beside, _given_up(loss))
                return
            if loss is not None and loss.can_be_saved:
                self._save()
        super().close()

    def _read(self, pragma: str) -> int:
        value: int = self.execute(pragma).fetchone()[0]
        return value

    def _is_at_its_path(self) -> bool:
        """Whether the database is; if not, SQLite closes it without touching any file."""
        with suppress(DatabaseUnavailableError):
            return self._file is not None and self._file.check() is not None
        return False

    def _lose(self, file: File, beside: _Beside, loss: _Loss) -> NoReturn:
        """Raise for a file beside the database; what was committed before is saved if possible."""
        if loss.is_taken:
            self._fail(beside, _given_up(loss))
        what = f"{loss.path} was deleted while it was open; nothing was stored"
        again = "close the store in every process that has it open, then open it again"
        if loss.can_be_saved and not file.is_read_only:
            self._check_contents(file, beside)
            if self._save():
                safe = f"all earlier commits are safe in {os.fspath(file.path)}"
                raise DatabaseReplacedError(f"{what}, and {safe}; {again}")
        raise DatabaseReplacedError(
            f"{what}; the newest commits reach the database when the store is closed, so do not "
            f"kill its processes: {again}"
        )

    def _save(self) -> bool:
        """Move all commits into the database. Returns whether that was possible.

        No connection that came later can write meanwhile or read something wrong: what it has not
        in its own -wal file, SQLite does not let it read until this is complete.
        """
        with suppress(sqlite3.Error):
            if self.in_transaction:
                self.rollback()
            return self._read("PRAGMA wal_checkpoint(TRUNCATE)") == 0
        return False

    def _check_contents(self, file: File, beside: _Beside) -> None:
        """Give up if the database file has not been written by checkpoints alone."""
        for pause in (0.0, *_SECOND_LOOKS):
            time.sleep(pause)
            if self._is_as_expected(file):
                return
        path = os.fspath(file.path)
        if self._stored is None:
            what = f"{path} and {beside.wal_path} do not belong together"
        else:
            what = f"{path} was overwritten or truncated while it was open"
        self._fail(
            beside,
            f"{what}; stop all processes that have it open, remove its -wal and -shm files, and "
            "restore the database from a backup",
        )

    def _is_as_expected(self, file: File) -> bool:
        length = _size(file.path)
        try:
            before, schema = file.header()
            latest = self._read("PRAGMA user_version")
            # Unless a transaction of ours is open, others may have gone on meanwhile.
            after = before if _steps(before, latest) <= 1 else file.header()[0]
        except sqlite3.Error as error:
            if error.sqlite_errorname.startswith(_DAMAGED):
                return False
            raise
        if _steps(before, latest) > _FAR or 1 < _steps(after, latest) <= _FAR:
            return False
        if self._stored is not None:
            last, last_schema = self._stored
            # Only VACUUM makes a database smaller, and it changes the other number.
            if _steps(last, before) > _FAR or (length < self._length and schema == last_schema):
                return False
        self._stored, self._length = (before, schema), length
        return True

    def _advance(self) -> None:
        """Begin a generation with the first commit after a checkpoint."""
        latest = self._read("PRAGMA user_version")
        if latest == 0:
            latest = random.randint(1, _GENERATIONS)  # noqa: S311
        elif self._stored is not None and latest == self._stored[0]:
            latest = latest % _GENERATIONS + 1
        else:
            return
        self.execute(str(set_user_version(latest).compile(dialect=_DIALECT)))

    def _fail(self, beside: _Beside, why: str) -> NoReturn:
        """Give up all connections of this process."""
        self._keep(beside, why)
        raise DatabaseReplacedError(why)

    def _keep(self, beside: _Beside, why: str) -> None:
        """Stay open, and so keep a lock on the database, until the process ends.

        While one connection of a process is open, closing the others touches no file. This one
        would be closed by the interpreter at its end if nothing referred to it.
        """
        with suppress(sqlite3.Error):  # whatever holds up others
            self.rollback()
        with _lock:
            if beside.failure is None:
                beside.failure = why
                self._beside, self._is_kept = beside, True
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


def _given_up(loss: _Loss) -> str:
    return (
        f"{loss.path} was deleted while it was open, and another process has made a new one; the "
        "newest commits of this process may be lost; stop all processes that have the store open, "
        "then run `replaydb verify`"
    )


def _steps(earlier: int, later: int) -> int:
    """How many generations one is after another; from none to any it is one."""
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
