"""The next generated id of every table, determined by inserting a row and rolling back."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table, UniqueConstraint, func, insert, select, text

from replaydb.database.tables.schema import GENERATED
from support.connections import transaction


async def next_ids(url: str) -> dict[str, int]:
    """Return the id of a new row for each table with generated ids. Each must have a row already.

    On PostgreSQL this consumes the id.

    Raises:
        IntegrityError: Another row has the id already.
    """
    return {table.name: await _next_id(url, table) for table in GENERATED}


async def largest_ids(url: str) -> dict[str, int]:
    """Return the largest id of each table with generated ids, 0 without rows."""
    async with transaction(url) as connection:
        return {
            table.name: await connection.scalar(select(func.max(table.c.id))) or 0
            for table in GENERATED
        }


async def rewind(url: str, engine_name: str, *, to: int = 1) -> None:
    """Set every sequence back to an id, after which ids are in use already."""
    async with transaction(url) as connection:
        if engine_name == "sqlite":
            await connection.execute(text("UPDATE sqlite_sequence SET seq = :to"), {"to": to})
        else:
            for table in GENERATED:
                sql = text(f"SELECT setval('{table.name}_id_seq', :to)")
                await connection.execute(sql, {"to": to})


async def _next_id(url: str, table: Table) -> int:
    async with transaction(url) as connection:
        found = await connection.execute(select(table).order_by(table.c.id.desc()).limit(1))
        [row] = found.mappings().all()
        values = {name: value for name, value in row.items() if name != "id"} | _fresh(table)
        new: int = (
            await connection.execute(insert(table).values(values).returning(table.c.id))
        ).scalar_one()
        await connection.rollback()
        return new


def _fresh(table: Table) -> dict[str, Any]:
    """Return new values for the columns with unique constraints."""
    shared = {
        column.name
        for key in table.constraints
        if isinstance(key, UniqueConstraint)
        for column in key.columns
        if not column.foreign_keys
    }
    return dict.fromkeys(shared - {"buffer_id"}, "one more")
