"""Detection of a connection pooler, such as PgBouncer, between this process and the server."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from replaydb.database.postgresql.connecting import connect
from replaydb.database.urls import PostgresqlURL
from replaydb.domain.results import Finding

if TYPE_CHECKING:
    import asyncpg

Pooled = Literal["nothing", "sessions", "transactions"]
#: Transactions of each of two clients. While a pooler is idle, one is enough to detect sharing.
ATTEMPTS = 5


async def finding(url: PostgresqlURL) -> Finding:
    """Compare what connections lead through with what the URL says.

    Raises:
        OSError, asyncpg.PostgresError: No connection can be opened.
    """
    pooled = await find_pooled(url)
    if pooled == "transactions" and not url.through_pgbouncer:
        return Finding(
            "bad",
            "pooler",
            "connections lead through a pooler that pools transactions, but the URL has no "
            "parameter `pgbouncer`: settings and prepared statements of a call affect others",
            "add pgbouncer=true to the URL; the other checks did not run",
        )
    if pooled != "transactions" and url.through_pgbouncer:
        given = "prepared" if url.prepares else "true"
        found = "through a pooler of sessions" if pooled == "sessions" else "to the server itself"
        return Finding(
            "warning",
            "pooler",
            f"pgbouncer={given}, but connections lead {found}: calls take more round trips than "
            "they need, and waiting calls are not notified",
            f"remove pgbouncer={given} from the URL, or connect to a PgBouncer that pools "
            "transactions",
        )
    if pooled == "nothing":
        return Finding("good", "pooler", "none: connections lead to the server itself")
    return Finding("good", "pooler", f"it pools {pooled}")


async def find_pooled(url: PostgresqlURL) -> Pooled:
    """Return what a pooler pools, "nothing" if there is none.

    A server tells a new client the id of the process that serves it. A pooler tells another number.
    If it pools transactions, several processes serve one client, or one serves several clients.
    """
    unprepared = replace(url, prepares=False)
    async with AsyncExitStack() as stack:

        async def open_one() -> asyncpg.Connection:
            connection = await connect(unprepared, url.settings)
            stack.callback(connection.terminate)
            return connection

        one = await open_one()
        if await _process_of(one) == one.get_server_pid():
            return "nothing"
        other = await open_one()
        ones: set[int] = set()
        others: set[int] = set()
        for _ in range(ATTEMPTS):
            ones |= {await _process_of(one), await _process_of(one)}
            others.add(await _process_of(other))
            if len(ones) > 1 or ones & others:
                return "transactions"
        return "sessions"


async def _process_of(connection: asyncpg.Connection) -> int:
    """Return the id of the server process that serves the next transaction."""
    async with connection.transaction():
        pid: int = await connection.fetchval("SELECT pg_backend_pid()")
    return pid
