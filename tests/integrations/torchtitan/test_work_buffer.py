"""The work buffer compared with torchtitan's own, and its extensions."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from torchtitan.experiments.rl.components import work_buffer
from torchtitan.experiments.rl.components.work_buffer import RolloutGroupWork

import replaydb as rdb
from integrations.torchtitan import controller
from integrations.torchtitan.rollouts import Sample, failed_group, rollout_group
from replaydb.database.tables.schema import lease, trajectory
from replaydb.integrations.torchtitan import RolloutGroupWorkBuffer, to_rollout_group
from replaydb.integrations.torchtitan import buffer as stored
from support.connections import transaction
from support.engines import both_engines, postgresql_nightly

Build = Callable[..., Any]
SAMPLE = Sample(question="2 + 2?", names_per_turn=(("a", "b"), ("c",)))


@pytest.fixture
async def build(url: str) -> AsyncIterator[Build]:
    """Create buffers of the store, which are closed at the end of the test."""
    made: list[Any] = []

    def one(active: int = 4, window: int = 1, **options: Any) -> Any:
        fields: dict[str, Any] = {"url": url, "sample_type": Sample, **options}
        config = RolloutGroupWorkBuffer.Config(**fields)
        made.append(config.build(max_active_rollout_groups=active, window_size=window))
        return made[-1]

    yield one
    for buffer in made:
        await buffer.close()


def theirs(active: int = 4, window: int = 1) -> Any:
    config = work_buffer.RolloutGroupWorkBuffer.Config()
    return config.build(max_active_rollout_groups=active, window_size=window)


async def add(buffer: Any, *group_ids: int) -> None:
    for group_id in group_ids:
        assert await buffer.wait_for_slot()
        await buffer.add_work(RolloutGroupWork(group_id=group_id, sample=SAMPLE))


async def finalize(buffer: Any, *group_ids: int) -> None:
    for group_id in group_ids:
        await buffer.finalize_work(rollout_group(group_id))


async def taken(buffer: Any, count: int = 1) -> list[int]:
    return [(await asyncio.wait_for(buffer.take_finalized(), 30)).group_id for _ in range(count)]


async def release(stored: rdb.Buffer) -> None:
    """End the claim of the oldest group, as if it had expired."""
    uid = (await stored.trajectories())[0].claim_uid
    assert uid is not None
    await stored.release_claim(uid, reason="lost")


async def claimed(buffer: Any, count: int = 1) -> list[int]:
    return [(await asyncio.wait_for(buffer.claim_next(), 30)).group_id for _ in range(count)]


def gauges(buffer: Any) -> dict[str, float]:
    return {one.key: one.value.value for one in buffer.metrics()}


async def is_waiting(call: Any, seconds: float = 0.2) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.ensure_future(call)
    await asyncio.sleep(seconds)
    assert not task.done()
    return task


async def test_the_window_starts_at_the_oldest_group(build: Build) -> None:
    buffer = build(8, 4)
    await add(buffer, 0, 1, 2, 3, 4)
    assert await claimed(buffer) == [0]
    await finalize(buffer, 4, 3, 1, 2)
    assert await taken(buffer, 3) == [1, 2, 3]
    waiting = await is_waiting(buffer.take_finalized())  # 4 is beyond the window, 0 is its head
    await finalize(buffer, 0)
    assert (await asyncio.wait_for(waiting, 30)).group_id == 0
    assert await taken(buffer) == [4]


async def test_a_slot_is_free_when_it_is_released(build: Build) -> None:
    buffer = build(2)
    await add(buffer, 0, 1)
    await finalize(buffer, 0, 1)
    assert await taken(buffer) == [0]
    waiting = await is_waiting(buffer.wait_for_slot())
    with pytest.raises(RuntimeError, match="no free slot"):
        await buffer.add_work(RolloutGroupWork(group_id=2, sample=SAMPLE))
    await buffer.release_active_groups(1, reason="trained")
    assert await asyncio.wait_for(waiting, 30)
    await add(buffer, 2)
    assert gauges(buffer)["rollout_buffer/available_active_slots"] == 0


async def test_work_has_its_sample_and_state(build: Build) -> None:
    buffer = build()
    await add(buffer, 3)
    work = await buffer.claim_next()
    assert (work.group_id, work.sample, work.state.value) == (3, SAMPLE, "inflight")
    await finalize(buffer, 3)
    assert repr(await buffer.take_finalized()) == repr(rollout_group(3))


async def test_close_ends_waiting_calls(build: Build) -> None:
    buffer = build(1)
    await add(buffer, 0)
    assert await claimed(buffer) == [0]
    calls = (buffer.wait_for_slot(), buffer.claim_next(), buffer.take_finalized())
    waiting = [await is_waiting(call, 0.05) for call in calls]
    await buffer.close()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 30) == [False, None, None]
    assert await buffer.claim_next() is None
    await finalize(buffer, 0)  # dropped, as in torchtitan
    await buffer.add_work(RolloutGroupWork(group_id=1, sample=SAMPLE))  # the same
    await buffer.release_active_groups(1, reason="trained")
    again = build(1)
    assert await claimed(again) == [0]  # in torchtitan the buffer is empty


async def test_waiting_calls_can_be_cancelled(build: Build) -> None:
    buffer = build()
    waiting = await is_waiting(buffer.claim_next())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await add(buffer, 0)
    assert await claimed(buffer) == [0]


@both_engines
async def test_it_behaves_like_torchtitans_buffer(build: Build) -> None:
    """Calls that return at once in torchtitan return the same here; gauges agree at each step."""
    rng = random.Random(0)
    pair = [theirs(5, 3), build(5, 3)]
    inflight: list[int] = []
    num_taken = added = 0
    for _ in range(100):
        now = gauges(pair[0])
        assert gauges(pair[1]) == now
        head = [one.state.value for one in pair[0]._work_by_group_id.values()]
        match rng.randrange(5):
            case 0 if now["rollout_buffer/available_active_slots"]:
                for buffer in pair:
                    await add(buffer, added)
                added += 1
            case 1 if "waiting" in head:
                [[one], [same]] = [await claimed(buffer) for buffer in pair]
                assert one == same
                inflight.append(one)
            case 2 if inflight:
                group_id = inflight.pop(rng.randrange(len(inflight)))
                made = failed_group(group_id) if rng.randrange(4) == 0 else rollout_group(group_id)
                for buffer in pair:
                    await buffer.finalize_work(made)
            case 3 if _takeable(pair[0]):
                [one, same] = [await buffer.take_finalized() for buffer in pair]
                assert repr(one) == repr(same)
                num_taken += 1
            case 4 if num_taken:
                reason = rng.choice(["trained", "untrainable_group"])
                for buffer in pair:
                    await buffer.release_active_groups(1, reason=reason)
                num_taken -= 1


def _takeable(buffer: Any) -> bool:
    works = buffer._work_by_group_id
    return any(
        work.state.value == "finalized" and group_id < next(iter(works)) + 3
        for group_id, work in works.items()
    )


async def test_a_known_id_takes_no_slot(build: Build) -> None:
    """torchtitan's buffer drops the work and loses a slot permanently."""
    leaking = theirs(2)
    await add(leaking, 0, 0)
    await finalize(leaking, 0)
    assert await taken(leaking) == [0]
    await leaking.release_active_groups(1, reason="trained")
    assert gauges(leaking)["rollout_buffer/available_active_slots"] == 1

    buffer = build(2)
    await add(buffer, 0, 0)
    await finalize(buffer, 0)
    assert await taken(buffer) == [0]
    await buffer.release_active_groups(1, reason="trained")
    await add(buffer, 0)  # trained already
    assert gauges(buffer)["rollout_buffer/available_active_slots"] == 2


async def test_trained_groups_are_released_first_and_dropped_groups_last(
    build: Build, store: rdb.Store
) -> None:
    buffer = build()
    await add(buffer, 0, 1, 2)
    await finalize(buffer, 0, 1, 2)
    assert await taken(buffer, 3) == [0, 1, 2]
    await buffer.release_active_groups(1, reason="untrainable_group")
    await buffer.release_active_groups(2, reason="trained")
    stored = await store.buffer("rollouts", create=False)
    found = {one.group_uid: (one.status, one.status_reason) for one in await stored.find()}
    assert found["2"] == ("filtered", "untrainable_group")
    assert found["0"][0] == found["1"][0] == "archived"


@both_engines
async def test_two_consumers_share_the_work(build: Build) -> None:
    buffers = [build(6, 2), build(6, 2)]
    await add(buffers[0], *range(6))
    claims = await asyncio.gather(*(claimed(buffer, 3) for buffer in buffers))
    assert sorted(claims[0] + claims[1]) == list(range(6))
    for buffer, ids in zip(buffers, claims, strict=True):
        await finalize(buffer, *ids)
    takes = await asyncio.gather(*(taken(buffer, 3) for buffer in buffers))
    assert sorted(takes[0] + takes[1]) == list(range(6))
    for buffer in buffers:
        with pytest.raises(RuntimeError, match="released 4 groups, of 3"):
            await buffer.release_active_groups(4, reason="trained")
        await buffer.release_active_groups(3, reason="trained")
    assert gauges(buffers[0])["rollout_buffer/available_active_slots"] == 6


async def test_late_results_are_dropped(build: Build, store: rdb.Store) -> None:
    slow, quick = build(), build()
    await add(slow, 0)
    await claimed(slow)
    stored = await store.buffer("rollouts", create=False)
    await release(stored)
    await claimed(quick)
    await finalize(quick, 0)
    assert await taken(quick) == [0]
    await finalize(slow, 0)
    assert gauges(slow)["rollout_buffer/num_groups_finalized"] == 0


async def test_results_of_trained_groups_are_dropped(
    build: Build, store: rdb.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has generated and trained on the group by the time it is put."""
    slow, quick = build(), build()
    await add(slow, 0)
    await claimed(slow)
    stored = await store.buffer("rollouts", create=False)
    put = rdb.Buffer.put

    async def late(*arguments: Any, **options: Any) -> list[int]:
        monkeypatch.setattr(rdb.Buffer, "put", put)
        await release(stored)
        await claimed(quick)
        await finalize(quick, 0)
        await taken(quick)
        await quick.release_active_groups(1, reason="trained")
        return await put(*arguments, **options)

    monkeypatch.setattr(rdb.Buffer, "put", late)
    await finalize(slow, 0)
    assert [one.status for one in await stored.find()] == ["archived"]


async def test_a_lost_claim_is_taken_again(build: Build, store: rdb.Store) -> None:
    buffer = build()
    await add(buffer, 0)
    await claimed(buffer)
    stored = await store.buffer("rollouts", create=False)
    await release(stored)
    await finalize(buffer, 0)
    assert await taken(buffer) == [0]


async def test_a_lost_group_keeps_its_slot(build: Build, store: rdb.Store) -> None:
    buffer = build()
    await add(buffer, 0)
    await finalize(buffer, 0)
    await taken(buffer)
    stored = await store.buffer("rollouts", create=False)
    [lease] = await stored.leases()
    await stored.revoke(lease.id)
    await buffer.release_active_groups(1, reason="trained")
    assert gauges(buffer)["rollout_buffer/num_groups_finalized"] == 1
    assert await taken(buffer) == [0]


async def test_a_lost_group_that_is_taken_again_is_released_twice(
    build: Build, store: rdb.Store
) -> None:
    buffer = build()
    await add(buffer, 0, 1)
    await finalize(buffer, 0, 1)
    await taken(buffer)
    stored = await store.buffer("rollouts", create=False)
    [lease] = await stored.leases()
    await stored.revoke(lease.id)
    assert await taken(buffer, 2) == [0, 1]
    await buffer.release_active_groups(3, reason="trained")
    assert gauges(buffer)["rollout_buffer/available_active_slots"] == 4


async def test_close_while_a_group_is_finalized(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = build()
    await add(buffer, 0)
    await claimed(buffer)
    claim_of = buffer._claim_of

    async def closing(group_id: int) -> rdb.Claim:
        claim: rdb.Claim = await claim_of(group_id)
        await buffer.close()
        return claim

    monkeypatch.setattr(buffer, "_claim_of", closing)
    await finalize(buffer, 0)
    assert await claimed(build()) == [0]  # released, long before its claim expires
    assert gauges(buffer)["rollout_buffer/available_active_slots"] == 4


@both_engines
@pytest.mark.parametrize("again", [False, True])
async def test_a_group_that_cannot_be_stored_fails(
    build: Build, store: rdb.Store, again: bool
) -> None:
    """It is taken like a group without rollouts. torchtitan does not catch an error here."""
    buffer = build()
    await add(buffer, 0, 1)
    await claimed(buffer, 2)
    group = rollout_group(0)
    group.rollouts[0].reward = float("nan")
    if again:  # the claim was lost
        stored = await store.buffer("rollouts", create=False)
        await release(stored)
    await buffer.finalize_work(group)
    await finalize(buffer, 1)
    stored = await store.buffer("rollouts", create=False)
    [failed] = await stored.find(statuses="failed")
    assert (failed.group_uid, failed.lease_id) == ("0", None)
    assert (failed.status_reason or "").startswith("cannot be stored: InvalidInputError: reward")
    taken_group = await buffer.take_finalized()
    assert repr(taken_group) == repr(failed_group(0))
    assert await taken(buffer) == [1]
    await buffer.release_active_groups(2, reason="trained")
    assert gauges(buffer)["rollout_buffer/available_active_slots"] == 4


class Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("kind", "sample"),
    [
        (Sample, {"question": "2 + 2?"}),
        (Sample, object()),
        (Sample, Sample(question=3)),  # type: ignore[arg-type]
        (Sample, Sample(question="2 + 2?", names_per_turn=[["a"]])),  # type: ignore[arg-type]
        (Any, SAMPLE),
        (Any, object()),
        (Any, {"question": "\ud800"}),
        (Any, {"question": (1, 2)}),
        (Any, {1: "a"}),
        (Any, {"level": Level.LOW}),
        (Any, {"score": float("nan")}),
    ],
)
async def test_samples_that_would_not_round_trip_are_refused(
    build: Build, kind: Any, sample: Any
) -> None:
    buffer = build(sample_type=kind)
    with pytest.raises(rdb.InvalidInputError, match=f"sample: expected .*{type(sample).__name__}"):
        await buffer.add_work(RolloutGroupWork(group_id=0, sample=sample))
    assert gauges(buffer)["rollout_buffer/num_groups_waiting"] == 0


async def test_stored_samples_of_another_type_are_refused(build: Build) -> None:
    buffer = build(sample_type=Any)
    await buffer.add_work(RolloutGroupWork(group_id=0, sample={"question": 3}))
    again = build()
    with pytest.raises(rdb.InvalidInputError, match=r"sample_type: expected .* got \{"):
        await again.claim_next()


async def test_json_is_the_default(url: str) -> None:
    config = RolloutGroupWorkBuffer.Config(url=url)
    buffer = config.build(max_active_rollout_groups=2)
    await buffer.add_work(RolloutGroupWork(group_id=0, sample={"question": [1, None]}))
    assert (await buffer.claim_next()).sample == {"question": [1, None]}
    await buffer.close()


def test_invalid_configs_are_refused(url: str) -> None:
    config = RolloutGroupWorkBuffer.Config
    with pytest.raises(ValueError, match="window_size"):
        config(url=url).build(max_active_rollout_groups=2, window_size=3)
    with pytest.raises(rdb.InvalidURLError, match="url"):
        config(url="mysql://x/y").build(max_active_rollout_groups=2)
    with pytest.raises(rdb.InvalidInputError, match="name"):
        config(url=url, buffer="").build(max_active_rollout_groups=2)
    with pytest.raises(rdb.InvalidInputError, match="sample_type"):
        config(url=url, sample_type=random.Random).build(max_active_rollout_groups=2)
    with pytest.raises(rdb.InvalidInputError, match="ttl"):
        config(url=url, ttl=0).build(max_active_rollout_groups=2)


async def test_invalid_release_counts_are_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="count"):
        await build().release_active_groups(-1, reason="trained")
    with pytest.raises(RuntimeError, match="released 1 groups, of 0"):
        await build().release_active_groups(1, reason="trained")


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Awaitable[int]]]:
    """Run a function in another process, and wait. It is forked, because imports take long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([controller.__name__])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))

        async def run(function: Callable[..., None], *arguments: object) -> int:
            process = context.Process(target=function, args=arguments)
            process.start()
            await asyncio.to_thread(process.join, 120)
            assert process.exitcode is not None
            return process.exitcode

        yield run


async def expire_leases(url: str) -> None:
    """And claims: those of a killed process, whose time to live is longer than any test."""
    async with transaction(url) as connection:
        await connection.execute(update(lease).values(expires_at=lease.c.acquired_at))
        mine = trajectory.c.claim_uid.is_not(None)
        began = trajectory.c.claimed_at
        await connection.execute(update(trajectory).where(mine).values(expires_at=began))


@postgresql_nightly
async def test_restart_during_a_step(
    url: str, tmp_path: Path, start: Callable[..., Awaitable[int]]
) -> None:
    """Killed with a batch taken: each group is trained once and generated once."""
    last, log = 30, tmp_path / "log"
    trainable = [i for i in range(last) if i % controller.UNTRAINABLE]
    assert await start(controller.control, url, log, last, 5, True) == -signal.SIGKILL
    await expire_leases(url)
    before = {line for line in log.read_text().splitlines() if line.startswith("generated")}
    assert await start(controller.control, url, log, last, len(trainable) // 2 - 4, False) == 0
    lines = log.read_text().splitlines()
    trained = [int(i) for line in lines if line.startswith("trained") for i in line.split()[1:]]
    assert sorted(trained) == trainable
    twice = [line for line in before if lines.count(line) > 1]
    assert len(twice) <= 4  # logged by the workers, but not finalized before the kill


@postgresql_nightly
async def test_a_dead_worker_at_the_head_does_not_block_others(
    build: Build, url: str, start: Callable[..., Awaitable[int]]
) -> None:
    buffer = build()
    await add(buffer, 0, 1)
    assert await start(controller.claim_and_die, url) == -signal.SIGKILL
    await expire_leases(url)
    await finalize(buffer, 1)
    assert await claimed(buffer) == [0]  # as soon as the dead worker's claim expires
    await finalize(buffer, 0)
    assert await taken(buffer, 2) == [0, 1]


async def test_rollouts_that_cannot_be_decoded_free_the_window(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the third attempt the group is taken like a group without rollouts."""
    buffer = build()
    await add(buffer, 0, 1)
    await claimed(buffer, 2)
    await finalize(buffer, 0, 1)
    decode = to_rollout_group

    def refuses_the_first(group: rdb.StoredGroup) -> Any:
        if group.tags["group_id"] == 0:
            raise KeyError
        return decode(group)

    monkeypatch.setattr(stored, "to_rollout_group", refuses_the_first)
    for _ in range(3):
        with pytest.raises(KeyError):
            await buffer.take_finalized()
    assert (await buffer.take_finalized()).rollouts == []
    assert await taken(buffer) == [1]
    await buffer.release_active_groups(2, reason="trained")
    assert gauges(buffer)["rollout_buffer/available_active_slots"] == 4
