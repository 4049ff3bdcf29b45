"""What is in the tables, read from below the store."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from replaydb.database.schema import episode, episode_group, payload, transcript
from support.connections import transaction

CHILDREN = (payload, episode, transcript)


async def table_sizes(url: str) -> dict[str, int]:
    """Rows of every table that a put writes groups to."""
    async with transaction(url) as connection:
        return {
            table.name: await connection.scalar(select(func.count()).select_from(table)) or 0
            for table in (episode_group, *CHILDREN)
        }


async def group_facts(url: str, group_id: int) -> dict[str, Any]:
    """The row of one group."""
    async with transaction(url) as connection:
        rows = await connection.execute(select(episode_group).where(episode_group.c.id == group_id))
        return dict(rows.mappings().one())
