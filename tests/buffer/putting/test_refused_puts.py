"""A refused put changes nothing, even if it shares the transaction of a put that is stored."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import select

import replaydb as rdb
from replaydb import Capacity, EpisodeGroup, Store
from replaydb.database.repository import puts
from support.connections import transaction
from support.engines import in_turn
from support.groups import group, long_group
from support.rows import TABLES


@dataclass(frozen=True)
class Refusal:
    """A buffer with three groups, some of them leased, and a put that it refuses."""

    error: type[rdb.ReplayDBError]
    settings: dict[str, Any]
    put: list[EpisodeGroup]
    leased: int = 0
    options: dict[str, Any] = field(default_factory=dict)


FULL = {"capacity": Capacity(groups=3)}
#: A rate limit that blocks nothing here, but counts.
COUNTED = {"rate_limit": rdb.SamplesPerInsert(1.0, min_size=1, error_buffer=20.0)}
BEST = {"eviction": "lowest_priority", "priority_exponent": 2.0}
#: The second has no weight under an exponent of 2.
WEIGHTLESS = [group("new", "a"), group("none", "a", priority=1e-200)]
LONGER = [long_group("a-0", 9, "a"), long_group("b-0", 30, "b")]

REFUSALS = {
    "nothing can go": Refusal(rdb.BufferFullError, FULL, [group("new", "a")], 3),
    "nothing worse can go": Refusal(
        rdb.BufferFullError, FULL | BEST | COUNTED, [group("new", "a")], 3
    ),
    "room is made for one of two": Refusal(
        rdb.BufferFullError,
        FULL | {"task_capacity": {"b": Capacity(groups=1)}},
        [group("new-b", "b"), group("new-a", "a")],
        2,
    ),
    "more than fits": Refusal(
        rdb.InvalidInputError, FULL, [group(f"new-{i}", "a") for i in range(4)]
    ),
    "larger than fits": Refusal(
        rdb.InvalidInputError,
        {"capacity": Capacity(tokens=50)} | BEST,
        [group("new", "a"), long_group("wide", 51, "a")],
    ),
    "a priority without weight": Refusal(rdb.InvalidInputError, FULL | BEST, WEIGHTLESS, 1),
    "a queue": Refusal(rdb.RateLimitedError, {"rate_limit": rdb.Queue(3)}, [group("new", "c")]),
    "puts ahead of draws": Refusal(
        rdb.RateLimitedError,
        {"rate_limit": rdb.SamplesPerInsert(1.0, min_size=1, error_buffer=2.0)},
        [group("new", "a")],
    ),
    "a uid that is taken": Refusal(
        rdb.DuplicateGroupError, FULL, [group("new", "c"), group("a-0", "a")]
    ),
    "a longer one for the same uid": Refusal(
        rdb.BufferFullError,
        {"capacity": Capacity(tokens=45)},
        LONGER,
        2,
        {"on_duplicate": "replace"},
    ),
    "a longer one as a new group": Refusal(
        rdb.BufferFullError,
        {"capacity": Capacity(tokens=45)},
        LONGER,
        2,
        {"on_duplicate": "renew"},
    ),
}


@pytest.mark.parametrize(
    ("engine_name", "way", "layout"),
    in_turn(
        [
            *((way, "inside") for way in REFUSALS),
            ("nothing worse can go", "outside"),
            ("a longer one for the same uid", "outside"),
        ]
    ),
)
async def test_nothing_of_it_is_left(
    store: Store, url: str, way: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cursor, no count, and nothing was evicted for it."""
    refusal = REFUSALS[way]
    buffer = await store.buffer("math", **refusal.settings)
    stored = [group("a-0", "a"), group("a-1", "a"), group("b-0", "b")]
    await buffer.put(stored, cursor={"data": 1})
    if refusal.leased:
        await buffer.lease(refusal.leased, ttl=600)
    shared = _transactions(monkeypatch)
    before = await _tables(url)
    refused, empty = await asyncio.gather(
        buffer.put(refusal.put, cursor={"data": 2}, timeout=0, **refusal.options),
        buffer.put([], cursor={"other": 1}),
        return_exceptions=True,
    )
    assert shared == [2]
    assert (type(refused), empty) == (refusal.error, [])
    after = await _tables(url)
    assert {row["name"]: row["value"] for row in after["cursor"]} == {"data": 1, "other": 1}
    assert [row for row in after["cursor"] if row["name"] == "data"] == before["cursor"]
    # Its pack is recorded, so that it will be removed.
    packs = {row["id"] for row in before["pack"]}
    assert not any(row["live_parts"] for row in after["pack"] if row["id"] not in packs)
    after["pack"] = [row for row in after["pack"] if row["id"] in packs]
    assert before | {"cursor": []} == after | {"cursor": []}


@pytest.mark.parametrize(("engine_name", "layout"), in_turn(["inside", "outside"]))
async def test_a_put_that_is_refused_alone_is_rolled_back(
    store: Store, url: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its new task, and what it evicted for a lowered capacity."""
    buffer = await store.buffer("math")
    await buffer.put([group(f"a-{i}", "a") for i in range(3)])
    await buffer.lease(2, rdb.Lifo(), ttl=600)
    await buffer.update_settings(capacity=Capacity(groups=2))
    before = await _tables(url)
    tries = _transactions(monkeypatch)
    put = asyncio.create_task(buffer.put(long_group("new", 9, "b"), timeout=60))
    while len(tries) < 3:
        await buffer.update_settings(capacity=Capacity(groups=2, tokens=1000 + len(tries)))
    after = await _tables(url)
    # Its pack is recorded, so that it will be removed. The retries use it.
    assert len(after.pop("pack")) - len(before.pop("pack")) == (layout == "outside")
    del before["buffer"], after["buffer"]
    assert before == after
    await buffer.update_settings(capacity=None)
    [group_id] = await put
    assert (await buffer.get([group_id]))[0].task_name == "b"
    assert len((await _tables(url))["pack"]) == 2 * (layout == "outside")


def _transactions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of puts of each transaction."""
    sizes: list[int] = []
    put = puts.put

    def counted(*arguments: Any, **named: Any) -> Any:
        sizes.append(len(named["several"]))
        return put(*arguments, **named)

    monkeypatch.setattr(puts, "put", counted)
    return sizes


async def _tables(url: str) -> dict[str, list[dict[str, Any]]]:
    async with transaction(url) as connection:
        return {
            table.name: [
                dict(row)
                for row in (
                    await connection.execute(select(table).order_by(*table.primary_key))
                ).mappings()
            ]
            for table in TABLES
            if table.name != "commit_proof"  # every transaction writes to it
        }
