"""Connecting to PostgreSQL as libpq does: host after host, each in its time."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from itertools import product

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry

from replaydb.database.engines.urls import PostgresqlURL
from replaydb.errors import DatabaseUnavailableError, InvalidURLError

logger = logging.getLogger(__name__)

#: Probes after 15 s of silence, every 5 s, 3 of them; what was sent is confirmed within 30 s.
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}
_SINCE = "replaydb.connected_at"
#: What lets the next host be tried; a host that refuses the password does not, as with libpq.
_NEXT_HOST = (OSError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)


async def connect(url: PostgresqlURL, settings: Mapping[str, str]) -> asyncpg.Connection:
    """The first host that can be reached and is of the kind asked for.

    asyncpg would go through the hosts itself, but has one timeout for all of them: one that is
    silent would use it up.

    Raises:
        OSError, asyncpg.PostgresError: What the last one failed of.
        DatabaseUnavailableError: No thread can be started.
        InvalidURLError: A parameter, or a variable such as PGSSLMODE, has a value that cannot be.
    """
    failed: Exception | None = None
    for kind, (host, port) in product(url.kinds, url.hosts or ((None, None),)):
        try:
            connection = await asyncpg.connect(
                url.dsn,
                host=host,
                port=port,
                target_session_attrs=kind,
                timeout=url.connect_seconds,
                server_settings=dict(settings),
                # PgBouncer has each transaction on another connection of the server.
                statement_cache_size=0 if url.through_pgbouncer else 100,
            )
            _keep_alive(connection)
            return connection
        except _NEXT_HOST as error:
            failed = error
        except RuntimeError as error:  # names are looked up in a thread
            raise DatabaseUnavailableError(f"no connection can be opened: {error}") from error
        except ValueError as error:  # asyncpg's own are among them
            reason = " ".join(str(error).split())
            raise InvalidURLError("url", "parameters that can be used", reason) from error
    assert failed is not None  # noqa: S101 - there is one attempt at least
    raise failed


def _keep_alive(connection: asyncpg.Connection) -> None:
    """Let the operating system notice a host that is gone, also while nobody waits for it.

    libpq has parameters for this; asyncpg has none, and shows its socket nowhere else.
    """
    at: socket.socket = connection._transport.get_extra_info("socket")
    if at.family != socket.AF_UNIX:
        at.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not on every system
                at.setsockopt(socket.IPPROTO_TCP, option, value)


class ConnectionLog:
    """Tells once that the connections to a database were lost, and once that it is back."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._lost = False
        self._told = 0.0

    def listen_to(self, engine: AsyncEngine) -> None:
        """Watch the connections of an engine."""
        event.listen(engine.sync_engine, "connect", self._connected)
        event.listen(engine.sync_engine, "invalidate", self._invalidated)

    def _connected(self, _connection: object, record: ConnectionPoolEntry) -> None:
        record.info[_SINCE] = time.monotonic()
        if self._lost:
            self._lost = False
            logger.info("%s: connected again", self._shown)

    def _invalidated(
        self, _connection: object, record: ConnectionPoolEntry, error: BaseException | None
    ) -> None:
        # Without an error, or with a cancellation, it is our own doing. Connections from before the
        # last loss were lost with it, though each is noticed when its turn comes.
        if isinstance(error, Exception) and record.info.get(_SINCE, 0.0) >= self._told:
            self._lost, self._told = True, time.monotonic()
            reason = f": {error}" if error.args else ""
            logger.warning("%s: a connection was lost%s", self._shown, reason)
