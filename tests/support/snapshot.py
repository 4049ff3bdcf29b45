"""Schema of a database as plain data, to compare two schemas for equality."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.runtime.revisions import VERSION_TABLE

Snapshot = dict[str, list[tuple[object, ...]]]

_POSTGRESQL = {
    "tables": """
        SELECT one.relname, one.relkind::text, one.reloptions, toast.reloptions
        FROM pg_class AS one LEFT JOIN pg_class AS toast ON toast.oid = one.reltoastrelid
        WHERE one.relnamespace = 'public'::regnamespace""",
    "columns": """
        SELECT relname, attname, row_number() OVER (PARTITION BY attrelid ORDER BY attnum),
            format_type(atttypid, atttypmod), attnotnull,
            attstorage::text, attidentity::text, pg_get_expr(adbin, adrelid)
        FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
            LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
        WHERE relnamespace = 'public'::regnamespace AND attnum > 0 AND NOT attisdropped
            AND relkind IN ('r', 'v')""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, contype::text, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace""",
    "indexes": """
        SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'""",
    "views": """
        SELECT viewname, definition FROM pg_views WHERE schemaname = 'public'""",
    "sequences": """
        SELECT sequencename, data_type::text FROM pg_sequences WHERE schemaname = 'public'""",
}


async def take_snapshot(connection: AsyncConnection) -> Snapshot:
    """Return everything that a migration could get wrong, without Alembic's own table."""
    if connection.dialect.name == "sqlite":
        return await _sqlite(connection)
    found: Snapshot = {}
    for topic, query in _POSTGRESQL.items():
        rows = (await connection.execute(text(query))).all()
        found[topic] = sorted(
            (tuple(row) for row in rows if not row[0].startswith(VERSION_TABLE)), key=repr
        )
    return found


async def _sqlite(connection: AsyncConnection) -> Snapshot:
    found: Snapshot = {"columns": []}
    rows = await connection.execute(text("SELECT type, name, tbl_name, sql FROM sqlite_master"))
    for kind, name, table, sql in rows.all():
        if table == VERSION_TABLE or table == "sqlite_sequence":
            continue
        if kind in ("table", "view"):
            columns = await connection.execute(
                text("SELECT name, type FROM pragma_table_xinfo(:table)"), {"table": name}
            )
            found["columns"].append((name, *(tuple(column) for column in columns)))
        statement = _clauses(sql) if kind == "table" else (_plain(sql),)
        found.setdefault(kind, []).append((name, table, *statement))
    return {kind: sorted(entries, key=repr) for kind, entries in found.items()}


def _clauses(sql: str) -> tuple[str, ...]:
    """Split CREATE TABLE at its commas, since the order of constraints does not matter."""
    head, _, rest = sql.partition("(")
    body, _, tail = rest.rpartition(")")
    return (_plain(head), _plain(tail), *sorted(_plain(clause) for clause in _split(body)))


def _split(body: str) -> Iterator[str]:
    depth, start = 0, 0
    for at, character in enumerate(body):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield body[start:at]
            start = at + 1
    yield body[start:]


def _plain(sql: str | None) -> str:
    """Normalize whitespace and remove quotes."""
    return re.sub(r"\s+", " ", (sql or "").replace('"', "")).strip()
