"""Waiting puts cost little, and a last draw returns complete groups."""

from __future__ import annotations

from typing import Any

import pytest

import replaydb as rdb
from replaydb import Store
from replaydb.database.runtime.transactions import Database
from support.groups import group


@pytest.mark.parametrize(
    ("engine_name", "capacity"),
    [
        ("sqlite", True),
        ("postgresql", False),
        pytest.param("sqlite", False, marks=pytest.mark.nightly),
        pytest.param("postgresql", True, marks=pytest.mark.nightly),
    ],
    ids=["sqlite-capacity", "postgresql-rate limit", "sqlite-rate limit", "postgresql-capacity"],
)
async def test_puts_that_wait_do_not_wake_each_other(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch, capacity: bool
) -> None:
    settings = {"capacity": rdb.Capacity(groups=1)} if capacity else {"rate_limit": rdb.Queue(1)}
    here = await store.buffer("math", **settings)
    await here.put(group("first"))
    lease = await here.lease(1, ttl=60) if capacity else None
    async with Store.open(url) as other:
        there = await other.buffer("math")
        attempts = 0
        write = Database.write

        async def counted(self: Database, work: Any, **options: Any) -> Any:
            nonlocal attempts
            attempts += 1
            return await write(self, work, **options)

        monkeypatch.setattr(Database, "write", counted)
        for buffer in (here, there):
            with pytest.raises((rdb.RateLimitedError, rdb.BufferFullError)):
                await buffer.put(group(f"late in {buffer is here}"), timeout=0.7)
        # The first and the last attempt, one when it begins to listen, and a margin.
        assert attempts <= 12
    if lease is not None:
        await lease.ack()


async def test_a_last_draw_returns_the_texts_that_it_drops(store: Store) -> None:
    buffer = await store.buffer("math", max_times_sampled=1, archived_payload="drop")
    episode = rdb.Episode(prompt_ids=[1], response_ids=[2], text="the last word")
    await buffer.put(rdb.EpisodeGroup("gsm8k", [episode]))
    batch = await buffer.sample(1)
    assert batch.groups[0].status == rdb.GroupStatus.ARCHIVED
    assert batch.groups[0].episodes == (episode,)
    assert batch.groups[0].episodes[0].text == "the last word"
