"""Protocol of a database engine: everything that differs between SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from sqlalchemy import Connection, Index
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.schema import ExecutableDDLElement

from replaydb.database.runtime.signals import Signal
from replaydb.database.runtime.writes import Write
from replaydb.domain.results import Finding
from replaydb.errors import DatabaseError, ReplayDBError
from replaydb.packs import Instance

Durability = Literal["process", "full"]

T = TypeVar("T")
#: Runs statements and processes their rows. It may wait only for its connection.
Work = Callable[[Connection], T]
#: Waits until another connection has taken a snapshot.
Pinned = Callable[[], Awaitable[object]]


class Identified(NamedTuple):
    """What is known about groups before they are put.

    Attributes:
        stored: Ids of the groups that are stored, by uid.
        new: A new id for each uid.
        has_children: Whether the children of those that are not stored were inserted.
        taken_error: Why the new ids cannot be used, if they cannot and all groups are stored.
    """

    stored: dict[str, int]
    new: Sequence[int]
    has_children: bool
    taken_error: DatabaseError | None = None


class LostRaceError(Exception):
    """Raised by work if another transaction was faster: the work must be run again."""


class Backend(Protocol):
    """One database engine.

    The SQLAlchemy engines made here emit their own BEGIN, so `connection.begin()` begins a
    transaction. One of a reader has a snapshot. One of a writer is exclusive if the engine allows
    only one writer.
    """

    #: Whether writes are refused.
    read_only: bool
    #: A draw of at most this many bytes also reads its payloads before it commits: holding its
    #: locks for that time costs less than a snapshot.
    small_draw_bytes: int
    #: Whether this process makes commits survive a power cut, as far as it can.
    syncs: bool
    #: Transactions that may write at the same time. Others wait in order of arrival.
    concurrent_writes: int
    #: Draws that may use a reader at the same time. Other reads use the remaining readers.
    concurrent_draws: int
    #: Pause between two transactions of a call, so that others that wait for a lock can get it.
    turn_seconds: float

    @property
    def has_one_connection(self) -> bool:
        """Whether a call may use only one connection, at the moment.

        A draw then reads its payloads before it commits.
        """
        ...

    @property
    def settling_seconds(self) -> float:
        """How long after its deadline a call may still determine the outcome of its commit."""

    @property
    def schema(self) -> SchemaChanges:
        """Changes of the tables."""
        ...

    @property
    def administration(self) -> Administration:
        """What an administrator asks of the database."""
        ...

    @property
    def shown(self) -> str:
        """The URL for messages, without passwords."""

    def writer_engine(self) -> AsyncEngine:
        """Return an engine for read-write transactions."""

    def reader_engine(self) -> AsyncEngine:
        """Return an engine for read-only transactions, each of which reads one snapshot."""

    def without_transactions(self, reader: AsyncEngine) -> AsyncEngine:
        """Return a reader on the same connections, for calls that run one statement on a server."""

    def run_in_loop(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run a coroutine in the event loop in which all connections of this backend are used.

        If the caller is cancelled, the coroutine is cancelled, and has ended when this returns.
        """

    def loop_time(self, time: float) -> float:
        """Convert a time of the caller's event loop to a time of that loop."""
        ...

    async def end_loop(self) -> None:
        """End that event loop, if it is not the caller's."""

    async def begin(self, connection: AsyncConnection, end: float) -> None:
        """Begin a transaction, which the database itself rolls back some time after `end`.

        Raises:
            TimeoutError: It did not begin by `end`.
            Exception: The connection is dead; `is_outage` is true for the error.
        """

    def run(self, connection: AsyncConnection, work: Work[T], end: float) -> Coroutine[Any, Any, T]:
        """Run work in the best thread for this engine.

        Raises:
            TimeoutError: It was not done by `end`, a time of the event loop.
        """

    def finish(
        self,
        connection: AsyncConnection,
        work: Work[T],
        end: float,
        answer_by: float,
        *,
        unless: Callable[[T], bool] | None = None,
        committing: Callable[[], object] | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Run work and commit, in one step. Do not commit if `unless` is true for the result.

        `committing` is called just before COMMIT. If it raises an error, nothing is stored.
        """

    async def commit(
        self,
        connection: AsyncConnection,
        end: float,
        answer_by: float,
        pinned: Pinned | None = None,
    ) -> None:
        """Commit. Returns only if committed, and raises an outage only if not.

        COMMIT waits for `pinned`, which the statements that precede it do not. If there is no
        answer by `answer_by`, the outcome is read on another connection, for some
        time after `end`.

        Raises:
            OutcomeUnknownError: The outcome could not be read in time.
        """

    async def abandon(self, connection: AsyncConnection) -> None:
        """Roll back. A connection that does not answer is terminated. Never fails."""

    def cut_off(self, driver_connection: Any) -> None:
        """Terminate a connection at once. A call that waits for it gets an error."""

    def signal(self, watched: Callable[[AsyncEngine], AsyncEngine]) -> Signal:
        """Return the signal that wakes waiting coroutines, also of other processes, after commits.

        An engine that the signal creates is passed to `watched`, so that its connections can be
        terminated.
        """

    def translate(self, error: BaseException) -> ReplayDBError | None:
        """Return the typed error for an error of the driver; None for other errors."""

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the transaction lost a race and was rolled back, so that it can be run again."""

    def is_outage(self, error: BaseException) -> bool:
        """Whether the database or the network was unavailable, and may recover by itself."""

    def now(self, connection: Connection) -> datetime:
        """Return the time for leases and deadlines, from one clock for all clients."""

    def identify(
        self,
        connection: Connection,
        buffer_id: int,
        uids: Sequence[str],
        *,
        children: Sequence[Write],
    ) -> Identified:
        """Find the groups that have these uids, and generate a new id for each uid.

        New ids are ascending. One that is used is never returned again. Groups that are stored need
        new ids only if they are renewed, or deleted before they are locked.

        The `children` of groups that are not stored yet may be inserted as well. Instead of
        `group_id` these rows have the position of the uid of their group, from 1.
        """

    def read_payloads(self, connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of `payload` of groups, with `data` as bytes or as a view of bytes.

        Those in packs have the pack's name as `pack`.
        """


class SchemaChanges(Protocol):
    """How the tables of a database are made and changed."""

    @property
    def file(self) -> Path | None:
        """The file of the database, which opening a store may create; None for a server."""

    def is_new_file(self) -> bool:
        """Whether the database is a file that does not exist yet, or is empty."""
        ...

    async def check_target(self, *, exists: bool = False) -> None:
        """Refuse a target that cannot work, such as a file on NFS, before anything is opened.

        Args:
            exists: Also refuse a file that does not exist, which a connection could create.
        """

    def engine(self) -> AsyncEngine:
        """Return an engine on which a table can be rebuilt without deleting its child rows."""

    async def lock(self, connection: AsyncConnection) -> None:
        """Let only one migration run until the transaction ends."""

    async def lock_tables(self, connection: AsyncConnection, names: Collection[str]) -> None:
        """Lock tables before they are changed, without blocking others while this waits.

        Raises:
            DatabaseUnavailableError: Other transactions use them all the time.
        """

    def share(self, connection: Connection) -> None:
        """Block `lock` of other transactions until the transaction ends."""

    async def check_integrity(self, connection: AsyncConnection) -> None:
        """Raise if rows refer to rows that do not exist. Called in a migration's transaction."""

    async def create_indexes(
        self, indexes: Sequence[Index], notify: Callable[[int, int | None], object]
    ) -> None:
        """Create those of these indexes that are missing or invalid.

        A server does so while others read and write, and calls `notify` with the number of blocks
        or rows processed in the current phase, and their total.
        """


class Administration(Protocol):
    """What an administrator asks of a database, and tells it."""

    @property
    def roles(self) -> Roles | None:
        """Roles for users; None if the engine has none."""

    async def examine_connections(self, end: float) -> list[Finding]:
        """Return findings about the way to the database. After a bad one nothing else works."""
        ...

    def examine(self, connection: Connection) -> list[Finding]:
        """Return the findings of a health check of the engine and the database. Reads only."""

    def replication_lag(self, connection: Connection) -> float | None:
        """Return by how many seconds a standby is behind its primary; None if it is no standby."""
        ...

    def damage(self, connection: Connection) -> list[tuple[str, str]]:
        """Return where the engine finds damaged pages, indexes or values, and what is wrong."""

    async def size(self) -> int:
        """Return the bytes that the tables take on disk, including indexes and free space."""
        ...

    async def vacuum(self) -> None:
        """Rewrite the tables without the space of deleted rows. Other transactions wait.

        Raises:
            DatabaseError: The driver's error, typed.
        """

    def instance(self, connection: Connection) -> Instance:
        """Return the facts that distinguish this database from its copies."""
        ...

    def last_ids(self, connection: Connection) -> dict[str, int | None]:
        """Return the last generated id of each table of `schema.GENERATED`, 0 before the first.

        None: the engine keeps no sequence of that table, and continues after its largest id. Tables
        whose sequences this user may not read are missing.
        """

    def advance_sequences(self, connection: Connection, ids: Mapping[str, int]) -> None:
        """Generate only ids after these, by table. Sequences that are past them do not change."""


class Roles(Protocol):
    """Roles for users."""

    def statements(
        self, connection: Connection, prefix: str, tables: Sequence[str], *, apply: bool
    ) -> list[ExecutableDDLElement]:
        """Return the statements that create roles for users. All of them may read these tables.

        Raises:
            DatabaseError: They are to be run (`apply`), and the server would ignore some of them
                because the user may not grant these privileges.
        """
