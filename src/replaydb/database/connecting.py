"""Connecting to PostgreSQL as libpq does: host after host, each in its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from itertools import product

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry

from replaydb.database.urls import PostgresqlURL
from replaydb.errors import InvalidURLError

logger = logging.getLogger(__name__)

_SINCE = "replaydb.connected_at"
#: What lets the next host be tried; a host that refuses the password does not, as with libpq.
_NEXT_HOST = (OSError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)


async def connect(url: PostgresqlURL, settings: Mapping[str, str]) -> asyncpg.Connection:
    """The first host that can be reached and is of the kind asked for.

    asyncpg would go through the hosts itself, but has one timeout for all of them: one that is
    silent would use it up.

    Raises:
        OSError, asyncpg.PostgresError: What the last one failed of.
        InvalidURLError: A parameter, or a variable such as PGSSLMODE, has a value that cannot be.
    """
    failed: Exception | None = None
    for kind, (host, port) in product(url.kinds, url.hosts or ((None, None),)):
        try:
            return await asyncpg.connect(
                url.dsn,
                host=host,
                port=port,
                target_session_attrs=kind,
                timeout=url.connect_seconds,
                server_settings=dict(settings),
            )
        except _NEXT_HOST as error:
            failed = error
        except ValueError as error:  # asyncpg's own are among them
            reason = " ".join(str(error).split())
            raise InvalidURLError("url", "parameters that can be used", reason) from error
    assert failed is not None  # noqa: S101 - there is one attempt at least
    raise failed


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
