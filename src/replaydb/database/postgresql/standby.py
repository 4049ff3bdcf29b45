"""Standby servers, which follow a primary and can only be read."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import Connection, text

#: What to do about reads that a standby ends because the primary has removed rows that they need.
HINT = (
    "; the server is a standby, which ends reads that conflict with changes of the primary for "
    "longer than max_standby_streaming_delay: raise it there, or set hot_standby_feedback = on"
)

# The time of the last transaction does not advance while the primary has none. So a standby that
# has replayed everything that it received is up to date, as long as it is connected.
_LAG = text("""
    SELECT pg_is_in_recovery() AS is_standby,
        EXISTS (SELECT FROM pg_stat_wal_receiver)
            AND pg_last_wal_replay_lsn() >= pg_last_wal_receive_lsn() AS is_current,
        extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()) AS seconds
""")


def lag(connection: Connection) -> float | None:
    """Return by how many seconds a standby is behind its primary. None if it is no standby.

    Infinite if the standby is not connected and has replayed no transaction since its start.
    """
    row = connection.execute(_LAG).one()
    if not row.is_standby:
        return None
    if row.is_current:
        return 0.0
    return math.inf if row.seconds is None else max(0.0, float(row.seconds))


def is_standby(driver_connection: Any) -> bool:
    """Whether the server said when it was connected to that it is a standby."""
    return getattr(driver_connection.get_settings(), "in_hot_standby", "off") == "on"
