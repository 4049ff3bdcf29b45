"""Plans of prepared statements, which PostgreSQL keeps until their tables are analyzed.

Autovacuum analyzes the tables of a new database after one or two minutes. Until then a connection
would run plans for empty tables, such as one that reads all groups of a buffer by any index.
Therefore the plans of a connection are discarded each time its age has doubled: the tables have
then at most about doubled since the statements were planned.
"""

from __future__ import annotations

import math

from sqlalchemy.ext.asyncio import AsyncConnection

#: Age of a connection at which its plans are first discarded, and from which no longer, in seconds.
YOUNG, OLD = 1.0, 1000.0
_KEY = "replaydb_plans"


async def renew(connection: AsyncConnection, now: float) -> None:
    """Discard the plans of a connection with its next BEGIN, if they are too old.

    Args:
        connection: The connection, without a transaction.
        now: Time of the event loop.
    """
    began, due = connection.info.setdefault(_KEY, (now, now + YOUNG))
    if now < due:
        return
    age = now - began
    connection.info[_KEY] = began, now + age if age < OLD else math.inf
    driver = (await connection.get_raw_connection()).driver_connection
    assert driver is not None  # noqa: S101 - it is connected
    driver.first_statement = "; ".join(filter(None, [driver.first_statement, "DISCARD PLANS"]))
