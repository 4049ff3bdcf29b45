"""Invariants of the tables that must hold after every call, checked without the store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.repository import packs, recount
from replaydb.database.tables.schema import (
    buffer,
    draw_group,
    episode_group,
    group_tag,
    lease,
    pack,
    payload_place,
)
from replaydb.operations.verify import (
    orphans,
    select_groups_of_stray_texts,
    select_groups_of_wrong_trajectories,
    select_miscounted_groups,
    select_mismatched_leases,
)
from replaydb.packs import PayloadStore
from support.connections import CoreSession, transaction

# Built once and combined into one statement, as building and executing many is slow.
ORPHANS = select(
    *(
        statement.scalar_subquery().label(f"{child}[{i}] of {parent}")
        for i, (child, parent, statement) in enumerate(orphans())
    )
)
WRONG_GROUPS = (
    select_miscounted_groups(10),
    select_mismatched_leases(10),
    select_groups_of_stray_texts(10),
    select_groups_of_wrong_trajectories(10),
)
LIVE = {"pending", "completed", "leased", "aborted"}
Row = dict[str, Any]


async def check_invariants(url: str, *, idle_leases: bool = False) -> list[Row]:
    """Check that task counters, staleness, leases and child rows agree with the groups.

    Args:
        url: URL of the database.
        idle_leases: Allow unexpired leases without groups, which remain if groups are deleted or
            replaced.

    Returns:
        The rows of all groups.
    """
    async with transaction(url) as connection:
        return await check_tables(connection, idle_leases=idle_leases)


async def _wrong_counters(connection: AsyncConnection, buffer_id: int) -> Any:
    return await connection.run_sync(
        lambda core: recount.wrong_counters(CoreSession(core), buffer_id)
    )


async def check_tables(connection: AsyncConnection, *, idle_leases: bool) -> list[Row]:
    """Check the invariants as `check_invariants` does, on an open connection."""
    groups = await _rows(connection, select(episode_group))
    for one in await _rows(connection, select(buffer)):
        mine = [row for row in groups if row["buffer_id"] == one["id"]]
        assert await _wrong_counters(connection, one["id"]) == {}
        for row in mine:
            _check_group(row, one)
    await _check_leases(connection, groups, idle_leases)
    await _check_outcomes(connection, groups)
    await _check_children(connection)
    await _check_tags(connection, groups)
    await _check_packs(connection)
    return groups


async def group_rows(url: str) -> list[Row]:
    """Return the rows of all groups by id."""
    async with transaction(url) as connection:
        return await _rows(connection, select(episode_group).order_by(episode_group.c.id))


async def group_row(url: str, group_id: int) -> Row:
    """Return the row of a group."""
    return next(row for row in await group_rows(url) if row["id"] == group_id)


async def statuses(url: str) -> dict[str, str]:
    """Return the status of every group by uid."""
    return {row["group_uid"]: row["group_status"] for row in await group_rows(url)}


async def number_of(url: str, table: Any) -> int:
    """Return the number of rows of a table."""
    async with transaction(url) as connection:
        return int(await connection.scalar(select(func.count()).select_from(table)) or 0)


async def _rows(connection: AsyncConnection, statement: Any) -> list[Row]:
    return [dict(row) for row in (await connection.execute(statement)).mappings()]


def _check_group(row: Row, owner: Row) -> None:
    settings = owner["settings"]
    limit, oldest = settings.max_staleness_of(row["task_name"]), row["comparable_version"]
    assert oldest in (None, row["min_policy_version"]), row
    if row["group_status"] in LIVE:
        expected = None if oldest is None else owner["policy_version"] - oldest
        assert row["staleness"] == expected, row
    if row["group_status"] in {"completed", "aborted"} and None not in (limit, oldest):
        assert limit is not None
        by_newest = settings.expire_by == "newest_token"
        version = row["max_policy_version"] if by_newest else oldest
        assert owner["policy_version"] - version <= limit, row
    assert row["weight"] == settings.weight(row["priority"])
    is_leased = row["group_status"] == "leased"
    assert (row["leased_from"] is not None) == is_leased, row
    # A pending group may be claimed by a lease.
    assert (row["lease_id"] is not None) == is_leased or row["group_status"] == "pending", row
    assert (row["group_status"] == "archived") == (row["archived_at"] is not None)
    assert row["deadline"] is None or row["group_status"] == "pending"
    assert row["times_sampled"] >= 0
    if row["times_sampled"]:
        assert row["first_sampled_at"] <= row["last_sampled_at"]


async def _check_leases(connection: AsyncConnection, groups: list[Row], idle_ok: bool) -> None:
    leases = {row["id"]: row for row in await _rows(connection, select(lease))}
    for row in groups:
        if row["lease_id"] is not None:
            assert leases[row["lease_id"]]["buffer_id"] == row["buffer_id"]
    used = {row["lease_id"] for row in groups}
    idle = [row for row in leases.values() if row["id"] not in used]
    assert idle_ok or all(row["expires_at"] <= datetime.now(UTC) for row in idle), idle


async def _check_outcomes(connection: AsyncConnection, groups: list[Row]) -> None:
    """At most one draw of a group has the outcome "leased", and then the group is leased."""
    ids = select(draw_group.c.group_id).where(draw_group.c.outcome == "leased")
    leased = sorted((await connection.scalars(ids)).all())
    assert len(leased) == len(set(leased)), leased
    assert set(leased) <= {row["id"] for row in groups if row["group_status"] == "leased"}, leased


async def _check_tags(connection: AsyncConnection, groups: list[Row]) -> None:
    """The tag index contains every group, unless it is being filled or emptied."""
    expected: dict[tuple[int, str], Any] = {}
    complete = set()
    for one in await _rows(connection, select(buffer)):
        complete |= set() if one["pending_tags"] else {one["id"]}
        for row in groups:
            for name in one["settings"].indexed_tags:
                value = row["tags"].get(name) if isinstance(row["tags"], dict) else None
                if row["buffer_id"] == one["id"] in complete and isinstance(
                    value, str | float | int
                ):
                    known = (value[:100], None) if isinstance(value, str) else (None, value)
                    expected[row["id"], name] = known
    found = {
        (row["group_id"], row["name"]): (row["text"], row["number"])
        for row in await _rows(connection, select(group_tag))
        if row["buffer_id"] in complete
    }
    assert found.keys() == expected.keys()
    for key, (text, number) in expected.items():
        assert found[key] == (text, None if number is None else float(number)), key


async def _check_children(connection: AsyncConnection) -> None:
    """Groups have exactly the child rows that their columns imply, and there are no orphans."""
    for statement in WRONG_GROUPS:
        assert await _rows(connection, statement) == []
    [orphaned] = await _rows(connection, ORPHANS)
    assert orphaned == dict.fromkeys(orphaned, 0)


async def _check_packs(connection: AsyncConnection) -> None:
    """The reference counts of packs are correct, and referenced packs exist."""
    assert await connection.run_sync(lambda core: packs.miscounted(CoreSession(core))) == []
    stores = await _rows(connection, select(payload_place))
    existing: set[str] = set()
    for row in stores:
        store, end = (
            PayloadStore(row["url"], row["store_uid"]),
            asyncio.get_running_loop().time() + 60,
        )
        existing |= {each.name async for each in store.listed(end=end)}
        await store.close()
    for row in await _rows(connection, select(pack)):
        assert (row["condemned_at"] is None) == (row["live_parts"] > 0), row
        assert row["name"] in existing or not row["live_parts"], row
        assert not (row["removing"] and row["live_parts"]), row
