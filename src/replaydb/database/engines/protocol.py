"""What differs between SQLite and PostgreSQL, as one Protocol; everything else is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.schema import ExecutableDDLElement

from replaydb.database.engines.signals import Signal
from replaydb.errors import ReplayDBError
from replaydb.results import Finding

Durability = Literal["process", "full"]

T = TypeVar("T")
#: Statements, and what is done with their rows; it waits for nothing but its connection.
Work = Callable[[Connection], T]


class LostRaceError(Exception):
    """Raised by work that finds that others were quicker: it is to be run again."""


class Backend(Protocol):
    """One database engine.

    Engines made here emit their own BEGIN, so a transaction is one `connection.begin()`:
    a writer's is exclusive where the engine has one writer, a reader's is a snapshot.
    """

    #: Whether nothing may be written.
    read_only: bool
    #: Whether a call has one connection only: a draw then reads its payloads before it commits.
    has_one_connection: bool
    #: A draw of no more reads its payloads before it commits, too: to hold its locks for so long is
    #: cheaper than a snapshot.
    small_draw_bytes: int
    #: Whether what is committed survives a power cut, as far as that is up to this process.
    syncs: bool
    #: Transactions that may write at once; the others wait in the order they came.
    concurrent_writes: int
    #: Draws that may have a reader at once; some are left for everybody else.
    concurrent_draws: int
    #: For how long the lock must be free for others who wait for it to find it so.
    turn_seconds: float

    @property
    def settling_seconds(self) -> float:
        """What it may take beyond its end to find out what became of a commit."""

    @property
    def shown(self) -> str:
        """The URL as it may be shown: without passwords."""

    @property
    def file(self) -> Path | None:
        """The file that holds the database, which may be made without asking; None: a server."""

    def is_new_file(self) -> bool:
        """Whether the database is a file that does not exist yet, or is empty."""
        ...

    def writer_engine(self) -> AsyncEngine:
        """Connections for read-write transactions."""

    def reader_engine(self) -> AsyncEngine:
        """Connections for read-only snapshots: every statement of one sees the same data."""

    def migration_engine(self) -> AsyncEngine:
        """Connections on which tables may be rebuilt without touching their children."""

    async def begin(self, connection: AsyncConnection, end: float) -> None:
        """Begin the transaction, which the database itself undoes some time after `end`.

        Raises an error of an outage where the connection turns out to be dead, and TimeoutError
        where it did not begin by `end`.
        """

    async def run(self, connection: AsyncConnection, work: Work[T], end: float) -> T:
        """Run work, in the thread that is best for it.

        Raises:
            TimeoutError: It was not done by `end`, a time of the event loop.
        """

    async def finish(
        self,
        connection: AsyncConnection,
        work: Work[T],
        end: float,
        hear_by: float,
        *,
        unless: Callable[[T], bool] | None = None,
    ) -> T:
        """Run work, and commit, in one go; unless that is not to be yet, by what work returned."""

    async def commit(self, connection: AsyncConnection, end: float, hear_by: float) -> None:
        """Commit; returns only if it was done, and raises an outage only if it was not.

        Where the answer has not come by `hear_by`, it is asked for, for some time after `end`.

        Raises:
            OutcomeUnknownError: Nobody can be asked whether it was.
        """

    async def abandon(self, connection: AsyncConnection) -> None:
        """Roll back; a connection that does not answer is cut off. Never fails."""

    def cut_off(self, driver_connection: Any) -> None:
        """End a connection at once, whatever it is doing; who waits for it gets an error."""

    def signal(self, watched: Callable[[AsyncEngine], AsyncEngine]) -> Signal:
        """Tells waiting coroutines, also of other processes, that something was committed.

        An engine of its own is to be `watched`, so that its connections can be cut off.
        """

    def translate(self, error: BaseException) -> ReplayDBError | None:
        """The typed error for what a driver raised; None where it is not the driver's."""

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the transaction lost a race, left nothing behind and may simply run again."""

    def is_outage(self, error: BaseException) -> bool:
        """Whether the database, or the way to it, was gone, and may come back by itself."""

    async def check_target(self) -> None:
        """Refuse, before anything is opened, what cannot work (such as a file on NFS)."""

    def examine(self, connection: Connection) -> list[Finding]:
        """What is good, and what is not, of the engine and the database. Reads only."""

    def damage(self, connection: Connection) -> list[tuple[str, str]]:
        """Where the engine finds that its pages, indexes or values can not be right, and why."""

    def check_roles(self) -> None:
        """Raise `NotSupportedError` where nobody has a role."""

    def role_statements(
        self, connection: Connection, prefix: str, tables: Sequence[str]
    ) -> list[ExecutableDDLElement]:
        """What makes the roles that operators give to users, who may all read these tables."""

    async def lock_schema(self, connection: AsyncConnection) -> None:
        """Let one migration run at a time, until the transaction ends."""

    def share_schema(self, connection: Connection) -> None:
        """Keep whoever would lock the schema waiting, until the transaction ends."""

    async def check_integrity(self, connection: AsyncConnection) -> None:
        """Inside a migration's transaction: raise where rows refer to rows that are gone."""

    async def size(self) -> int:
        """Bytes that the tables take where they are stored, indexes and free space included."""
        ...

    async def vacuum(self) -> None:
        """Write the tables anew, without the space of rows that are gone; others wait.

        Raises:
            DatabaseError: The driver's error, typed.
        """

    def now(self, connection: Connection) -> datetime:
        """The time that leases and deadlines go by, the same for every client."""

    def allocate_group_ids(self, connection: Connection, count: int) -> Sequence[int]:
        """Ids for new groups, ascending, never given twice."""

    def last_ids(self, connection: Connection) -> dict[str, int | None]:
        """Return the last generated id of each table of `schema.GENERATED`, 0 before the first.

        None: the engine keeps no sequence of that table, and continues after its largest id. Tables
        whose sequences this user may not read are missing.
        """

    def advance_sequences(self, connection: Connection, ids: Mapping[str, int]) -> None:
        """Generate only ids after these, by table. Sequences that are past them do not change."""

    def read_payloads(self, connection: Connection, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of `payload` of some groups, their `data` as bytes or as a view of them."""
