"""A store with data for every command."""

from __future__ import annotations

import asyncio

import pytest

import replaydb as rdb
from support.groups import episode

#: Terminal control sequences, a change of text direction, markup of rich.
HOSTILE = "\x1b[31mred\x1b[2J\x9b1m\r\x7f\u202e[bold]\0\ud800"
#: Its escaped form.
ESCAPED = r"\x1b[31mred\x1b[2J\x9b1m\r\x7f\u202e[bold]\x00\ud800"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
def engine_name(request: pytest.FixtureRequest) -> str:
    """The engine under test. Commands call the API, whose tests run on both engines.

    Some commands of each kind, which read, write, copy or change tables, are marked `both_engines`.
    """
    name: str = request.param
    return name


@pytest.fixture
def filled_url(url: str) -> str:
    """Six groups of two tasks: two drawn for step 7, one leased by `trainer-0`, one with a text."""

    async def fill() -> None:
        async with rdb.Store.open(url, run="first", run_metadata={"lr": 0.5}) as store:
            buffer = await store.buffer("math")
            await buffer.put(_group(i) for i in range(5))
            await buffer.sample(2, rdb.Fifo(), step=7)
        async with rdb.Store.open(url, run="second", lineage="first") as store:
            await store.buffer("code")
            buffer = await store.buffer("math")
            await buffer.put(_group(5))
            await buffer.lease(1, rdb.Lifo(), ttl=600, owner="trainer-0", step=8)

    asyncio.run(fill())
    return url


def _group(i: int) -> rdb.EpisodeGroup:
    texts = (None, f"first line\n{HOSTILE}") if i == 4 else (None, None)
    return rdb.EpisodeGroup(
        "even" if i % 2 == 0 else "odd",
        [
            episode(reward, i, text=text, finish_reason="stop", advantage=reward - i)
            for reward, text in zip((float(i), i + 1.0), texts, strict=True)
        ],
        group_uid=f"uid-{i}",
        prompt_uid=f"p{i // 2}",
        tags={"level": "hard" if i < 2 else "easy", "n": i, "ok": i == 3},
        priority=10.0 - i,
        status="failed" if i == 3 else "completed",
    )
