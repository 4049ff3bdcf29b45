"""Health check of a PostgreSQL server and of the database on it, for `replaydb doctor`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sqlalchemy import Connection, text

from replaydb.database.postgresql import standby
from replaydb.database.postgresql.limits import BOUNDS_TRANSACTIONS
from replaydb.database.tables.schema import metadata
from replaydb.domain.results import Finding

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
#: Settings that must be on, and what happens if they are off.
_DURABILITY = {
    "fsync": "a power cut can destroy the database",
    "full_page_writes": "a power cut can destroy the database",
    "synchronous_commit": "a crash of the server loses the last acknowledged puts",
}
_AUTOVACUUM = dict.fromkeys(
    ("autovacuum", "track_counts"), "the space of deleted payloads is not reused"
)

_SETTINGS = text("""
    SELECT name, setting FROM pg_settings WHERE name IN (
        'server_version', 'server_version_num', 'fsync', 'full_page_writes', 'autovacuum',
        'track_counts', 'synchronous_commit', 'server_encoding', 'track_activities',
        'hot_standby_feedback', 'max_standby_streaming_delay',
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
_INVALID = text("""
    SELECT index_class.relname FROM pg_index
        JOIN pg_class AS index_class ON index_class.oid = pg_index.indexrelid
        JOIN pg_class AS table_class ON table_class.oid = pg_index.indrelid
    WHERE table_class.relname = ANY (:tables) AND pg_table_is_visible(table_class.oid)
        AND NOT (pg_index.indisvalid AND pg_index.indisready)
    ORDER BY index_class.relname
""")
_STORAGE = text("""
    SELECT attstorage::text FROM pg_attribute
    WHERE attrelid = to_regclass('payload') AND attname = 'data'
""")

_TABLES = sorted(table.name for table in metadata.tables.values())


def findings(connection: Connection) -> Iterator[Finding]:
    """Yield the findings about the server, its settings and replaydb's tables."""
    settings = {row.name: row.setting for row in connection.execute(_SETTINGS)}
    yield _version(settings)
    yield from _role(connection, settings)
    survive = "acknowledged commits survive a crash"
    yield from _must_be_on(settings, "durability", _DURABILITY, survive)
    yield from _must_be_on(settings, "autovacuum", _AUTOVACUUM, "it is on")
    yield _commits(settings)
    yield _encoding(settings)
    yield from _limits(connection)
    yield _indexes(connection)
    yield from _storage(connection)
    yield _server_log(settings)


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
    lag = standby.lag(connection)
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


def _must_be_on(
    settings: dict[str, str], subject: str, costs: dict[str, str], good: str
) -> Iterator[Finding]:
    """Yield a finding for each of these settings that is off, or a good one if all are on."""
    off = [name for name in costs if settings[name] == "off"]
    for name in off:
        fix = f"ALTER SYSTEM SET {name} = on, then SELECT pg_reload_conf()"
        yield Finding("bad", subject, f"{name} is off: {costs[name]}", fix)
    if not off:
        yield Finding("good", subject, good)


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
