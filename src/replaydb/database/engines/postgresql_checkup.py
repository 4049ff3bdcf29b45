"""Health check of a PostgreSQL server and of the database on it, for `replaydb doctor`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sqlalchemy import Connection, text

from replaydb.database.engines import postgresql_standby
from replaydb.database.schema import metadata
from replaydb.results import Finding

#: The first version with `transaction_timeout`, which also ends a client that stalls while it sends
#: or receives a payload.
BOUNDS_TRANSACTIONS = 17
#: Default time limit of a call. Calls that touch every group may take up to an hour.
SHORTEST_SECONDS = 60.0
_WHAT_LIMITS_END = {
    "statement_timeout": "longer statements are canceled, such as those that transfer large "
    "payloads or touch every group",
    "lock_timeout": "a call that waits longer for a lock starts again at the end of the queue",
    "idle_in_transaction_session_timeout": "sessions that pause longer in a transaction are ended, "
    "such as those of replaydb vacuum or of psql",
    "idle_session_timeout": "unused connections are ended, and the next calls open others",
    "transaction_timeout": "longer transactions are ended, such as those of replaydb vacuum",
}
#: Share of the connections that should be free.
CONNECTIONS_LEFT = 0.2
#: Dead rows from which autovacuum is late, if they are also more than the live rows.
DEAD_ROWS = 50_000
#: A transaction that is open for this long prevents the removal of dead rows in every table.
LONG_SECONDS = 3600.0
#: Transactions after which all rows should have been frozen. The server stops at two billion.
OLD_ROWS = 1_000_000_000
#: A smaller `max_wal_size`, in megabytes, forces checkpoints every few puts.
SMALL_LOG = 1024
#: A log of more than this many times `max_wal_size` is not being removed for some reason.
LONG_LOG = 2.0

_SETTINGS = text("""
    SELECT name, setting FROM pg_settings WHERE name IN (
        'server_version', 'server_version_num', 'fsync', 'full_page_writes', 'autovacuum',
        'track_counts', 'synchronous_commit', 'max_connections', 'server_encoding',
        'superuser_reserved_connections', 'max_wal_size', 'track_activities',
        'hot_standby_feedback', 'max_standby_streaming_delay', 'reserved_connections',
        'default_transaction_read_only', 'log_statement', 'log_min_duration_statement',
        'log_parameter_max_length')
""")
#: Settings of a new connection of this role to this database, in milliseconds; 0 is no limit.
_LIMITS = text("""
    SELECT name, CAST(reset_val AS bigint) AS milliseconds FROM pg_settings WHERE name IN (
        'statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout',
        'idle_session_timeout', 'transaction_timeout')
    ORDER BY name
""")
#: Roles that are not members of pg_monitor cannot see the type of other roles' sessions.
_CONNECTIONS = text("""
    SELECT count(*) AS used, count(*) FILTER (WHERE datname = current_database()) AS of_database,
        count(*) FILTER (WHERE usename = session_user) AS of_role,
        (SELECT datconnlimit FROM pg_database WHERE datname = current_database()) AS in_database,
        (SELECT rolconnlimit FROM pg_roles WHERE rolname = session_user) AS for_role
    FROM pg_stat_activity
    WHERE datname IS NOT NULL AND coalesce(backend_type, 'client backend') = 'client backend'
""")
_NOT_VACUUMED = text("""
    SELECT relname FROM pg_class, pg_options_to_table(reloptions)
    WHERE relname = ANY (:tables) AND pg_table_is_visible(oid)
        AND option_name = 'autovacuum_enabled' AND NOT CAST(option_value AS boolean)
    ORDER BY relname
""")
_INVALID = text("""
    SELECT index_class.relname FROM pg_index
        JOIN pg_class AS index_class ON index_class.oid = pg_index.indexrelid
        JOIN pg_class AS table_class ON table_class.oid = pg_index.indrelid
    WHERE table_class.relname = ANY (:tables) AND pg_table_is_visible(table_class.oid)
        AND NOT (pg_index.indisvalid AND pg_index.indisready)
    ORDER BY index_class.relname
""")
_DEAD = text("""
    SELECT relname, n_live_tup, n_dead_tup FROM pg_stat_user_tables
    WHERE relname = ANY (:tables) AND n_dead_tup > n_live_tup AND n_dead_tup >= :least
    ORDER BY n_dead_tup DESC
""")
_LONG = text("""
    SELECT pid, usename, state, extract(epoch FROM clock_timestamp() - xact_start) AS seconds
    FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND clock_timestamp() - xact_start > make_interval(secs => :seconds)
    ORDER BY xact_start
""")
_AGE = text("SELECT age(datfrozenxid) FROM pg_database WHERE datname = current_database()")
_STORAGE = text("""
    SELECT attstorage::text FROM pg_attribute
    WHERE attrelid = to_regclass('payload') AND attname = 'data'
""")
_MAY_SEE_LOG = text("SELECT has_function_privilege('pg_ls_waldir()', 'EXECUTE')")
_LOG = text("SELECT CAST(sum(size) AS bigint) FROM pg_ls_waldir()")
_SIZE = text("SELECT pg_database_size(current_database())")

_TABLES = sorted(table.name for table in metadata.tables.values())


def findings(connection: Connection) -> Iterator[Finding]:
    """Yield the findings about the server, its settings and replaydb's tables."""
    settings = {row.name: row.setting for row in connection.execute(_SETTINGS)}
    yield _version(settings)
    yield from _role(connection, settings)
    yield from _durability(settings)
    yield from _autovacuum(connection, settings)
    yield _commits(settings)
    yield _encoding(settings)
    yield from _limits(connection)
    yield _connections(connection, settings)
    yield _indexes(connection)
    yield _dead_rows(connection)
    yield _long_transactions(connection)
    yield _old_rows(connection)
    yield from _storage(connection)
    yield _log(connection, settings)
    yield _checkpoints(settings)
    yield _server_log(settings)
    size = connection.execute(_SIZE).scalar_one()
    yield Finding("good", "disk", f"{size / 1e6:,.1f} MB; free space is not visible to clients")


def _version(settings: dict[str, str]) -> Finding:
    if int(settings["server_version_num"]) // 10_000 >= BOUNDS_TRANSACTIONS:
        return Finding("good", "PostgreSQL", settings["server_version"])
    return Finding(
        "warning",
        "PostgreSQL",
        f"{settings['server_version']} does not end a client that stalls while it sends or "
        "receives a payload, and other clients wait for its locks",
        f"upgrade to PostgreSQL {BOUNDS_TRANSACTIONS} or later",
    )


def _role(connection: Connection, settings: dict[str, str]) -> Iterator[Finding]:
    lag = postgresql_standby.lag(connection)
    if lag is None:
        yield _writes(settings)
        return
    shown = "not connected to a primary" if lag == math.inf else f"{lag:.1f} s behind its primary"
    yield Finding(
        "warning",
        "server",
        f"it is a standby, {shown}, which accepts no writes",
        "to write, name the primary in the URL, or all hosts with target_session_attrs=read-write",
    )
    if settings["hot_standby_feedback"] == "on":
        yield Finding("good", "reads", "the primary keeps rows that reads of this standby need")
        return
    delay = int(settings["max_standby_streaming_delay"]) / 1000
    if delay >= 0:
        yield Finding(
            "warning",
            "reads",
            f"they are ended if the primary has removed rows that they need: the standby waits "
            f"{delay:g} s for them (max_standby_streaming_delay)",
            "ALTER SYSTEM SET hot_standby_feedback = on, then SELECT pg_reload_conf()",
        )


def _writes(settings: dict[str, str]) -> Finding:
    if settings["default_transaction_read_only"] == "off":
        return Finding("good", "server", "it accepts writes")
    return Finding(
        "warning",
        "server",
        "default_transaction_read_only is on for this role and database: calls that write fail",
        "ALTER ROLE ... SET default_transaction_read_only = off, or ALTER DATABASE ... SET",
    )


def _durability(settings: dict[str, str]) -> Iterator[Finding]:
    losses = {
        "fsync": "a power cut can destroy the database",
        "full_page_writes": "a power cut can destroy the database",
        "synchronous_commit": "a crash of the server loses the last acknowledged puts",
    }
    lost = [(name, what) for name, what in losses.items() if settings[name] == "off"]
    for name, what in lost:
        fix = f"ALTER SYSTEM SET {name} = on, then SELECT pg_reload_conf()"
        yield Finding("bad", "durability", f"{name} is off: {what}", fix)
    if not lost:
        yield Finding("good", "durability", "acknowledged commits survive a crash")


def _autovacuum(connection: Connection, settings: dict[str, str]) -> Iterator[Finding]:
    cost = "with every draw, and query plans use old statistics"
    off = [name for name in ("autovacuum", "track_counts") if settings[name] == "off"]
    for name in off:
        fix = f"ALTER SYSTEM SET {name} = on, then SELECT pg_reload_conf()"
        yield Finding("bad", "autovacuum", f"{name} is off: tables grow {cost}", fix)
    without = connection.execute(_NOT_VACUUMED, {"tables": _TABLES}).scalars().all()
    if without:
        found = f"autovacuum_enabled is off for {', '.join(without)}: these grow {cost}"
        fix = f"ALTER TABLE {without[0]} RESET (autovacuum_enabled), and the same for each"
        yield Finding("bad", "autovacuum", found, fix)
    if not off and not without:
        yield Finding("good", "autovacuum", "it is on")


def _commits(settings: dict[str, str]) -> Finding:
    if settings["track_activities"] == "on":
        return Finding("good", "commits", "their outcome can be read if an answer is lost")
    return Finding(
        "warning",
        "commits",
        "track_activities is off for this role and database: if the answer to a commit is lost, "
        "its session is not found, and the call raises OutcomeUnknownError",
        "ALTER ROLE ... SET track_activities = on, or ALTER DATABASE ... SET, by a superuser",
    )


def _encoding(settings: dict[str, str]) -> Finding:
    encoding = settings["server_encoding"]
    if encoding == "UTF8":
        return Finding("good", "encoding", encoding)
    return Finding(
        "bad",
        "encoding",
        f"the encoding of the database is {encoding}, and texts that do not fit it are refused",
        "CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0, and replaydb copy into it",
    )


def _limits(connection: Connection) -> Iterator[Finding]:
    rows = connection.execute(_LIMITS).all()
    short = [row for row in rows if 0 < row.milliseconds < 1000 * SHORTEST_SECONDS]
    for row in short:
        yield Finding(
            "warning",
            "limits",
            f"{row.name} is {row.milliseconds / 1000:g} s for this role and database: "
            f"{_WHAT_LIMITS_END[row.name]}",
            f"ALTER ROLE ... SET {row.name} = 0, or ALTER DATABASE ... SET",
        )
    if not short:
        yield Finding("good", "limits", "no timeout ends statements or transactions early")


def _connections(connection: Connection, settings: dict[str, str]) -> Finding:
    row = connection.execute(_CONNECTIONS).one()
    reserved = ("superuser_reserved_connections", "reserved_connections")  # 16 has the second
    most = int(settings["max_connections"]) - sum(int(settings.get(name, 0)) for name in reserved)
    limits = {
        "": (row.used, most),
        " (CONNECTION LIMIT of the database)": (row.of_database, row.in_database),
        " (CONNECTION LIMIT of the role)": (row.of_role, row.for_role),
    }
    found = [
        Finding(
            "warning",
            "connections",
            f"{used} of {most} connections are in use{whose}; a process uses up to 50 under load",
            f"raise {'it' if whose else 'max_connections'}, pass pool_size to Store.open, or use "
            "PgBouncer",
        )
        for whose, (used, most) in limits.items()
        if most >= 0 and most - used < CONNECTIONS_LEFT * most
    ]
    if found:
        return found[-1]
    return Finding("good", "connections", f"{row.used} of {most} connections are in use")


def _indexes(connection: Connection) -> Finding:
    names = connection.execute(_INVALID, {"tables": _TABLES}).scalars().all()
    if not names:
        return Finding("good", "indexes", "all indexes are valid")
    return Finding(
        "bad",
        "indexes",
        f"invalid and not used, because their creation was interrupted: {', '.join(names)}",
        "replaydb db upgrade creates those of replaydb again; DROP INDEX CONCURRENTLY for others",
    )


def _dead_rows(connection: Connection) -> Finding:
    found = connection.execute(_DEAD, {"tables": _TABLES, "least": DEAD_ROWS}).all()
    if not found:
        return Finding("good", "dead rows", "no table has more dead rows than live ones")
    shown = ", ".join(f"{row.n_dead_tup:,} in {row.relname}" for row in found)
    return Finding(
        "warning",
        "dead rows",
        f"more dead rows than live ones: {shown}",
        "check that autovacuum runs and no transaction stays open, and run VACUUM (ANALYZE)",
    )


def _long_transactions(connection: Connection) -> Finding:
    found = connection.execute(_LONG, {"seconds": LONG_SECONDS}).all()
    if not found:
        return Finding("good", "transactions", "none has been open for an hour")
    first = found[0]
    return Finding(
        "warning",
        "transactions",
        f"one of {first.usename} has been open for {first.seconds / 60:,.0f} minutes "
        f"({first.state}): dead rows cannot be removed",
        f"end the program, or SELECT pg_terminate_backend({first.pid})",
    )


def _old_rows(connection: Connection) -> Finding:
    age = connection.execute(_AGE).scalar_one()
    if age < OLD_ROWS:
        return Finding("good", "row ages", f"the oldest unfrozen row is {age:,} transactions old")
    return Finding(
        "bad",
        "row ages",
        f"the oldest unfrozen row is {age:,} transactions old: the server stops at 2,000,000,000",
        "VACUUM (FREEZE), and find out what prevents autovacuum from freezing rows",
    )


def _log(connection: Connection, settings: dict[str, str]) -> Finding:
    if not connection.execute(_MAY_SEE_LOG).scalar_one():
        return Finding("good", "log", "its size is visible only to members of pg_monitor")
    size, most = connection.execute(_LOG).scalar_one(), int(settings["max_wal_size"]) << 20
    shown = f"the size of the write-ahead log is {size / 1e6:,.1f} MB"
    if size <= LONG_LOG * most:
        return Finding("good", "log", shown)
    return Finding(
        "warning",
        "log",
        f"{shown}, far more than max_wal_size: something prevents its removal",
        "check pg_replication_slots for an unused slot, and pg_stat_archiver for failures",
    )


def _checkpoints(settings: dict[str, str]) -> Finding:
    most = int(settings["max_wal_size"])
    if most >= SMALL_LOG:
        return Finding("good", "checkpoints", f"up to {most:,} MB of log between two of them")
    return Finding(
        "warning",
        "checkpoints",
        f"max_wal_size is {most:,} MB: puts of large payloads force one checkpoint after the other",
        "ALTER SYSTEM SET max_wal_size = '8GB', then SELECT pg_reload_conf()",
    )


def _server_log(settings: dict[str, str]) -> Finding:
    slow = int(settings["log_min_duration_statement"])
    logged = ""
    if settings["log_statement"] == "all":
        logged = "log_statement is all: puts are"
    elif slow >= 0:
        logged = f"log_min_duration_statement is {slow} ms: puts that take longer are"
    if not logged or settings["log_parameter_max_length"] != "-1":
        return Finding("good", "server log", "payloads are not written to it")
    return Finding(
        "warning",
        "server log",
        f"{logged} logged with their payloads, at twice the size",
        "ALTER SYSTEM SET log_parameter_max_length = 1024, then SELECT pg_reload_conf()",
    )


def _storage(connection: Connection) -> Iterator[Finding]:
    storage = connection.execute(_STORAGE).scalar_one_or_none()
    if storage == "e":
        yield Finding("good", "payloads", "the server stores them uncompressed")
    elif storage is not None:
        yield Finding(
            "warning",
            "payloads",
            "the server compresses them, which slows down every put and read",
            "ALTER TABLE payload ALTER COLUMN data SET STORAGE EXTERNAL",
        )
