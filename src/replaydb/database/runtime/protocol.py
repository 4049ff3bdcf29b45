"""Protocols of a database engine: everything that differs between SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from sqlalchemy import Index
from sqlalchemy.schema import ExecutableDDLElement

from replaydb.database.runtime.pool import Waits
from replaydb.database.runtime.session import Session, Work
from replaydb.database.runtime.signals import Signal
from replaydb.domain.results import Finding
from replaydb.errors import ReplayDBError
from replaydb.packs import Instance

Durability = Literal["process", "full"]

T = TypeVar("T")
#: Waits until another connection has taken a snapshot.
Pinned = Callable[[], Awaitable[object]]
#: Runs a transaction, or continues it, until a deadline.
Run = Callable[[Work[T], float], Awaitable[T]]


class LostRaceError(Exception):
    """Raised by work if another transaction was faster: the work must be run again."""


class Traits(NamedTuple):
    """What calls take into account of an engine.

    Attributes:
        small_draw_bytes: A draw of at most this many bytes also reads its payloads before it
            commits: holding its locks for that time costs less than a snapshot.
        concurrent_draws: Draws that may use a reader at the same time. Other reads use the
            remaining readers.
        turn_seconds: Pause between two transactions of a call, so that others that wait for a lock
            can get it.
        settling_seconds: How long after its deadline a call may still determine the outcome of its
            commit.
        syncs: Whether this process makes commits survive a power cut, as far as it can.
    """

    small_draw_bytes: int
    concurrent_draws: int
    turn_seconds: float
    settling_seconds: float
    syncs: bool


class Client(NamedTuple):
    """Connections of one version of replaydb, with the same user from the same host.

    Attributes:
        version: The version.
        user: The user of the database.
        host: Address of the client; None if it is unknown, or on the machine of the database.
        num_connections: Number of connections.
    """

    version: str
    user: str
    host: str | None
    num_connections: int


class Backend(Protocol):
    """One database engine."""

    #: Whether writes are refused.
    read_only: bool

    @property
    def shown(self) -> str:
        """The URL for messages, without passwords."""

    @property
    def traits(self) -> Traits:
        """What calls take into account."""
        ...

    @property
    def has_one_connection(self) -> bool:
        """Whether a call may use only one connection, at the moment.

        A draw then reads its payloads before it commits.
        """
        ...

    @property
    def errors(self) -> Errors:
        """The meaning of errors."""
        ...

    @property
    def loop(self) -> Loop:
        """The event loop in which all connections are used."""
        ...

    @property
    def schema(self) -> SchemaChanges:
        """Changes of the tables."""
        ...

    @property
    def administration(self) -> Administration:
        """What an administrator asks of the database."""
        ...

    def writer(self, waits: Waits) -> Transactions:
        """Return connections for transactions that write. It is one if the engine needs that."""

    def reader(self, waits: Waits) -> Transactions:
        """Return connections for read-only transactions, each of which reads one snapshot."""

    def signal(self) -> Signal:
        """Return the signal of commits, also of other processes, which wakes waiting coroutines."""


class Errors(Protocol):
    """What errors mean, of the driver, the network and the system."""

    def typed(self, error: BaseException) -> ReplayDBError | None:
        """Return the typed error for an error of the driver; None for other errors."""

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the transaction lost a race and was rolled back, so that it can be run again."""

    def is_outage(self, error: BaseException) -> bool:
        """Whether the database or the network was unavailable, and may recover by itself."""


class Loop(Protocol):
    """An event loop that may be another one than that of the caller."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Run a coroutine in it.

        If the caller is cancelled, the coroutine is cancelled, and has ended when this returns.
        """

    def time(self, time: float) -> float:
        """Convert a time of the caller's event loop to a time of this one."""
        ...

    async def close(self) -> None:
        """End it, if it is not the caller's."""


class Transactions(Protocol):
    """Connections, and the transactions on them. Deadlines are times of the backend's loop."""

    def write(
        self,
        work: Work[T],
        end: float,
        answer_by: float,
        *,
        committing: Callable[[], object] | None = None,
        begin_to_read: Callable[[T], Awaitable[Pinned]] | None = None,
        is_needed: Callable[[T], bool] = bool,
    ) -> Coroutine[Any, Any, T]:
        """Run work in a transaction, and commit. Returns only if committed.

        Args:
            work: The transaction.
            end: Its deadline. The database itself rolls it back some time later.
            answer_by: If there is no answer to COMMIT by then, the outcome is read on another
                connection, for some time after `end`.
            committing: Called just before COMMIT. If it raises an error, nothing is stored.
            begin_to_read: Called with the result of work if that `is_needed`. COMMIT waits for what
                it returns, which the statements that precede it do not.
            is_needed: Whether to call `begin_to_read`.

        Raises:
            TimeoutError: It was not done by `end`.
            OutcomeUnknownError: The outcome could not be read in time.
            Exception: Nothing was stored.
        """

    def read(self, work: Work[T], end: float, *, single: bool = False) -> Coroutine[Any, Any, T]:
        """Run work in a transaction, and roll it back.

        Args:
            work: The transaction. Its first statement takes the snapshot.
            end: Its deadline.
            single: On a server, `work` runs a single statement, for which the transaction is
                omitted.

        Raises:
            TimeoutError: It was not done by `end`.
        """

    def snapshot(self, end: float) -> AbstractAsyncContextManager[Run[Any]]:
        """Open a transaction. Yields a function that runs work in it."""

    def cut_off(self) -> None:
        """Terminate all connections at once. Calls that use them get an error."""

    async def close(self) -> None:
        """Close the connections, none of which is in use."""


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

    async def change(self, work: Work[T], *, create: bool = False) -> T:
        """Run a transaction that may change tables, in one process at a time.

        A table can be rebuilt in it without deleting its child rows.

        Args:
            work: The transaction.
            create: Create a file that does not exist.

        Raises:
            DatabaseError: The database does not exist or refused, or rows would refer to rows that
                do not exist.
        """

    async def read(self, work: Work[T]) -> T:
        """Run a read-only transaction on a connection of its own.

        Raises:
            DatabaseError: The database does not exist, or cannot be read.
        """

    def lock_tables(self, session: Session, names: Collection[str]) -> None:
        """Lock tables before they are changed, without blocking others while this waits.

        Raises:
            DatabaseUnavailableError: Other transactions use them all the time.
        """

    def share(self, session: Session) -> None:
        """Block `change` of others until the transaction ends."""

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

    def clients(self, session: Session) -> list[Client]:
        """Return the connected clients, as far as the database knows and shows them."""
        ...

    def examine(self, session: Session) -> list[Finding]:
        """Return the findings of a health check of the engine and the database. Reads only."""

    def replication_lag(self, session: Session) -> float | None:
        """Return by how many seconds a standby is behind its primary; None if it is no standby."""
        ...

    def damage(self, session: Session) -> list[tuple[str, str]]:
        """Return where the engine finds damaged pages, indexes or values, and what is wrong."""

    async def size(self) -> int:
        """Return the bytes that the tables take on disk, including indexes and free space."""
        ...

    async def vacuum(self) -> None:
        """Rewrite the tables without the space of deleted rows. Other transactions wait.

        Raises:
            DatabaseError: The driver's error, typed.
        """

    def instance(self, session: Session) -> Instance:
        """Return the facts that distinguish this database from its copies."""
        ...

    def last_ids(self, session: Session) -> dict[str, int | None]:
        """Return the last generated id of each table of `schema.GENERATED`, 0 before the first.

        None: the engine keeps no sequence of that table, and continues after its largest id. Tables
        whose sequences this user may not read are missing.
        """

    def advance_sequences(self, session: Session, ids: Mapping[str, int]) -> None:
        """Generate only ids after these, by table. Sequences that are past them do not change."""


class Roles(Protocol):
    """Roles for users."""

    def statements(
        self, session: Session, prefix: str, tables: Sequence[str], *, apply: bool
    ) -> list[ExecutableDDLElement]:
        """Return the statements that create roles for users. All of them may read these tables.

        Raises:
            DatabaseError: They are to be run (`apply`), and the server would ignore some of them
                because the user may not grant these privileges.
        """
