"""Connections to PostgreSQL as libpq opens them: hosts in order, each with its own timeout."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import sqlalchemy
from sqlalchemy import Dialect
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect

from replaydb.database.urls import PostgresqlURL
from replaydb.errors import DatabaseUnavailableError, InvalidURLError

if TYPE_CHECKING:
    from replaydb.database.postgresql.commits import Commit, Transaction

#: After 15 s of silence 3 probes are sent, one every 5 s. Data must be acknowledged within 30 s.
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}
#: One for all connections, each of which would otherwise compile every prepared statement again.
DIALECT: Dialect = asyncpg_dialect(dbapi=asyncpg_dialect.import_dbapi())  # type: ignore[no-untyped-call]
#: Prepared statements of a connection.
STATEMENTS = 200
#: A rollback that takes longer than this is abandoned, and so is the end of a connection.
ROLLBACK_SECONDS = 1.0
CLOSE_SECONDS = 2.0
#: Age of a connection at which its plans are first discarded, and from which no longer, in seconds.
#:
#: PostgreSQL keeps the plans of prepared statements until their tables are analyzed. Autovacuum
#: analyzes those of a new database after one or two minutes. Until then a connection would run
#: plans for empty tables, such as one that reads all groups of a buffer by any index. Therefore the
#: plans of a connection are discarded each time its age has doubled: the tables have then at most
#: about doubled since the statements were planned.
YOUNG, OLD = 1.0, 1000.0
#: Arrays of all types of which statements that write bind or return arrays. asyncpg asks about a
#: type when a statement first uses it, in three round trips, often while the first transactions of
#: a connection hold locks. So a connection that writes runs this statement first.
ARRAYS = """
    SELECT CAST(NULL AS bool[]), CAST(NULL AS bytea[]), CAST(NULL AS smallint[]),
        CAST(NULL AS integer[]), CAST(NULL AS bigint[]), CAST(NULL AS float8[]),
        CAST(NULL AS text[]), CAST(NULL AS varchar[]), CAST(NULL AS timestamptz[]),
        CAST(NULL AS json[]), CAST(NULL AS uuid[]), ARRAY(SELECT ROW() WHERE false)
"""
#: Errors after which the next host is tried. As in libpq, a refused password is not one of them.
_NEXT_HOST = (OSError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)
#: Transactions.
WRITING = "BEGIN ISOLATION LEVEL READ COMMITTED"
READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class Connection(asyncpg.Connection):  # type: ignore[misc]
    """A connection, and what is known about it.

    Attributes:
        core: The connection as SQLAlchemy's. It neither begins nor ends transactions.
        opened_at: When it was opened, a time of the event loop.
        is_given_up: Whether this process has closed it, not the server.
        proof: Its last transaction that was to be committed.
        checked: Commits that its server is known to have.
    """

    core: sqlalchemy.Connection
    is_given_up = False
    proof: Transaction | None = None
    checked: Mapping[UUID, Commit] | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.opened_at = asyncio.get_running_loop().time()
        self._replan_at = self.opened_at + YOUNG

    @property
    def is_usable(self) -> bool:
        """Whether another transaction may run."""
        return not self.is_closed()

    @property
    def is_open(self) -> bool:
        """Whether a transaction has begun and not ended."""
        return bool(self.is_in_transaction())

    async def begin(self, statements: str) -> None:
        """Begin a transaction and set its limits, in one round trip."""
        await self.execute(statements)

    async def commit(self) -> None:
        """Commit the transaction."""
        await self.execute("COMMIT")

    def renewal(self) -> list[str]:
        """Return a statement that discards the plans, if they are too old."""
        now = asyncio.get_running_loop().time()
        if now < self._replan_at:
            return []
        age = now - self.opened_at
        self._replan_at = now + age if age < OLD else math.inf
        return ["DISCARD PLANS"]

    async def abandon(self) -> None:
        """Roll back. If the network has stalled, close the connection on this side only."""
        try:
            async with asyncio.timeout(ROLLBACK_SECONDS):
                await self.execute("ROLLBACK")
        except Exception:  # the error that led here matters more
            self.terminate()

    async def close(self, *, timeout: float | None = CLOSE_SECONDS) -> None:
        """Close it, within a timeout."""
        self.is_given_up |= not self.is_closed()
        with suppress(Exception):  # asyncpg has terminated it
            await super().close(timeout=timeout)

    def terminate(self) -> None:
        """Close it without waiting for the server. What waits for an answer gets an error."""
        self.is_given_up |= not self.is_closed()
        super().terminate()

    cut_off = terminate


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
