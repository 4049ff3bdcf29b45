"""Time limits after which the server ends transactions of a client that has stalled."""

from __future__ import annotations

import math
from functools import lru_cache

from sqlalchemy import func, select

from replaydb.database.postgresql.connecting import DIALECT, Connection

#: The server ends a transaction this long after the deadline of the call that began it.
SERVER_GRACE_SECONDS = 5.0
#: The limits of a session are for calls of up to this many seconds. Longer ones set their own.
ORDINARY_SECONDS = 64.0
#: A transaction without locks may be idle for this long.
IDLE_IN_TRANSACTION_SECONDS = 60.0
#: The first version with `transaction_timeout`, which also ends a client that stalls while it sends
#: or receives a payload.
BOUNDS_TRANSACTIONS = 17
_MOST_MILLISECONDS = 2**31 - 1  # a month
_IDLENESS = "idle_in_transaction_session_timeout"


def text(
    connection: Connection, seconds: float, idle_seconds: float, *, is_local: bool = False
) -> str:
    """Return a statement that limits the transactions of a connection.

    Args:
        connection: The connection.
        seconds: The server ends a transaction after this time and a margin.
        idle_seconds: The server ends a transaction if the client sends nothing for this long. A
            call that may take an hour may also compute for longer between two statements. 0:
            without limit.
        is_local: Limit only the transaction that has begun.
    """
    whole = math.ceil(seconds)  # so that few texts are compiled
    return _text(connection.get_server_version().major, whole, idle_seconds, is_local)


@lru_cache(maxsize=256)
def _text(version: int, seconds: float, idle_seconds: float, is_local: bool) -> str:
    """Return the statement that sets both limits on a server of a major version.

    Servers before version 17 have no limit of transactions.
    """
    longest = min(seconds / 60, IDLE_IN_TRANSACTION_SECONDS)
    idle = _milliseconds(max(idle_seconds, longest) if idle_seconds else 0.0)
    settings = [(_IDLENESS, idle)]
    if version >= BOUNDS_TRANSACTIONS:
        # The timer of a transaction that has begun does not change with the setting, but 0 ends it.
        limit = _milliseconds(max(seconds, 0.0) + SERVER_GRACE_SECONDS)
        settings += [("transaction_timeout", "0"), ("transaction_timeout", limit)]
    limits = select(*(func.set_config(name, value, is_local) for name, value in settings))
    return str(limits.compile(dialect=DIALECT, compile_kwargs={"literal_binds": True}))


def _milliseconds(seconds: float) -> str:
    return str(min(int(1000 * seconds), _MOST_MILLISECONDS))


#: Limits the idle time of a transaction that waits for a lock of the schema.
BOUND_IDLENESS = func.set_config(_IDLENESS, _milliseconds(IDLE_IN_TRANSACTION_SECONDS), True)
