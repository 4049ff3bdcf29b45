"""Changes of the tables on PostgreSQL, while others use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Index, Select, column, func, select, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import NullPool

from replaydb.database.postgresql import index_builds, sql
from replaydb.database.postgresql.limits import BOUND_IDLENESS
from replaydb.database.tables.schema import own_tables
from replaydb.errors import DatabaseUnavailableError

if TYPE_CHECKING:
    from replaydb.database.postgresql.backend import PostgresqlBackend

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

    def engine(self) -> AsyncEngine:
        """Return an engine without a pool. DDL is transactional, so it needs nothing else."""
        return self._backend.engine(isolation_level="READ COMMITTED", poolclass=NullPool)

    async def lock(self, connection: AsyncConnection) -> None:
        """Take an advisory lock until the transaction ends, and lift its time limits."""
        await connection.execute(_lift_limits(is_local=True))
        lock = func.pg_advisory_xact_lock(_SCHEMA_LOCK)
        await connection.execute(select(BOUND_IDLENESS, lock))

    async def lock_tables(self, connection: AsyncConnection, names: Collection[str]) -> None:
        """Lock them all at once, or try again a moment later.

        Calls that use a table wait behind a transaction that waits to lock it. So it waits only for
        a second at a time, and others work meanwhile. With all locks, it cannot deadlock later.
        """
        tables = [one for name, one in own_tables().items() if name in names]
        if not tables:
            return
        end = monotonic() + LOCK_SECONDS
        while True:
            try:
                async with connection.begin_nested():
                    await connection.execute(_lock_timeout("1s"))
                    await connection.execute(sql.lock_tables(tables))
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
            await asyncio.sleep(LOCK_PAUSE)
        await connection.execute(_lock_timeout("0"))

    def share(self, connection: Connection) -> None:
        """Take the same advisory lock in shared mode."""
        connection.execute(select(func.pg_advisory_xact_lock_shared(_SCHEMA_LOCK)))

    async def check_integrity(self, connection: AsyncConnection) -> None:
        """Do nothing: constraints are enforced during DDL."""

    async def create_indexes(
        self, indexes: Sequence[Index], notify: Callable[[int, int | None], object]
    ) -> None:
        """Create them concurrently, without a time limit."""
        async with self._backend.alone() as connection, self._backend.alone() as observer:
            if not self._backend.url.through_pgbouncer:  # it gives the session to others later
                await connection.execute(_lift_limits("lock_timeout", is_local=False))
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
