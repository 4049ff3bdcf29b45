"""The connections of one process: during a shortage, none that it does not use is kept."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any

import asyncpg
from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import greenlet_spawn

from replaydb.database.postgresql import standby
from replaydb.database.postgresql.connecting import Connection, connect
from replaydb.database.postgresql.errors import PostgresqlErrors
from replaydb.database.runtime.pool import Pool, Waits
from replaydb.database.urls import PostgresqlURL
from replaydb.util import release
from replaydb.util.cancellation import run_to_completion

logger = logging.getLogger(__name__)

#: How long a connection waits for others to be closed if the server has too many. For this time
#: after the last refusal, connections are closed after each use.
SHORTAGE_SECONDS = 60.0
#: `application_name` of connections, before the version of the client.
CLIENT_NAME = "replaydb "
#: Opens a connection.
Open = Callable[[], Awaitable[Connection]]


class Connections:
    """Opens the connections to one database, and closes those that others need."""

    def __init__(self, url: PostgresqlURL, errors: PostgresqlErrors) -> None:
        self._url = url
        self._errors = errors
        self._pools: list[Pool[Connection]] = []
        self._short_until = 0.0  # by `monotonic`
        self._lost_at = 0.0  # a time of the event loop
        self._is_lost = False

    def is_short(self) -> bool:
        """Whether the server has recently refused a connection because it has too many."""
        return monotonic() < self._short_until

    def pool(self, opened: Open, size: int, num_kept: int, waits: Waits) -> Pool[Connection]:
        """Return a pool of connections, the idle ones of which others may need."""
        made = Pool(opened, size, waits, lambda: 0 if self.is_short() else num_kept)
        self._pools.append(made)
        return made

    def opening(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        url: PostgresqlURL | None = None,
        prepare: Callable[[Connection], Awaitable[object]] | None = None,
    ) -> Open:
        """Return a function that opens connections with these settings, and prepares them."""
        url = url or self._url
        settings = {
            "application_name": f"{CLIENT_NAME}{release.VERSION}",
            **(settings or {}),
            **url.settings,
        }
        unnamed: Any = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
        engine = create_async_engine(
            "postgresql+asyncpg://",  # SQLAlchemy never sees the password
            connect_args={
                "async_creator_fn": partial(self._connect, url, settings),
                **({} if url.prepares else unnamed),
            },
            hide_parameters=True,
            isolation_level="AUTOCOMMIT",
            poolclass=NullPool,
        ).sync_engine
        if prepare is not None:
            event.listen(engine, "connect", lambda one, _: one.run_async(prepare))
        return partial(_open, engine)

    @asynccontextmanager
    async def connected(self, opened: Open | None = None) -> AsyncIterator[Connection]:
        """Open a connection for the block."""
        connection = await (opened or self.opening())()
        try:
            yield connection
        except BaseException as error:
            _end_cancelled(connection, error)
            raise
        finally:
            await run_to_completion(connection.close())

    @asynccontextmanager
    async def used(self, pool: Pool[Connection], end: float) -> AsyncIterator[Connection]:
        """Use a connection of a pool for the block. If it was lost, give it up."""
        async with pool.connection(end) as connection:
            try:
                yield connection
            except BaseException as error:
                _end_cancelled(connection, error)
                if not connection.is_closed() and connection.is_open:
                    await run_to_completion(connection.abandon())
                if connection.is_closed() and isinstance(error, Exception):
                    self.lose(connection, error)
                raise

    def lose(self, connection: Connection, error: Exception) -> None:
        """Give up the idle connections, since an outage has probably ended them, too."""
        if self._errors.is_outage(error):
            self._discard_idle()
        self._note_loss(connection, f": {error}" if error.args else "")

    def cut_off(self) -> None:
        """Close those of all pools without waiting for the server."""
        for pool in self._pools:
            pool.cut_off()

    def _ended(self, connection: Connection) -> None:
        if not connection.is_given_up:
            self._note_loss(connection)

    def _note_loss(self, connection: Connection, reason: str = "") -> None:
        """Log it, unless the connection was lost with another one."""
        if connection.opened_at >= self._lost_at:
            self._is_lost, self._lost_at = True, asyncio.get_running_loop().time()
            logger.warning("%s: a connection was lost%s", self._url.shown, reason)

    def _discard_idle(self) -> None:
        for pool in self._pools:
            pool.discard()

    async def _connect(self, url: PostgresqlURL, settings: Mapping[str, str]) -> Connection:
        """Connect. If the server has too many connections, give up idle ones and wait.

        Other processes may wait for those. No process may keep a connection that it does not use
        while it waits for another.
        """
        end, pause = monotonic() + SHORTAGE_SECONDS, 0.05
        while True:
            try:
                connection = await connect(url, settings)
                break
            except asyncpg.TooManyConnectionsError as error:
                if not self.is_short():
                    logger.warning("%s: connections are closed after use: %s", url.shown, error)
                self._short_until = monotonic() + SHORTAGE_SECONDS
                self._discard_idle()
                if monotonic() + pause > end:
                    raise
            await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311
            pause = min(2 * pause, 1.0)
        connection.add_termination_listener(self._ended)
        self._errors.is_standby = standby.is_standby(connection)
        if self._is_lost:
            self._is_lost = False
            logger.info("%s: connected again", self._url.shown)
        return connection


def _end_cancelled(connection: Connection, error: BaseException) -> None:
    """Close a connection on which a statement was cancelled, which may still run."""
    if isinstance(error, TimeoutError) or not isinstance(error, Exception):
        connection.terminate()


async def _open(engine: Engine) -> Connection:
    core = await greenlet_spawn(engine.connect)
    connection: Any = core.connection.driver_connection
    core.detach()  # from the pool of SQLAlchemy, which would warn of a connection that is kept
    connection.core = core
    opened: Connection = connection
    return opened
