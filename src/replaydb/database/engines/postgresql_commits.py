"""What became of a PostgreSQL transaction whose commit was not answered: the server knows.

The id of the transaction is learned when it begins. `pg_xact_status` then says, on any other
connection, whether it was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, Text, cast, column, func, select, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.types import UserDefinedType

from replaydb.database.prepared import execute, prepared

#: A transaction may end so much later on the server than the call that made it.
SERVER_GRACE_SECONDS = 5.0
#: A client that hangs inside a transaction must not hold a task's lock for ever.
IDLE_IN_TRANSACTION_SECONDS = 60
#: Pauses between questions.
PAUSE_SECONDS = 0.05
#: The first version with `transaction_timeout`, which also ends who is stuck in a payload.
_BOUNDS_TRANSACTIONS = 17
_KEY = "replaydb_transaction"


@dataclass(frozen=True, slots=True)
class Identity:
    """A transaction of a server.

    Attributes:
        xid: Its id.
        era: When the server last began without the statistics of a clean shutdown. A crash may
            forget ids, and give them again.
    """

    xid: str
    era: datetime | None


class _Xid8(UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


async def begin(connection: AsyncConnection, seconds: float) -> None:
    """Begin a transaction that the server ends by itself some time after so many seconds."""
    driver: Any = (await connection.get_raw_connection()).driver_connection
    limit = str(int(1000 * (max(seconds, 0.0) + SERVER_GRACE_SECONDS)))
    is_bounded = driver.get_server_version().major >= _BOUNDS_TRANSACTIONS
    if is_reader(connection):  # and a standby gives no ids
        await connection.run_sync(execute, _look_bounded(limit) if is_bounded else _look())
        return
    beginning = _begin_bounded(limit) if is_bounded else _begin()
    (row,) = await connection.run_sync(execute, beginning)
    connection.info[_KEY] = Identity(row.xid, row.era)


def is_reader(connection: AsyncConnection) -> bool:
    """Whether its transactions cannot write."""
    return bool(connection.sync_engine.get_execution_options().get("postgresql_readonly"))


def identity_of(connection: AsyncConnection) -> Identity:
    """The transaction that `begin` began."""
    identity: Identity = connection.info[_KEY]
    return identity


async def was_committed(
    engine: AsyncEngine, identity: Identity, is_outage: Callable[[BaseException], bool]
) -> bool | None:
    """Ask until the server knows; None: it has forgotten. Takes as long as it takes.

    A transaction that is still in progress belongs to a session that has lost its client, or will
    wait for it in vain: it is ended.
    """
    while True:
        try:
            async with engine.connect() as connection:
                status = await _status(connection, identity)
        except Exception as error:
            if not is_outage(error):
                raise
        else:
            if status != "in progress":
                return None if status is None else status == "committed"
        await asyncio.sleep(PAUSE_SECONDS)


async def _status(connection: AsyncConnection, identity: Identity) -> str | None:
    try:
        (row,) = await connection.run_sync(execute, _status_of(identity.xid))
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == "22023":  # an id that was never given
            return "aborted"
        raise
    status: Literal["committed", "aborted", "in progress"] | None = row.status
    if status == "in progress":
        await connection.run_sync(execute, _end_session_of(identity.xid))
    if status == "committed" and row.era != identity.era:
        return None
    return status


_ERA = func.pg_stat_get_bgwriter_stat_reset_time().label("era")
_CURRENT = cast(func.pg_current_xact_id(), Text).label("xid")


#: Of the transaction, not of the session: behind a PgBouncer there is none.
BOUND_IDLENESS = func.set_config(
    "idle_in_transaction_session_timeout", str(1000 * IDLE_IN_TRANSACTION_SECONDS), True
)


def _bound(limit: Any) -> ColumnElement[str]:
    return func.set_config("transaction_timeout", limit, True)


@prepared
def _begin() -> Select[Any]:
    return select(_CURRENT, _ERA, BOUND_IDLENESS)


@prepared
def _begin_bounded(limit: Any) -> Select[Any]:
    return select(_CURRENT, _ERA, BOUND_IDLENESS, _bound(limit))


@prepared
def _look() -> Select[Any]:
    return select(BOUND_IDLENESS)


@prepared
def _look_bounded(limit: Any) -> Select[Any]:
    return select(BOUND_IDLENESS, _bound(limit))


@prepared
def _status_of(xid: Any) -> Select[Any]:
    return select(func.pg_xact_status(_as_xid8(xid)).label("status"), _ERA)


def _as_xid8(xid: Any) -> ColumnElement[str]:
    return cast(cast(xid, Text), _Xid8())


_ACTIVITY = table("pg_stat_activity", column("pid"), column("backend_xid"))


@prepared
def _end_session_of(xid: Any) -> Select[Any]:
    mine = func.xid(_as_xid8(xid)) == _ACTIVITY.c.backend_xid
    return select(func.pg_terminate_backend(_ACTIVITY.c.pid)).where(mine)
