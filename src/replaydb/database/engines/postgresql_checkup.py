"""What may be wrong with a PostgreSQL server, or with the database on it."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, text

from replaydb.database.schema import metadata
from replaydb.results import Finding

#: The first version that ends who hangs in the middle of a payload (`transaction_timeout`).
BOUNDS_TRANSACTIONS = 17
#: Calls without a timeout get that long, and those that touch every group up to an hour.
SHORTEST_SECONDS = 60.0
_WHAT_LIMITS_END = {
    "statement_timeout": "a longer statement is canceled, such as one that moves large payloads or "
    "touches every group",
    "lock_timeout": "a call that waits longer for a lock starts over, behind others",
    "idle_in_transaction_session_timeout": "sessions that pause longer in a transaction are ended, "
    "such as those of vacuum or of SQL by hand",
    "transaction_timeout": "longer transactions are ended, such as replaydb vacuum",
}
#: Part of the connections that others should find free.
CONNECTIONS_LEFT = 0.2
#: Dead rows that autovacuum should have removed: so many, and more than there are live ones.
DEAD_ROWS = 50_000
#: A transaction that is open so long keeps rows from being removed, in every table.
LONG_SECONDS = 3600.0
#: Transactions, of two thousand million, after which all rows should have been frozen.
OLD_ROWS = 1_000_000_000
#: A log that is so many times as long as `max_wal_size` is held back by something.
LONG_LOG = 2.0

_SETTINGS = text("""
    SELECT name, setting FROM pg_settings WHERE name IN (
        'server_version', 'server_version_num', 'fsync', 'full_page_writes', 'autovacuum',
        'track_counts', 'synchronous_commit', 'max_connections', 'server_encoding',
        'superuser_reserved_connections', 'max_wal_size', 'track_activities')
""")
#: What a connection of this role and database begins with, in milliseconds; 0 is no limit.
_LIMITS = text("""
    SELECT name, CAST(reset_val AS bigint) AS milliseconds FROM pg_settings WHERE name IN (
        'statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout',
        'transaction_timeout')
    ORDER BY name
""")
_CONNECTIONS = text("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
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
_RECOVERY = text("SELECT pg_is_in_recovery()")

_TABLES = sorted(table.name for table in metadata.tables.values())


def findings(connection: Connection) -> Iterator[Finding]:
    """What is good, and what is not, of the server, its settings and our tables."""
    settings = {row.name: row.setting for row in connection.execute(_SETTINGS)}
    yield _version(settings)
    yield _role(connection)
    yield from _durability(settings)
    yield _autovacuum(settings)
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
    size = connection.execute(_SIZE).scalar_one()
    yield Finding("good", "disk", f"{size / 1e6:,.1f} MB; what is free only the server knows")


def _version(settings: dict[str, str]) -> Finding:
    if int(settings["server_version_num"]) // 10_000 >= BOUNDS_TRANSACTIONS:
        return Finding("good", "PostgreSQL", settings["server_version"])
    return Finding(
        "warning",
        "PostgreSQL",
        f"{settings['server_version']} does not end a client that hangs in the middle of a "
        "payload, while others wait for its locks",
        f"PostgreSQL {BOUNDS_TRANSACTIONS} and later do",
    )


def _role(connection: Connection) -> Finding:
    if connection.execute(_RECOVERY).scalar_one():
        return Finding(
            "warning",
            "server",
            "it is a standby: it can only be read",
            "name the primary, or all hosts with target_session_attrs=read-write",
        )
    return Finding("good", "server", "it takes writes")


def _durability(settings: dict[str, str]) -> Iterator[Finding]:
    losses = {
        "fsync": "a power cut can destroy the database",
        "full_page_writes": "a power cut can destroy the database",
        "synchronous_commit": "a crash loses the last moments of puts that had returned",
    }
    lost = [(name, what) for name, what in losses.items() if settings[name] == "off"]
    for name, what in lost:
        mend = f"ALTER SYSTEM SET {name} = on, then SELECT pg_reload_conf()"
        yield Finding("bad", "durability", f"{name} is off: {what}", mend)
    if not lost:
        yield Finding("good", "durability", "what was acknowledged survives a crash")


def _autovacuum(settings: dict[str, str]) -> Finding:
    for name in ("autovacuum", "track_counts"):
        if settings[name] == "off":
            return Finding(
                "bad",
                "autovacuum",
                f"{name} is off: tables grow with every draw, and plans go by old statistics",
                f"ALTER SYSTEM SET {name} = on, then SELECT pg_reload_conf()",
            )
    return Finding("good", "autovacuum", "it is on")


def _commits(settings: dict[str, str]) -> Finding:
    if settings["track_activities"] == "on":
        return Finding("good", "commits", "their outcome can be found if an answer is lost")
    return Finding(
        "warning",
        "commits",
        "track_activities is off for this role and database: the session of a commit without an "
        "answer is not found, and the call raises OutcomeUnknownError",
        "ALTER ROLE ... SET track_activities = on, or ALTER DATABASE ... SET, by a superuser",
    )


def _encoding(settings: dict[str, str]) -> Finding:
    encoding = settings["server_encoding"]
    if encoding == "UTF8":
        return Finding("good", "encoding", encoding)
    return Finding(
        "bad",
        "encoding",
        f"the database is in {encoding}: texts that it cannot hold are refused",
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
        yield Finding("good", "limits", "none ends statements, locks or transactions early")


def _connections(connection: Connection, settings: dict[str, str]) -> Finding:
    used = connection.execute(_CONNECTIONS).scalar_one()
    most = int(settings["max_connections"]) - int(settings["superuser_reserved_connections"])
    taken = f"{used} of {most} connections are taken"
    if most - used >= CONNECTIONS_LEFT * most:
        return Finding("good", "connections", taken)
    return Finding(
        "warning",
        "connections",
        f"{taken}: a process takes up to 50 under load",
        "raise max_connections, give Store.open a pool_size, or put a PgBouncer between",
    )


def _indexes(connection: Connection) -> Finding:
    names = connection.execute(_INVALID, {"tables": _TABLES}).scalars().all()
    if not names:
        return Finding("good", "indexes", "all of them are valid")
    return Finding(
        "bad",
        "indexes",
        f"not used, as they were never finished: {', '.join(names)}",
        f"REINDEX INDEX CONCURRENTLY {names[0]}, and so for each",
    )


def _dead_rows(connection: Connection) -> Finding:
    found = connection.execute(_DEAD, {"tables": _TABLES, "least": DEAD_ROWS}).all()
    if not found:
        return Finding("good", "dead rows", "no table has more dead rows than live ones")
    shown = ", ".join(f"{row.n_dead_tup:,} in {row.relname}" for row in found)
    return Finding(
        "warning",
        "dead rows",
        f"more of them than live ones: {shown}",
        "see that autovacuum runs and no transaction stays open; at once: VACUUM (ANALYZE)",
    )


def _long_transactions(connection: Connection) -> Finding:
    found = connection.execute(_LONG, {"seconds": LONG_SECONDS}).all()
    if not found:
        return Finding("good", "transactions", "none has been open for long")
    first = found[0]
    return Finding(
        "warning",
        "transactions",
        f"one of {first.usename} is open since {first.seconds / 60:,.0f} minutes ({first.state}): "
        "dead rows stay for it",
        f"end the program, or SELECT pg_terminate_backend({first.pid})",
    )


def _old_rows(connection: Connection) -> Finding:
    age = connection.execute(_AGE).scalar_one()
    if age < OLD_ROWS:
        return Finding("good", "row ages", f"{age:,} transactions since all rows were frozen")
    return Finding(
        "bad",
        "row ages",
        f"{age:,} transactions since all rows were frozen: at 2,000,000,000 the server stops",
        "VACUUM (FREEZE), and find out what keeps autovacuum from it",
    )


def _log(connection: Connection, settings: dict[str, str]) -> Finding:
    if not connection.execute(_MAY_SEE_LOG).scalar_one():
        return Finding("good", "log", "its size is told to members of pg_monitor only")
    size, most = connection.execute(_LOG).scalar_one(), int(settings["max_wal_size"]) << 20
    shown = f"the write-ahead log has {size / 1e6:,.1f} MB"
    if size <= LONG_LOG * most:
        return Finding("good", "log", shown)
    return Finding(
        "warning",
        "log",
        f"{shown}, more than max_wal_size by far: something holds it back",
        "see pg_replication_slots for one that nobody reads, and pg_stat_archiver for failures",
    )


def _storage(connection: Connection) -> Iterator[Finding]:
    storage = connection.execute(_STORAGE).scalar_one_or_none()
    if storage == "e":
        yield Finding("good", "payloads", "they are stored as they are")
    elif storage is not None:
        yield Finding(
            "warning",
            "payloads",
            "the server compresses them, which holds up each put and read",
            "ALTER TABLE payload ALTER COLUMN data SET STORAGE EXTERNAL",
        )
