"""What a database holds, compared with what its writers were promised."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from sqlalchemy import func, select, text

from processes.derived import check_group
from processes.worker import BUFFER
from replaydb import Store
from replaydb.database.schema import episode_group, task
from support.connections import transaction
from support.ledger import check_books


def acknowledged(path: Path) -> set[str]:
    """Uids whose put had returned. A last line that was cut off was never acknowledged whole."""
    if not path.exists():
        return set()
    return {line for line in path.read_text().split("\n")[:-1] if line}


async def check_stored(url: str, acks: Path) -> int:
    """Nothing acknowledged is missing, nothing is half there. Returns how many groups there are."""
    promised = acknowledged(acks)  # before looking: writers may still be at work
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
    torn = [put for put, count in puts.items() if count != int(put.rsplit("-", 1)[1])]
    assert not torn, torn
    await check_books(url)
    await check_file(url)
    return len(groups)


async def check_draws(url: str) -> int:
    """Every draw was counted on its groups and on their tasks alike. Returns how many."""
    async with transaction(url) as connection:
        on_groups = await connection.scalar(select(func.sum(episode_group.c.times_sampled)))
        on_tasks = await connection.scalar(select(func.sum(task.c.num_sampled)))
    assert (on_groups or 0) == (on_tasks or 0)
    return int(on_tasks or 0)


async def check_file(url: str) -> None:
    """SQLite's own opinion of its file."""
    if not url.startswith("sqlite"):
        return
    async with transaction(url) as connection:
        assert await connection.scalar(text("PRAGMA integrity_check")) == "ok"
        assert (await connection.execute(text("PRAGMA foreign_key_check"))).all() == []
