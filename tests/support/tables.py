"""Contents of the tables, read without the store."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, Integer, func, select

from replaydb.database.tables.schema import episode, episode_group, payload, transcript
from support.connections import transaction
from support.rows import TABLES

CHILDREN = (payload, episode, transcript)


async def table_sizes(url: str) -> dict[str, int]:
    """Return the number of rows of every table that a put writes to."""
    async with transaction(url) as connection:
        return {
            table.name: await connection.scalar(select(func.count()).select_from(table)) or 0
            for table in (episode_group, *CHILDREN)
        }


async def wrong_numbers(url: str) -> dict[str, Any]:
    """Return non-numeric values in numeric columns, which SQLite would store."""
    async with transaction(url) as connection:
        return {
            f"{table.name}.{name}": value
            for table in TABLES
            for row in (await connection.execute(select(table))).mappings()
            for name, value in row.items()
            if isinstance(table.c[name].type, Integer | Float)
            and not isinstance(value, int | float | None)
        }


async def group_facts(url: str, group_id: int) -> dict[str, Any]:
    """Return the row of a group."""
    async with transaction(url) as connection:
        rows = await connection.execute(select(episode_group).where(episode_group.c.id == group_id))
        return dict(rows.mappings().one())
