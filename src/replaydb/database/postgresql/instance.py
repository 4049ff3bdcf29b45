"""Facts that distinguish a PostgreSQL database from its copies, and a promoted standby."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Connection, Select, Text, case, column, func, select, table
from sqlalchemy.exc import DBAPIError

from replaydb.packs import Instance

#: SQLSTATEs of a function that this user may not call, or that the server does not have: some
#: managed services replace the storage of PostgreSQL.
_UNREADABLE = {"42501", "42883", "0A000"}
_TIMELINE_DIGITS = 8

_DATABASES = table("pg_database", column("oid", BigInteger), column("datname"))
_DATABASE = select(_DATABASES.c.oid).where(_DATABASES.c.datname == func.current_database())
#: A random number of `initdb`, which a physical copy has as well.
_SYSTEM = select(
    func.pg_control_system().table_valued(column("system_identifier", BigInteger)).c[0]
)
#: The name of a file of the log begins with the timeline. A standby has none of its own.
_LOG_FILE = select(
    case(
        (func.pg_is_in_recovery(), None),
        else_=func.pg_walfile_name(func.pg_current_wal_lsn(), type_=Text),
    )
)


def instance(connection: Connection) -> Instance:
    """Return the instance. Any role may read all of its facts, unless the service restricts it."""
    facts = {"system": _read(connection, _SYSTEM), "database": _read(connection, _DATABASE)}
    log_file = _read(connection, _LOG_FILE)
    timeline = 0 if log_file is None else int(log_file[:_TIMELINE_DIGITS], 16)
    return Instance({name: fact for name, fact in facts.items() if fact is not None}, timeline)


def _read(connection: Connection, query: Select[Any]) -> Any:
    """Return the result of a query; None if it cannot be read."""
    try:
        with connection.begin_nested():
            return connection.scalar(query)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) in _UNREADABLE:
            return None
        raise
