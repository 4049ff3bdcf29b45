"""Time limits after which the server ends transactions of a client that has stalled."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.prepared import execute, prepared

#: The server ends a transaction this long after the deadline of the call that began it.
SERVER_GRACE_SECONDS = 5.0
#: The limits of a session are for calls of up to this many seconds. Longer ones set their own.
ORDINARY_SECONDS = 64.0
#: A transaction without locks may be idle for this long.
IDLE_IN_TRANSACTION_SECONDS = 60.0
#: The first version with `transaction_timeout`, which also ends a client that stalls while it sends
#: or receives a payload.
_BOUNDS_TRANSACTIONS = 17
_IDLENESS = "idle_in_transaction_session_timeout"
_KEY = "replaydb_has_limits"


async def set_limits(
    connection: AsyncConnection, seconds: float, idle_seconds: float, *, is_local: bool
) -> None:
    """Limit the open transaction of a connection; or, once, all that have no limits of their own.

    Args:
        connection: The connection; without a transaction unless `is_local`.
        seconds: The server ends the transaction after this time and a margin.
        idle_seconds: The server ends the transaction if the client sends nothing for this long. A
            call that may take an hour may also compute for longer between two statements. 0:
            without limit.
        is_local: Limit only this transaction. Otherwise `ORDINARY_SECONDS` replace `seconds`.
    """
    if is_local:
        await connection.run_sync(execute, await _limits(connection, seconds, idle_seconds, True))
    elif not connection.info.get(_KEY):
        limits = await _limits(connection, ORDINARY_SECONDS, idle_seconds, False)
        await connection.run_sync(execute, limits)
        await connection.commit()
        connection.info[_KEY] = True


async def _limits(
    connection: AsyncConnection, seconds: float, idle_seconds: float, is_local: bool
) -> Any:
    """Return the statement that sets both limits.

    Servers before version 17 have no limit of transactions. There it sets the other one twice.
    """
    longest = min(seconds / 60, IDLE_IN_TRANSACTION_SECONDS)
    idle = _milliseconds(max(idle_seconds, longest) if idle_seconds else 0.0)
    driver: Any = (await connection.get_raw_connection()).driver_connection
    if driver.get_server_version().major < _BOUNDS_TRANSACTIONS:
        return _set_limits(idle, _IDLENESS, idle, is_local)
    limit = _milliseconds(max(seconds, 0.0) + SERVER_GRACE_SECONDS)
    return _set_limits(idle, "transaction_timeout", limit, is_local)


def _milliseconds(seconds: float) -> str:
    return str(int(1000 * seconds))


#: Limits the idle time of a transaction that waits for a lock of the schema.
BOUND_IDLENESS = func.set_config(_IDLENESS, _milliseconds(IDLE_IN_TRANSACTION_SECONDS), True)


@prepared
def _set_limits(idle: Any, setting: Any, limit: Any, is_local: Any) -> Select[Any]:
    return select(
        func.set_config(_IDLENESS, idle, is_local), func.set_config(setting, limit, is_local)
    )
