"""Connections to PostgreSQL as libpq opens them: hosts in order, each with its own timeout."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from itertools import product
from typing import Any

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry

from replaydb.database.urls import PostgresqlURL
from replaydb.errors import DatabaseUnavailableError, InvalidURLError

logger = logging.getLogger(__name__)

#: After 15 s of silence 3 probes are sent, one every 5 s. Data must be acknowledged within 30 s.
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}
#: Prepared statements of a connection.
STATEMENTS = 200
_SINCE = "replaydb.connected_at"
#: Arrays of all types of which statements that write bind or return arrays.
_ARRAYS = """
    SELECT CAST(NULL AS bool[]), CAST(NULL AS bytea[]), CAST(NULL AS smallint[]),
        CAST(NULL AS integer[]), CAST(NULL AS bigint[]), CAST(NULL AS float8[]),
        CAST(NULL AS text[]), CAST(NULL AS varchar[]), CAST(NULL AS timestamptz[]),
        CAST(NULL AS json[]), CAST(NULL AS uuid[]), ARRAY(SELECT ROW() WHERE false)
"""
#: Errors after which the next host is tried. As in libpq, a refused password is not one of them.
_NEXT_HOST = (OSError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)


class Connection(asyncpg.Connection):  # type: ignore[misc]
    """A connection that sends a statement with its next BEGIN, in one round trip."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first_statement = ""  # without parameters; its rows are ignored

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """Run a query. asyncpg's transactions run BEGIN with this method."""
        if not query.startswith("BEGIN") or not self.first_statement:
            status: str = await super().execute(query, *args, timeout=timeout)
            return status
        query, self.first_statement = f"{query} {self.first_statement}", ""
        try:
            status = await super().execute(query, timeout=timeout)
        except asyncpg.PostgresError:
            if not self.is_closed():  # the transaction has begun, unlike asyncpg assumes
                self._top_xact = None
                await super().execute("ROLLBACK")
            raise
        return status


async def connect(url: PostgresqlURL, settings: Mapping[str, str]) -> Connection:
    """Connect to the first host that can be reached and has the requested `target_session_attrs`.

    asyncpg can try several hosts itself, but with one timeout for all of them. A host that does not
    answer would use it up.

    Raises:
        OSError, asyncpg.PostgresError: The error of the last host.
        DatabaseUnavailableError: No thread can be started, or the server requests an authentication
            method that asyncpg does not support.
        InvalidURLError: A parameter, or a variable such as PGSSLMODE, has an invalid value.
    """
    failed: Exception | None = None
    for kind, (host, port) in product(url.kinds, url.hosts or ((None, None),)):
        try:
            connection: Connection = await asyncpg.connect(
                url.dsn,
                connection_class=Connection,
                host=host,
                port=port,
                target_session_attrs=kind,
                timeout=url.connect_seconds,
                server_settings=dict(settings),
                direct_tls=url.direct_tls,
                # Behind PgBouncer each transaction may use another connection of the server.
                statement_cache_size=STATEMENTS if url.prepares else 0,
                max_cacheable_statement_size=0,  # no maximum: combined statements are long
            )
            _keep_alive(connection)
            return connection
        except _NEXT_HOST as error:
            failed = error
        except RuntimeError as error:  # host names are resolved in a thread
            raise DatabaseUnavailableError(f"no connection can be opened: {error}") from error
        except (asyncpg.InvalidParameterValueError, asyncpg.UndefinedObjectError) as error:
            expected = "parameters that the server accepts"
            raise InvalidURLError(url.source(str(error)), expected, str(error)) from error
        except ValueError as error:  # asyncpg raises subclasses of it
            reason = " ".join(str(error).split())
            raise InvalidURLError("url", "valid parameters", reason) from error
        except asyncpg.InterfaceError as error:  # such as an unknown authentication method
            raise DatabaseUnavailableError(f"no connection can be opened: {error}") from error
    assert failed is not None  # noqa: S101 - there is at least one attempt
    raise failed


def _keep_alive(connection: asyncpg.Connection) -> None:
    """Enable TCP keepalives, so that the operating system detects a host that is gone.

    libpq has parameters for this. asyncpg has none, so this uses its private transport.
    """
    at: socket.socket = connection._transport.get_extra_info("socket")
    if at.family != socket.AF_UNIX:
        at.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not on every system
                at.setsockopt(socket.IPPROTO_TCP, option, value)


def read_types(connection: Any, _record: ConnectionPoolEntry) -> None:
    """Let a new connection ask the server about array types.

    asyncpg asks about a type when a statement first uses it, in three round trips. Otherwise that
    would often be while the first transactions of a connection hold locks.
    """
    connection.run_async(lambda driver: driver.fetch(_ARRAYS))


def connected_at(connection: AsyncConnection) -> float:
    """Return when a connection was opened, by `monotonic`."""
    return float(connection.info[_SINCE])


class ConnectionLog:
    """Logs once when the connections to a database are lost, and once when it is back."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._lost = False
        self._logged_at = 0.0

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
        # Without an error, or with a cancellation, this process has closed the connection. Those
        # from before the last loss were lost with it, but each is detected only when it is used.
        if isinstance(error, Exception) and record.info.get(_SINCE, 0.0) >= self._logged_at:
            self._lost, self._logged_at = True, time.monotonic()
            reason = f": {error}" if error.args else ""
            logger.warning("%s: a connection was lost%s", self._shown, reason)
