"""Comparison of a database with the groups that were acknowledged to its writers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from sqlalchemy import func, select, text

from processes.derived import check_group
from processes.worker import BUFFER
from replaydb import Store
from replaydb.database.tables.schema import episode_group, task
from support.connections import transaction
from support.invariants import check_invariants


def acknowledged(path: Path) -> set[str]:
    """Return the uids of puts that have returned. The last line may be incomplete after a kill."""
    if not path.exists():
        return set()
    return {line for line in path.read_text().split("\n")[:-1] if line}


async def check_stored(url: str, acks: Path) -> int:
    """Check that acknowledged groups are stored, puts are atomic, and the tables are consistent.

    Returns:
        The number of stored groups.
    """
    promised = acknowledged(acks)  # before reading the database: writers may still be running
    async with Store.open(url) as store:
        buffer = await store.buffer(BUFFER)
        async with transaction(url) as connection:
            ids = (await connection.scalars(select(episode_group.c.id))).all()
        groups = [
            group
            for first in range(0, len(ids), 200)
            for group in await buffer.get(ids[first : first + 200])
        ]
    for group in groups:
        check_group(group)
    uids = {group.group_uid for group in groups}
    assert promised <= uids, f"{len(promised - uids)} lost"
    puts = Counter(uid.rsplit("-", 3)[0] + "-of-" + uid.rsplit("-", 1)[1] for uid in uids)
    partial = [put for put, count in puts.items() if count != int(put.rsplit("-", 1)[1])]
    assert not partial, partial
    await check_invariants(url)
    await check_file(url)
    return len(groups)


async def check_draws(url: str) -> int:
    """Check that groups and tasks have counted the same number of draws; return the number."""
    async with transaction(url) as connection:
        on_groups = await connection.scalar(select(func.sum(episode_group.c.times_sampled)))
        on_tasks = await connection.scalar(select(func.sum(task.c.num_sampled)))
    assert (on_groups or 0) == (on_tasks or 0)
    return int(on_tasks or 0)


async def check_file(url: str) -> None:
    """Run the integrity checks of SQLite."""
    if not url.startswith("sqlite"):
        return
    async with transaction(url) as connection:
        assert await connection.scalar(text("PRAGMA integrity_check")) == "ok"
        assert (await connection.execute(text("PRAGMA foreign_key_check"))).all() == []
