"""SQLite: one file, one writer at a time, readers that never wait for it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Select,
    column,
    delete,
    event,
    func,
    insert,
    select,
    table,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry, NullPool, Pool
from sqlalchemy.schema import ExecutableDDLElement
from sqlalchemy.util import await_

from replaydb.cancellation import to_the_end
from replaydb.database.engines import (
    sqlite_checkup,
    sqlite_damage,
    sqlite_sql,  # noqa: F401 - how its SQL is written
)
from replaydb.database.engines.protocol import T, Work
from replaydb.database.engines.signals import Signal
from replaydb.database.engines.sqlite_driver import AdaptedConnection, Begin, EagerConnection
from replaydb.database.engines.sqlite_file import DatabaseFile
from replaydb.database.engines.sqlite_guard import GuardedConnection
from replaydb.database.engines.sqlite_payloads import read_payloads
from replaydb.database.prepared import execute
from replaydb.database.schema import GENERATED, episode_group
from replaydb.errors import (
    DatabaseError,
    DatabaseFullError,
    DatabaseReadOnlyError,
    DatabaseUnavailableError,
    NotSupportedError,
    ReplayDBError,
)
from replaydb.results import Finding

#: Connections that read: some for draws, as many for everything else.
READERS = 8
#: How long SQLite itself waits for others, during which a call can be neither ended nor cancelled.
BUSY_SECONDS = 0.5
#: How long a writer waits for writers of other processes before it gives up.
LOCK_SECONDS = 60.0
#: Waiting coroutines look for commits of other processes this often: (at first, when idle).
WATCH_SECONDS = (0.002, 0.05)

#: Writers wait for each other in `_begin_immediate`, not inside SQLite.
_WAIT_IN_LOOP = "PRAGMA busy_timeout = 0"

_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs",
                        "fuse.glusterfs", "glusterfs", "lustre", "beegfs", "gpfs"}  # fmt: skip


class SqliteBackend:
    """`sqlite:///FILE`."""

    has_one_connection = False
    concurrent_writes = 1
    small_draw_bytes = 4 << 20  # a millisecond or two
    turn_seconds = 0.006  # they look every 5 ms: see `_pauses`
    settling_seconds = math.inf  # a commit is always answered

    def __init__(
        self,
        url: URL,
        durability: str,
        *,
        read_only: bool = False,
        pool_size: int | None = None,
    ) -> None:
        self._url = url.set(drivername="sqlite+aiosqlite")
        self._file = DatabaseFile(Path(url.database or ""), read_only=read_only)
        self._path = self._file.path
        self.read_only = read_only
        self._readers = pool_size or READERS
        self.concurrent_draws = max(1, self._readers // 2)
        self.syncs = durability == "full"
        self._synchronous = f"PRAGMA synchronous = {'FULL' if self.syncs else 'NORMAL'}"

    @property
    def shown(self) -> str:
        """There is nothing to hide."""
        return self._url.set(drivername="sqlite").render_as_string()

    @property
    def file(self) -> Path:
        """The database."""
        return self._path

    def is_new_file(self) -> bool:
        """As the file system has it."""
        return self._file.is_new()

    def writer_engine(self) -> AsyncEngine:
        """One connection, for which the writers of this process take turns."""
        return self._engine(
            self._pragmas(_WAIT_IN_LOOP),
            begin=_begin_immediate,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=1,
            max_overflow=0,
            pool_timeout=None,  # the call has an end
        )

    def reader_engine(self) -> AsyncEngine:
        """A few connections that cannot write."""
        return self._engine(
            [
                *(() if self.read_only else self._pragmas()),
                # Payloads pass through it once: what is in the processor's cache is large enough.
                "PRAGMA cache_size = -256",
                "PRAGMA query_only = ON",
            ],
            begin=_begin_deferred,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=self._readers,
            max_overflow=0,
            pool_timeout=None,
        )

    def migration_engine(self) -> AsyncEngine:
        """Foreign keys are off: rebuilding a table would otherwise delete its children."""
        return self._engine(
            self._pragmas("PRAGMA foreign_keys = OFF", _WAIT_IN_LOOP),
            begin=_begin_immediate,
            create=True,
            poolclass=NullPool,
        )

    async def begin(self, connection: AsyncConnection, end: float) -> None:
        """Nothing yet: BEGIN goes along with the first statement."""

    async def run(self, connection: AsyncConnection, work: Work[T], end: float) -> T:
        """All of it in the thread of the connection: a hop costs more than most statements."""
        return await _driver_of(connection).run(connection.run_sync(work), end)

    async def finish(
        self,
        connection: AsyncConnection,
        work: Work[T],
        end: float,
        hear_by: float,
        *,
        unless: Callable[[T], bool] | None = None,
    ) -> T:
        """COMMIT goes along too."""

        def whole(connection: Connection) -> T:
            result = work(connection)
            if unless is None or not unless(result):
                connection.commit()
            return result

        return await self.run(connection, whole, end)

    async def commit(self, connection: AsyncConnection, end: float, hear_by: float) -> None:
        """Nothing can come between a commit and its answer."""
        await connection.commit()

    async def abandon(self, connection: AsyncConnection) -> None:
        """A file always answers."""
        with suppress(Exception):  # the error that led here matters more
            await connection.rollback()

    def cut_off(self, driver_connection: Any) -> None:
        """Interrupt the statement."""
        cast("EagerConnection", driver_connection).cut_off()

    def signal(self, watched: Callable[[AsyncEngine], AsyncEngine]) -> Signal:
        """Watches the file's change counter."""
        return _SqliteSignal(self._file)

    def translate(self, error: BaseException) -> ReplayDBError | None:
        """By the error's name, never by its text."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(cause, "sqlite_errorname", None)
        if isinstance(cause, MemoryError):
            return DatabaseUnavailableError(f"{self._path}: not enough memory")
        if isinstance(cause, OSError):
            return DatabaseUnavailableError(f"{self._path}: {cause.strerror or cause}")
        if name is None:
            # Damage in a file comes back as it is: JSON that is none, text that is not UTF-8.
            damage = isinstance(cause, sqlite3.Error | json.JSONDecodeError | UnicodeDecodeError)
            return DatabaseError(f"{self._path}: {cause}") if damage else None
        kind: type[DatabaseError] = DatabaseError
        if name in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):  # the latter: no room for the -shm
            kind = DatabaseFullError
        elif name.startswith("SQLITE_READONLY"):
            kind = DatabaseReadOnlyError
        elif name.startswith(("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_IOERR", "SQLITE_BUSY")):
            kind = DatabaseUnavailableError
        return kind(f"{self._path}: {cause} ({name})")

    def is_conflict(self, error: BaseException) -> bool:
        """Never: a writer that has begun is alone."""
        return False

    def is_outage(self, error: BaseException) -> bool:
        """Another process was in the way: rarely, when it recovers or resets the log."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(cause, "sqlite_errorname", None) or ""
        return name.startswith(("SQLITE_BUSY", "SQLITE_PROTOCOL"))

    async def check_target(self) -> None:
        """WAL needs shared memory, which network filesystems do not have."""
        try:
            kind = await asyncio.to_thread(_filesystem_of, self._path)
        except RuntimeError as error:
            raise DatabaseUnavailableError(f"{self._path}: {error}") from error
        if kind in _NETWORK_FILESYSTEMS:
            raise NotSupportedError(
                f"{self._path} is on a network filesystem ({kind}), where SQLite loses data; "
                "use a local disk, or PostgreSQL to share a store between machines"
            )

    def examine(self, connection: Connection) -> list[Finding]:
        """The library, the file, its log and its disk."""
        return list(sqlite_checkup.findings(connection, self._path))

    def damage(self, connection: Connection) -> list[tuple[str, str]]:
        """By its own check; and values of other kinds than their columns, which it takes."""
        return list(sqlite_damage.damage(connection))

    def check_roles(self) -> None:
        """The file system says who may do what."""
        raise NotSupportedError(
            f"{self._path}: a file has no roles; its permissions say who may read and write it, "
            "and Store.open(url, read_only=True) only looks"
        )

    def role_statements(
        self, connection: Connection, prefix: str, tables: Sequence[str]
    ) -> list[ExecutableDDLElement]:
        """There are none."""
        return []

    async def lock_schema(self, connection: AsyncConnection) -> None:
        """Nothing to do: BEGIN IMMEDIATE already let one writer in."""

    def share_schema(self, connection: Connection) -> None:
        """Nothing to do: whoever writes is alone."""

    async def check_integrity(self, connection: AsyncConnection) -> None:
        """What foreign keys would have refused, had they been on."""
        broken = (await connection.exec_driver_sql("PRAGMA foreign_key_check")).all()
        if broken:
            raise DatabaseError(
                f"{self._path}: {len(broken)} rows would refer to rows that are gone, "
                f"the first in table {broken[0][0]!r}"
            )

    async def size(self) -> int:
        """The file, and commits that have not been moved into it."""
        return await asyncio.to_thread(self._file.size)

    async def vacuum(self) -> None:
        """The whole file; it shrinks when the log that this leaves is moved into it."""
        connect = partial(self._file.connect, timeout=LOCK_SECONDS)
        try:
            connection = await EagerConnection.open(connect, _begin_deferred)
            try:
                await connection.execute_fetchall("VACUUM")
                await connection.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")
            except asyncio.CancelledError:
                connection.cut_off()
                raise
            finally:
                await to_the_end(connection.close())
        except sqlite3.Error as error:
            raise self.translate(error) or error from error

    def now(self, connection: Connection) -> datetime:
        """This machine's: every client of the file is on it."""
        return datetime.now(UTC)

    def allocate_group_ids(self, connection: Connection, count: int) -> Sequence[int]:
        """As AUTOINCREMENT does: after its own counter and the largest id, if that is larger."""
        last = connection.scalar(_LAST_GROUP_ID) or 0
        return range(last + 1, last + 1 + count)

    def last_ids(self, connection: Connection) -> dict[str, int | None]:
        """AUTOINCREMENT's own counters; a table has one from its first row on."""
        last = {row.name: row.seq for row in execute(connection, _LAST_IDS)}
        return {one.name: last.get(one.name, 0) if one in _COUNTED else None for one in GENERATED}

    def advance_sequences(self, connection: Connection, ids: Mapping[str, int]) -> None:
        """The same counters."""
        last = self.last_ids(connection)
        for name, value in ids.items():
            if (found := last[name]) is not None and found < value:
                execute(connection, delete(_SEQUENCE).where(_SEQUENCE.c.name == name))
                execute(connection, insert(_SEQUENCE).values(name=name, seq=value))

    def read_payloads(self, connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Large ones as blobs."""
        return read_payloads(connection, ids)

    def _pragmas(self, *more: str) -> list[str]:
        return [
            "PRAGMA page_size = 16384",  # takes effect in a new file, and only before WAL
            "PRAGMA journal_mode = WAL",
            self._synchronous,
            "PRAGMA foreign_keys = ON",
            "PRAGMA journal_size_limit = 67108864",
            *more,
        ]

    def _engine(
        self,
        pragmas: Sequence[str],
        *,
        begin: Begin,
        create: bool = False,
        poolclass: type[Pool],
        **pool: Any,
    ) -> AsyncEngine:
        file = self._file
        seconds = LOCK_SECONDS if create else BUSY_SECONDS
        connect = partial(file.connect, pragmas, timeout=seconds, create=create)

        def begin_guarded(connection: Any, check: Callable[[], None]) -> None:
            cast("GuardedConnection", connection).check()
            begin(connection, check)

        engine = create_async_engine(
            self._url,
            poolclass=poolclass,
            hide_parameters=True,
            **pool,
        )

        @event.listens_for(engine.sync_engine, "do_connect")
        def open_file(dialect: Dialect, *_: object) -> AdaptedConnection:
            opened: Any = await_(EagerConnection.open(connect, begin_guarded))
            return AdaptedConnection(dialect.loaded_dbapi, opened)

        @event.listens_for(engine.sync_engine, "begin")
        def begin_soon(connection: Connection) -> None:
            driver: Any = connection.connection.driver_connection
            cast("EagerConnection", driver).begin_soon()

        if self.read_only:

            @event.listens_for(engine.sync_engine, "checkin")
            def use_once(_: object, record: ConnectionPoolEntry) -> None:
                if file.is_immutable:
                    record.invalidate()

        return engine


def _driver_of(connection: AsyncConnection) -> EagerConnection:
    assert connection.sync_connection is not None  # noqa: S101 - it is connected
    return cast("EagerConnection", connection.sync_connection.connection.driver_connection)


def _begin_deferred(connection: sqlite3.Connection, check: Callable[[], None]) -> None:
    connection.execute("BEGIN")


def _begin_immediate(connection: sqlite3.Connection, check: Callable[[], None]) -> None:
    """BEGIN IMMEDIATE, waiting for other processes.

    Inside SQLite's own busy handler a cancelled coroutine could not end the wait.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    for pause in _pauses():
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
                raise
            if time.monotonic() > deadline:
                raise DatabaseUnavailableError(
                    f"another process has had the write lock for {LOCK_SECONDS:g} s (SQLITE_BUSY)"
                ) from error
            time.sleep(pause)
            check()
        else:
            return


def _pauses() -> Iterator[float]:
    """Seconds, up to 5 ms, with jitter so that waiters do not march in step."""
    longest = 0.0005
    while True:
        yield random.uniform(longest / 2, longest)  # noqa: S311
        longest = min(2 * longest, 0.005)


_SEQUENCE = table("sqlite_sequence", column("name"), column("seq"))
_LAST_IDS = select(_SEQUENCE.c.name, func.max(_SEQUENCE.c.seq).label("seq")).group_by(
    _SEQUENCE.c.name
)
_LAST_GROUP_ID: Select[int] = select(
    func.max(  # of two values: the larger one
        func.coalesce(
            select(func.max(_SEQUENCE.c.seq))
            .where(_SEQUENCE.c.name == episode_group.name)
            .scalar_subquery(),
            0,
        ),
        func.coalesce(select(func.max(episode_group.c.id)).scalar_subquery(), 0),
    )
)
#: Tables that never generate an id twice, whatever is deleted.
_COUNTED = frozenset(one for one in GENERATED if one.dialect_options["sqlite"]["autoincrement"])


class _SqliteSignal(Signal):
    """`PRAGMA data_version` changes when another connection, of any process, has committed."""

    def __init__(self, file: DatabaseFile) -> None:
        super().__init__()
        self._connect = partial(file.connect, timeout=BUSY_SECONDS)

    async def _watch(self) -> None:
        connection = await EagerConnection.open(self._connect, _begin_deferred)
        try:
            shortest, longest = WATCH_SECONDS
            pause, seen = shortest, None
            while True:
                rows = await connection.execute_fetchall("PRAGMA data_version")
                version = next(iter(rows))[0]
                if version == seen:
                    pause = min(2 * pause, longest)
                else:
                    pause = shortest
                    self._wake()
                seen = version
                await asyncio.sleep(pause)
        finally:
            await to_the_end(connection.close())

    def _publish(self) -> None:
        """The file itself tells."""


def _filesystem_of(path: Path) -> str | None:
    """Type of the filesystem that holds `path`, where the system lists its mounts."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf8").splitlines()
    except OSError:
        return None
    resolved = Path(os.path.realpath(path))  # which does not fail where links form a loop
    best, kind = -1, None
    for mount in mounts:
        _, point, filesystem, *_ = mount.split(" ")
        folder = Path(point.replace("\\040", " "))
        if resolved.is_relative_to(folder) and len(folder.parts) > best:
            best, kind = len(folder.parts), filesystem
    return kind
