"""Many processes on one database, some of them killed while they work."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Select, func, select

import replaydb as rdb
from replaydb import Capacity, SamplesPerInsert, Store
from replaydb.database.engines import backend_for
from replaydb.database.runtime.transactions import Database
from replaydb.database.tables import schema
from support import child_processes
from support.clock import Clock
from support.engines import in_turn, sqlite_nightly
from support.groups import group, groups
from support.invariants import check_invariants, number_of, statuses
from support.workers import Worker, workers

_NIGHTLY = pytest.mark.nightly
_REPOSITORY = "replaydb.database.repository"


@asynccontextmanager
async def observed(url: str, statement: Select[Any]) -> AsyncIterator[list[Any]]:
    """Run a query repeatedly until the block ends; yield the list of rows read."""
    database, seen, busy = Database(backend_for(url)), [], True

    async def watch() -> None:
        while busy:
            [row] = await database.read(lambda session: session.run(statement))
            seen.append(row)
            await asyncio.sleep(0.001)

    watching = asyncio.ensure_future(watch())
    try:
        yield seen
    finally:
        busy = False
        await watching
        await database.close()


@sqlite_nightly
@pytest.mark.parametrize(
    ("num_groups", "kills"), [(1_000, 3), pytest.param(2_000, 6, marks=_NIGHTLY)]
)
async def test_every_group_is_acked_once_though_consumers_are_killed(
    store: Store, url: str, tmp_path: Path, num_groups: int, kills: int
) -> None:
    buffer = await store.buffer("math")
    for start in range(0, num_groups, 100):
        await buffer.put([group(f"g{start + i}", rewards=[1.0]) for i in range(100)])
    log, chance = tmp_path / "log", random.Random(0)
    running = [Worker(child_processes.consume, url, str(log), i) for i in range(8)]
    killed: set[int] = set()
    with workers() as _:
        try:
            while any(one.is_running for one in running):
                await asyncio.sleep(chance.uniform(0.05, 0.3))
                if len(killed) < kills and log.exists():
                    victim = chance.randrange(len(running))
                    if running[victim].is_running:
                        killed.add(running[victim].pid)
                        running[victim].kill()
                        await running[victim].ended()
                        running[victim] = Worker(
                            child_processes.consume, url, str(log), 100 + len(killed)
                        )
        finally:
            for one in running:
                one.kill()

    assert set((await statuses(url)).values()) == {"archived"}
    assert await number_of(url, schema.lease) == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    acked = Counter(one for what, *_, ids in events if what == "ack" for one in ids)
    assert set(acked.values()) == {1}
    assert len(killed) == kills
    # Between a commit and its line in the file a consumer can be killed as well.
    unsure = {one for what, _, pid, _, ids in events if pid in killed for one in ids}
    assert set(range(1, num_groups + 1)) - acked.keys() <= unsure
    assert await number_of(url, schema.draw_group) >= num_groups
    _check_exclusive(events)


def _check_exclusive(events: list[Any]) -> None:
    """Check that no group was leased twice between the start and the ack of a lease."""
    holds: dict[int, list[tuple[float, int]]] = {}
    for what, at, _, lease_id, ids in events:
        if what == "hold":
            for one in ids:
                holds.setdefault(one, []).append((at, lease_id))
    begun = {lease_id: at for what, at, _, lease_id, _ in events if what == "hold"}
    for what, at, _, lease_id, ids in events:
        if what == "ack":
            for one in ids:
                others = [t for t, other in holds[one] if other != lease_id]
                assert not [t for t in others if begun[lease_id] < t < at]


@sqlite_nightly
async def test_capacity_is_never_exceeded(store: Store, url: str) -> None:
    await store.buffer("math", capacity=Capacity(groups=20))
    live = select(func.count()).where(schema.episode_group.c.group_status != "archived")
    with workers(
        *(Worker(child_processes.write, url, f"w{i}", 12, 0.0) for i in range(8))
    ) as running:
        async with observed(url, live) as seen:
            assert {await one.ended() for one in running} == {0}
    assert max(row[0] for row in seen) <= 20
    counts = Counter((await statuses(url)).values())
    assert counts == {"completed": 20, "archived": 8 * 4 * (1 + 2 + 3) - 20}


@pytest.mark.parametrize(
    ("write_pause", "read_pause"),
    [(0.0, 0.03), pytest.param(0.03, 0.0, marks=pytest.mark.nightly)],
)
@sqlite_nightly
async def test_samples_per_insert_holds_its_band(
    store: Store, url: str, write_pause: float, read_pause: float
) -> None:
    limit = SamplesPerInsert(ratio=2.0, min_size=10, error_buffer=8.0)
    buffer = await store.buffer("math", rate_limit=limit)
    counters = select(schema.buffer.c.limited_inserts, schema.buffer.c.limited_samples)
    writers = [Worker(child_processes.write, url, f"w{i}", 10_000, write_pause) for i in range(3)]
    readers = [Worker(child_processes.read, url, 20, 4, read_pause) for _ in range(3)]
    with workers(*writers, *readers):
        async with observed(url, counters) as seen:
            assert {await one.ended() for one in readers} == {0}
    diffs = [inserts * 2 - samples for inserts, samples in seen if samples]
    assert 20 - 8 <= min(diffs) <= max(diffs) <= 20 + 8
    assert max(diffs) > min(diffs)
    assert seen[-1][1] == 3 * 20 * 4
    (task,) = (await buffer.stats()).tasks
    assert task.num_sampled == 240
    assert 120 + 12 / 2 <= task.num_inserted <= 120 + 28 / 2


@sqlite_nightly
async def test_episodes_from_many_processes(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    for i in range(10):
        await buffer.open_group("gsm8k", f"group-{i}", 8)
    with workers(
        *(Worker(child_processes.add, url, 10, position) for position in range(8))
    ) as running:
        assert {await one.ended() for one in running} == {0}
    assert set((await statuses(url)).values()) == {"completed"}
    for stored in await buffer.get(range(1, 11)):
        assert stored.rewards.tolist() == [float(i) for i in range(8)]


Check = Callable[[Store, str], Any]


async def _nothing_put(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    assert await statuses(url) == {"gsm8k-0": "completed", "gsm8k-1": "completed"}
    assert await buffer.cursor("dataset") is None
    await buffer.put([group("new-0"), group("new-1")], cursor={"dataset": 2})


async def _all_put(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    assert len(await statuses(url)) == 4
    assert await buffer.cursor("dataset") == 2
    with pytest.raises(rdb.DuplicateGroupError):
        await buffer.put([group("new-0"), group("new-1")], cursor={"dataset": 3})
    assert await buffer.cursor("dataset") == 2


async def _back_in_time(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    assert set((await statuses(url)).values()) == {"leased"}
    assert await buffer.cursor("step") is None
    async with buffer.lease(2, ttl=60) as lease:
        assert [one.attempts for one in lease.batch.groups] == [1, 1]
    assert set((await statuses(url)).values()) == {"archived"}


async def _nothing_revoked(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    (info,) = await buffer.leases()
    assert await buffer.revoke(info.id) == [1, 2]
    assert [one.attempts for one in await buffer.get([1, 2])] == [1, 1]


async def _nothing_drawn(store: Store, url: str) -> None:
    buffer = await store.buffer("math")
    assert set((await statuses(url)).values()) == {"completed"}
    assert [one.times_sampled for one in await buffer.get([1, 2])] == [0, 0]
    assert await buffer.draws() == []
    assert await number_of(url, schema.lease) == 0


@pytest.mark.parametrize(
    ("engine_name", "action", "where", "check"),
    in_turn(
        [
            ("ack", f"{_REPOSITORY}.cursors:save", _back_in_time),
            ("revoke", f"{_REPOSITORY}.tasks:save", _nothing_revoked),
            ("put", f"{_REPOSITORY}.tasks:save", _nothing_put),
            ("put", "replaydb.database.runtime.group_commit:_answer", _all_put),
            ("sample", f"{_REPOSITORY}.tasks:save", _nothing_drawn),
            ("lease", "replaydb.buffer.core:decoded", _back_in_time),
            *(
                pytest.param(action, f"{_REPOSITORY}.{where}", check, marks=_NIGHTLY)
                for action, where, check in [
                    ("ack", "leases:ack", _back_in_time),
                    ("ack", "transitions:archive", _back_in_time),
                    ("revoke", "transitions:reopen", _nothing_revoked),
                    ("put", "cursors:save", _nothing_put),
                    ("sample", "lineage:record", _nothing_drawn),
                    ("lease", "lineage:record", _nothing_drawn),
                ]
            ),
        ]
    ),
)
async def test_killed_at_a_given_statement(
    store: Store, url: str, clock: Clock, action: str, where: str, check: Check
) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(2))
    with workers(Worker(child_processes.die_at, url, action, where)) as (worker,):
        assert await worker.ended() == -signal.SIGKILL
    await check_invariants(url)
    clock.jump(3600)  # the leases of the worker, whose clock runs, have expired
    await check(store, url)


@pytest.mark.parametrize(
    "where", ["settle", *(pytest.param(it, marks=_NIGHTLY) for it in ("_insert", "_summarise"))]
)
async def test_killed_between_the_last_episode_and_completion(
    store: Store, url: str, where: str
) -> None:
    buffer = await store.buffer("math")
    await buffer.open_group("gsm8k", "open", 2)
    await buffer.add_episode("open", (await _episode(1.0)), position=0)
    statement = f"{_REPOSITORY}.incremental_groups:{where}"
    with workers(Worker(child_processes.die_at, url, "add", statement)) as (worker,):
        assert await worker.ended() == -signal.SIGKILL
    await check_invariants(url)
    assert await statuses(url) == {"open": "pending"}
    assert await buffer.add_episode("open", await _episode(2.0), position=1) == "completed"
    assert (await buffer.get([1]))[0].rewards.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("engine_name", "where"), in_turn(["tags:_save", "tags:delete_tags", "tags:insert_tags"])
)
async def test_killed_while_an_index_is_filled(store: Store, url: str, where: str) -> None:
    buffer = await store.buffer("math")
    await buffer.put([group(tags={"level": i % 2}) for i in range(5)])
    with workers(Worker(child_processes.die_at, url, "index", f"{_REPOSITORY}.{where}")) as (
        worker,
    ):
        assert await worker.ended() == -signal.SIGKILL
    await check_invariants(url)
    odd = rdb.col.tags["level"] == 1
    assert await buffer.count(where=odd) == 2
    buffer = await store.buffer("math", indexed_tags="level")
    assert not buffer._row.pending_tags
    assert await buffer.count(where=odd) == 2


async def test_killed_between_eviction_and_insert(store: Store, url: str) -> None:
    buffer = await store.buffer("math", capacity=Capacity(groups=2))
    await buffer.put(groups(2))
    where = f"{_REPOSITORY}.puts:GroupSums"
    with workers(Worker(child_processes.die_at, url, "put", where)) as (worker,):
        assert await worker.ended() == -signal.SIGKILL
    assert await statuses(url) == {"gsm8k-0": "completed", "gsm8k-1": "completed"}
    await buffer.put(group("x"))


async def _episode(reward: float) -> rdb.Episode:
    return group(rewards=[reward]).episodes[0]
