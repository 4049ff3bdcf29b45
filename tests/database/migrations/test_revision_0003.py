"""Revision 0003: the migration of existing rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import insert, select

from replaydb.database import migrations
from replaydb.database.tables.schema import draw, draw_group, episode, episode_group
from support.connections import transaction
from support.rows import fill, group_row

NOW = datetime(2026, 1, 15, tzinfo=UTC)


async def rows_of(url: str, table: Any, *columns: str) -> list[tuple[Any, ...]]:
    async with transaction(url) as connection:
        chosen = [table.c[name] for name in columns]
        found = await connection.execute(select(*chosen).order_by(*table.primary_key))
        return [tuple(row) for row in found]


async def test_versions_are_restored_from_episodes(empty_url: str) -> None:
    await migrations.upgrade(empty_url, "0002")
    async with transaction(empty_url) as connection:
        await fill(connection)  # episodes without a version
        unknown = {"min_policy_version": None, "max_policy_version": None, "staleness": None}
        await connection.execute(insert(episode_group), [group_row(100, "completed", **unknown)])
        await connection.execute(insert(episode), [
            {"group_id": 100, "position": position, "min_policy_version": version,
             "max_policy_version": version, "num_tokens": 4, "num_loss_tokens": 2,
             "num_turns": 1, "metadata": {}}
            for position, version in enumerate((4, 6))
        ])  # fmt: skip
    await migrations.upgrade(empty_url, "0003")
    columns = ("min_policy_version", "max_policy_version", "comparable_version", "staleness")
    *_, before, erased = await rows_of(empty_url, episode_group, *columns)
    assert before == (3, 3, 3, 0)
    assert erased == (4, 6, None, None)
    await migrations.downgrade(empty_url, "0002")
    *_, erased = await rows_of(empty_url, episode_group, *columns[:2])
    assert erased == (None, None)


async def test_outcomes_of_earlier_draws(empty_url: str) -> None:
    await migrations.upgrade(empty_url, "0002")
    later, first = NOW + timedelta(hours=1), NOW - timedelta(hours=1)
    async with transaction(empty_url) as connection:
        await fill(connection)  # group 2 is leased
        times = {"created_at": first, "completed_at": later}
        await connection.execute(insert(episode_group), [group_row(100, "completed", **times)])
        for number in (10, 11):
            values = {"id": number, "buffer_id": 1, "policy": "Fifo()", "created_at": NOW}
            await connection.execute(insert(draw), values)
            await connection.execute(insert(draw_group), [
                {"draw_id": number, "position": position, "group_id": one, "probability": 1.0,
                 "weight": 1.0}
                for position, one in enumerate((2, 3, 100))
            ])  # fmt: skip
    await migrations.upgrade(empty_url, "0003")
    found = await rows_of(empty_url, draw_group, "draw_id", "group_id", "outcome", "times_replaced")
    assert found == [
        (1, 1, None, 0),
        (1, 99, None, 0),
        (10, 2, None, 0),
        (10, 3, None, 0),
        (10, 100, None, None),
        (11, 2, "leased", 0),
        (11, 3, None, 0),
        (11, 100, None, None),
    ]
