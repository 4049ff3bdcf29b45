"""Changes of the tables on PostgreSQL, while others use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Index, Select, column, func, select, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only, greenlet_spawn

from replaydb.database.postgresql import index_builds
from replaydb.database.postgresql.connecting import READING, WRITING, Connection
from replaydb.database.postgresql.limits import BOUND_IDLENESS
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.postgresql.sql import command
from replaydb.database.runtime.session import Session, Work
from replaydb.database.tables.schema import own_tables
from replaydb.errors import DatabaseUnavailableError

if TYPE_CHECKING:
    from replaydb.database.postgresql.backend import PostgresqlBackend

T = TypeVar("T")

_SCHEMA_LOCK = 0x7265_706C_6179_6462  # "replaydb"
#: How long a migration tries to lock the tables, in seconds.
LOCK_SECONDS = 600.0
#: Pause in seconds between two attempts, for the calls that wait behind it.
LOCK_PAUSE = 0.5
#: SQLSTATE of a lock that was not granted in time, and of a deadlock.
_LOCK_FAILED = {"55P03", "40P01"}


class PostgresqlSchema:
    """How the tables of a database are changed."""

    #: None: a server has the database.
    file = None

    def __init__(self, backend: PostgresqlBackend) -> None:
        self._backend = backend

    def is_new_file(self) -> bool:
        """Return False: the database is not a file."""
        return False

    async def check_target(self, *, exists: bool = False) -> None:
        """Do nothing: a connection attempt finds out."""

    async def change(self, work: Work[T], *, create: bool = False) -> T:
        """Run it under an advisory lock. DDL is transactional, and constraints are enforced."""

        def locked(session: Session) -> T:
            session.core.execute(_lift_limits(is_local=True))
            session.core.execute(select(BOUND_IDLENESS, func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
            return work(session)

        async with self._backend.alone() as connection:
            await connection.begin(WRITING)
            result = await greenlet_spawn(locked, self._session(connection))
            await connection.commit()
        return result

    async def read(self, work: Work[T]) -> T:
        """Run it in a snapshot."""
        async with self._backend.alone() as connection:
            await connection.begin(READING)
            return await greenlet_spawn(work, self._session(connection))

    def _session(self, connection: Connection) -> PostgresqlSession:
        return PostgresqlSession(connection, self._backend.shown)

    def lock_tables(self, session: Session, names: Collection[str]) -> None:
        """Lock them all at once, or try again a moment later.

        Calls that use a table wait behind a transaction that waits to lock it. So it waits only for
        a second at a time, and others work meanwhile. With all locks, it cannot deadlock later.
        """
        tables, core = sorted(own_tables().keys() & set(names)), session.core
        if not tables:
            return
        lock = f"LOCK TABLE {', '.join('{}' for _ in tables)} IN ACCESS EXCLUSIVE MODE"
        end = monotonic() + LOCK_SECONDS
        while True:
            try:
                with core.begin_nested():
                    core.execute(_lock_timeout("1s"))
                    core.execute(command(lock, *tables))
                break
            except DBAPIError as error:
                state = getattr(error.orig, "sqlstate", None)
                if state not in _LOCK_FAILED:
                    raise
                if monotonic() > end:
                    raise DatabaseUnavailableError(
                        f"{self._backend.shown}: the tables could not be locked in "
                        f"{LOCK_SECONDS:.0f} s, because other transactions use them. Nothing was "
                        "changed. End long reads, such as exports and backups, and try again"
                    ) from error
            await_only(asyncio.sleep(LOCK_PAUSE))
        core.execute(_lock_timeout("0"))

    def share(self, session: Session) -> None:
        """Take the same advisory lock in shared mode."""
        session.run(select(func.pg_advisory_xact_lock_shared(_SCHEMA_LOCK)))

    async def create_indexes(
        self, indexes: Sequence[Index], notify: Callable[[int, int | None], object]
    ) -> None:
        """Create them concurrently, without a time limit."""
        async with self._backend.alone() as connection, self._backend.alone() as observer:
            if not self._backend.url.through_pgbouncer:  # it gives the session to others later
                limits = _lift_limits("lock_timeout", is_local=False)
                await greenlet_spawn(connection.core.execute, limits)
            await index_builds.create_missing(connection, observer, indexes, notify)


_SETTINGS = table("pg_settings", column("name"))


def _lift_limits(*more: str, is_local: bool) -> Select[str]:
    """Remove limits of the transaction or session. Not every server has all of them."""
    limits = ["statement_timeout", "transaction_timeout", *more]
    return select(func.set_config(_SETTINGS.c.name, "0", is_local)).where(
        _SETTINGS.c.name.in_(limits)
    )


def _lock_timeout(value: str) -> Select[str]:
    """Set `lock_timeout` until the transaction ends."""
    return select(func.set_config("lock_timeout", value, True))
