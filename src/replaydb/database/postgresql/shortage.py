"""Shortage of connections: no process keeps one that it does not use while another waits."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from time import monotonic
from weakref import WeakSet

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry

from replaydb.database.postgresql.connecting import Connection, connect
from replaydb.database.urls import PostgresqlURL

logger = logging.getLogger(__name__)

#: How long a connection waits for others to be closed if the server has too many. For this time
#: after the last refusal, connections are closed after each use.
SHORTAGE_SECONDS = 60.0


class Shortage:
    """Closes idle connections of this process while the server refuses new ones."""

    def __init__(self) -> None:
        self._until = 0.0  # by `monotonic`
        self._idle: WeakSet[ConnectionPoolEntry] = WeakSet()

    def is_recent(self) -> bool:
        """Whether the server has recently refused a connection because it has too many."""
        return monotonic() < self._until

    async def connect(self, url: PostgresqlURL, settings: Mapping[str, str]) -> Connection:
        """Connect. If the server has too many connections, give up idle ones and wait.

        Other processes may wait for those. No process may keep a connection that it does not use
        while it waits for another.
        """
        end, pause = monotonic() + SHORTAGE_SECONDS, 0.05
        while True:
            try:
                return await connect(url, settings)
            except asyncpg.TooManyConnectionsError as error:
                if not self.is_recent():
                    logger.warning("%s: connections are closed after use: %s", url.shown, error)
                self._until = monotonic() + SHORTAGE_SECONDS
                while self._idle:
                    self._idle.pop().invalidate()
                if monotonic() + pause > end:
                    raise
            await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311
            pause = min(2 * pause, 1.0)

    def listen_to(self, engine: AsyncEngine) -> None:
        """Watch which connections of the pool of an engine are idle."""
        event.listen(engine.sync_engine, "checkin", self._checked_in)
        event.listen(engine.sync_engine, "checkout", self._checked_out)

    def _checked_in(self, _connection: object, entry: ConnectionPoolEntry) -> None:
        if self.is_recent():
            entry.invalidate()
        else:
            self._idle.add(entry)

    def _checked_out(self, _connection: object, entry: ConnectionPoolEntry, _: object) -> None:
        self._idle.discard(entry)
