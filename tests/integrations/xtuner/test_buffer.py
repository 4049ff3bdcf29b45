"""XTuner's replay buffer in a database: its contract, corrected faults, and extensions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from xtuner.v1.data_proto.rl_data import RolloutState, Status
from xtuner.v1.rl.replay_buffer import AsyncReplayBufferConfig, ReplayBuffer, StorageItem
from xtuner.v1.rl.rollout import trace_store

import replaydb as rdb
from integrations.xtuner import processes
from integrations.xtuner.conftest import Open
from integrations.xtuner.states import state, uids
from replaydb.integrations.xtuner import SqlReplayBuffer, SqlReplayBufferConfig, states, storage
from support.damage import damage
from support.engines import both_engines, postgresql_nightly
from support.workers import Worker, workers


async def put(buffer: SqlReplayBuffer, *numbers: int, task: str = "math", **fields: Any) -> None:
    for number in numbers:
        await buffer.put([state(number, **fields)], task)


async def taken(buffer: SqlReplayBuffer, **sizes: int) -> dict[str, list[list[int]]]:
    batch, counts = await buffer.take_batch(sizes)
    assert counts == {task: len(groups) for task, groups in batch.items()}
    return {task: uids(groups) for task, groups in batch.items()}


async def test_the_config_replaces_xtuners(url: str, build: Open) -> None:
    config = SqlReplayBufferConfig(url=url)
    assert isinstance(config, AsyncReplayBufferConfig)
    assert isinstance(build(), ReplayBuffer)
    assert isinstance(build()._storage.state_dict(), dict)


async def test_tasks_and_statuses_are_separate(build: Open) -> None:
    buffer = build()
    await put(buffer, 1, 2)
    await put(buffer, 3, status=Status.FAILED)
    await put(buffer, 4, task="code")
    assert len(buffer) == 4
    assert await buffer.is_ready({"math": 2, "code": 1})
    assert not await buffer.is_ready({"math": 3})
    assert await buffer.count_statuses(["math", "code"], [Status.COMPLETED, Status.FAILED]) == {
        "math": {Status.COMPLETED: 2, Status.FAILED: 1},
        "code": {Status.COMPLETED: 1, Status.FAILED: 0},
    }
    assert await taken(buffer, math=1, code=1, none=0) == {"math": [[1]], "code": [[4]], "none": []}
    assert len(buffer) == 2
    assert uids(await buffer.get(5, "math", Status.FAILED)) == [[3]]
    assert await taken(buffer, math=5) == {"math": [[2]]}
    assert len(buffer) == 0


async def test_empty_groups_and_sizes(build: Open) -> None:
    buffer = build()
    await buffer.put([], "math")
    assert len(buffer) == 0
    assert await buffer.get(0, "math", Status.COMPLETED) == []
    assert await buffer.is_ready({"math": 0})
    assert await buffer.take_batch({"math": 0, "code": -1}) == (
        {"math": [], "code": []},
        {"math": 0, "code": 0},
    )
    assert await buffer.get(-1, "math", Status.COMPLETED) == []


@pytest.mark.parametrize(
    ("order", "expected"), [("fifo", [1, 2, 3, 4]), ("staleness", [2, 1, 3, 4])]
)
@pytest.mark.parametrize("how", ["get", "take_batch"])
async def test_orders(build: Open, order: str, expected: list[int], how: str) -> None:
    """The stalest first, the oldest of equals."""
    buffer = build(order=order)
    for number, staleness in {1: 3, 2: 8, 3: 3, 4: 3}.items():
        await put(buffer, number, seq_staleness=staleness)
    if how == "get":
        found = uids(await buffer.get(3, "math", Status.COMPLETED))
    else:
        found = (await taken(buffer, math=3))["math"]
    assert found == [[number] for number in expected[:3]]


async def test_update_keeps_uid_and_order(build: Open) -> None:
    storage = build()._storage
    ids = [
        await storage.put(StorageItem([state(number)], 0, 0, "math", Status.COMPLETED, 0))
        for number in range(3)
    ]
    changed = StorageItem([state(9)], ids[0], 77, "math", Status.COMPLETED, 0)
    gone = StorageItem([state(8)], ids[-1] + 1, 0, "math", Status.COMPLETED, 0)
    await storage.update([changed, gone])
    items = await storage.get({})
    assert [(item.uid, item.timestamp_id, item.item[0].rollout_id) for item in items] == [
        (ids[0], ids[0], 9),
        (ids[1], ids[1], 1),
        (ids[2], ids[2], 2),
    ]
    await storage.delete([ids[1], ids[1] + 100])
    assert [item.uid for item in await storage.get({})] == [ids[0], ids[2]]
    [taken] = storage.buffer.lease(1, ttl=60).batch  # by another process
    await storage.delete([taken.id])
    assert storage.buffer.count(statuses="leased") == 1


async def test_groups_with_unfinished_members_are_not_completed(build: Open) -> None:
    buffer = build()
    for member, status in ((Status.INIT, Status.INIT), (Status.ARCHIVED, Status.ARCHIVED)):
        await buffer.put([state(1), state(2, status=member)], "math")
        assert await buffer.count("math", Status.COMPLETED) == 0
        assert await buffer.count("math", status) == 1
        assert await buffer.count("math", Status.ABORTED) == 0
    assert uids(await buffer.get(9, "math", Status.INIT)) == [[1, 2]]


@both_engines
@pytest.mark.parametrize("threshold", [2, 3])
async def test_expiry_by_staleness(build: Open, threshold: int) -> None:
    """At `train_step - min(model_steps) - 1 >= threshold`, which is 5 - 2 - 1 here."""
    buffer = build()
    await put(buffer, 1, response_model_steps=[4, 2, 3])
    await put(buffer, 2, response_model_steps=[4, 4, 3])
    await put(buffer, 3, response_model_steps=[1, 1, 1], status=Status.FAILED)
    expired = await buffer.refresh_staleness(
        task_stale_thresholds={"math": threshold, "code": 1}, current_train_step=5
    )
    assert expired == {"math": int(threshold == 2), "code": 0}
    fresh = await buffer.get(9, "math", Status.COMPLETED)
    assert [group[0].seq_staleness for group in fresh] == ([1] if threshold == 2 else [2, 1])
    if threshold == 2:
        [[stale]] = await buffer.get(9, "math", Status.EXPIRED)
        assert (stale.rollout_id, stale.status, stale.seq_staleness) == (1, Status.EXPIRED, 2)
        assert (stale.prompt_ids, stale.response_ids) == ([1, 2], [])


async def test_a_refresh_of_some_statuses(build: Open) -> None:
    buffer = build()
    await put(buffer, 1, response_model_steps=[1] * 3)
    await put(buffer, 2, response_model_steps=[1] * 3, status=Status.ABORTED)
    await put(buffer, 3, response_model_steps=[1] * 3, status=Status.INIT)
    expired = await buffer.refresh_staleness(
        task_stale_thresholds={"math": 2}, current_train_step=4, statuses=[Status.ABORTED]
    )
    assert expired == {"math": 1}
    assert uids(await buffer.get(9, "math", Status.EXPIRED)) == [[2]]
    assert len(buffer) == 2


@pytest.mark.parametrize("payload", ["keep", "drop"])
@pytest.mark.parametrize("consume", ["taken", "saved"])
async def test_groups_taken_during_a_refresh_do_not_expire(
    build: Open, monkeypatch: pytest.MonkeyPatch, consume: str, payload: Any
) -> None:
    """Another trainer takes the group after `find` returned it, before it expires."""
    buffer, other = build(), build(consume=consume)
    buffer._storage.buffer.update_settings(archived_payload=payload)
    await put(buffer, 1, 2, response_model_steps=[1] * 3)
    find = buffer._storage.buffer.find

    def find_and_lose(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        found = find(*args, **named)
        assert asyncio.run(taken(other, math=1)) == {"math": [[1]]}
        return found

    monkeypatch.setattr(buffer._storage.buffer, "find", find_and_lose)
    expired = await buffer.refresh_staleness(
        task_stale_thresholds={"math": 2}, current_train_step=9
    )
    assert expired == {"math": 1}
    assert uids(await buffer.get(9, "math", Status.EXPIRED)) == [[2]]


async def test_groups_taken_during_an_update_stay_taken(
    build: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, other = build(order="fifo"), build(order="fifo")
    await put(buffer, 1, 2)
    first, second = await buffer._storage.get({})
    assert await taken(other, math=1) == {"math": [[1]]}
    replace = buffer._storage.buffer.put

    def lose_and_replace(*args: Any, **named: Any) -> Any:
        assert asyncio.run(taken(other, math=1)) == {"math": []}
        return replace(*args, **named)

    monkeypatch.setattr(buffer._storage.buffer, "put", lose_and_replace)
    await buffer._storage.update([first, second])
    assert await taken(other, math=9) == {"math": [[2]]}


async def test_an_update_that_is_refused_changes_nothing(build: Open) -> None:
    buffer = build()
    await put(buffer, 1)
    [item] = await buffer._storage.get({})
    item.item[0].extra_fields = {"what": object()}
    with pytest.raises(rdb.InvalidInputError):
        await buffer._storage.update([item])
    assert await taken(buffer, math=1) == {"math": [[1]]}


async def test_expired_groups_that_are_not_retryable(
    build: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sessions are released in one call, after deletion, outside the lock of the buffer."""
    buffer, other = build(), build()
    released: list[list[str]] = []

    async def release(session_ids: Any) -> set[str]:
        released.append(sorted(session_ids))
        assert await buffer.count("math", Status.COMPLETED) == 0
        return set(session_ids)

    monkeypatch.setattr(trace_store, "release_existing_sessions", release)
    dropped = {"stale_threshold": 2, "expired_groups_retryable": False, "current_train_step": 4}
    await buffer.put([state(9, session_id=9, response_model_steps=[1] * 3)], "math", **dropped)
    assert (released.pop(), len(buffer)) == (["9"], 0)
    for number in (1, 2, 3):
        await put(buffer, number, session_id=10 + number, response_model_steps=[1] * 3)
    delete = buffer._storage.buffer.delete

    def lose_and_delete(*args: Any, **named: Any) -> Any:
        assert asyncio.run(taken(other, math=1)) == {"math": [[1]]}  # another trainer's sessions
        return delete(*args, **named)

    monkeypatch.setattr(buffer._storage.buffer, "delete", lose_and_delete)
    expired = await buffer.refresh_staleness(
        task_stale_thresholds={"math": 2},
        current_train_step=4,
        expired_groups_retryable_by_task={"math": False},
    )
    assert (expired, len(buffer), released) == ({"math": 3}, 0, [["12", "13"]])


async def test_rows_without_a_version_expire_too(build: Open) -> None:
    """The age of their tokens counts from their put; states without tokens are never stale."""
    buffer = build()
    await put(buffer, 1, response_model_steps=[4] * 3)
    await put(buffer, 2)
    await put(buffer, 3, status=Status.ABORTED, response_ids=[], logprobs=[], response_mask=[])
    for step, number in ((6, 0), (7, 2)):
        expired = await buffer.refresh_staleness(
            task_stale_thresholds={"math": 2}, current_train_step=step
        )
        assert expired == {"math": number}
    [[aborted]] = await buffer.get(9, "math", Status.ABORTED)
    assert (aborted.rollout_id, aborted.seq_staleness) == (3, 0)


async def test_a_refresh_reads_and_writes_only_groups_that_can_expire(
    build: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = build()
    await buffer.put([state(0, response_model_steps=[3] * 3)], "math", current_train_step=5)
    await put(buffer, 1, response_model_steps=[1] * 3)
    await put(buffer, 2)
    read: list[int] = []
    get = buffer._storage.buffer.get

    def noted(ids: list[int]) -> Any:
        read.extend(ids)
        return get(ids)

    monkeypatch.setattr(buffer._storage.buffer, "get", noted)
    await refreshed(buffer, 6, math=3)
    infos = buffer._storage.buffer.find()
    assert [(one.status, one.times_replaced) for one in infos] == [
        ("completed", 0),
        ("expired", 1),
        ("completed", 0),
    ]
    assert read == [infos[1].id]


async def refreshed(
    buffer: SqlReplayBuffer, step: int, *, tokens: int | None = None, **thresholds: int
) -> dict[str, int]:
    """Refresh as XTuner's manager does."""
    return await buffer.refresh_staleness(
        task_stale_thresholds=thresholds,
        task_token_stale_thresholds={} if tokens is None else dict.fromkeys(thresholds, tokens),
        expired_groups_retryable_by_task=dict.fromkeys(thresholds, True),
        current_train_step=step,
        statuses=[Status.COMPLETED, Status.ABORTED, Status.EXPIRED],
    )


@pytest.mark.parametrize("how", ["put", "refresh"])
@pytest.mark.parametrize("rule", ["states", "tokens"])
async def test_fresh_members_of_an_expired_group_are_kept(build: Open, how: str, rule: str) -> None:
    """They expire later, in a group that waits to be generated again."""
    buffer = build()
    group = [
        state(1, response_model_steps=[0] * 3),
        state(2, response_model_steps=[0, 0, 4]),
        state(3, response_model_steps=[5] * 3),
    ]
    threshold, tokens = (4, None) if rule == "states" else (99, 4)
    stale = {1, 2} if rule == "states" else {1}
    if how == "put":
        await buffer.put(
            [one.model_copy() for one in group],
            "math",
            current_train_step=6,
            stale_threshold=threshold,
            token_stale_threshold=tokens,
        )
    else:
        await buffer.put([one.model_copy() for one in group], "math")
        assert await refreshed(buffer, 6, tokens=tokens, math=threshold) == {"math": 1}
    [item] = await buffer._storage.get({"status": Status.EXPIRED})
    for found, one in zip(item.item, group, strict=True):
        if one.rollout_id in stale:
            assert (found.status, found.response_ids, found.reward) == (Status.EXPIRED, [], None)
        else:
            steps = one.response_model_steps or []
            assert dict(found) == dict(one) | {"seq_staleness": 5 - min(steps)}
    await refreshed(buffer, 11, tokens=tokens, math=threshold)
    [[*members]] = await buffer.get(9, "math", Status.EXPIRED)
    assert [one.response_ids for one in members] == [[], [], []]
    assert {one.status for one in members} == {Status.EXPIRED}


async def test_members_kept_in_an_expired_group_continue_to_age(build: Open) -> None:
    """Refreshes at every step, as by a trainer, while the group waits to be generated again."""
    buffer = build()
    group = [state(1, response_model_steps=[1] * 3), state(2, response_model_steps=[0] * 3)]
    await buffer.put(
        group, "math", current_train_step=2, stale_threshold=9, token_stale_threshold=1
    )
    seen = []
    for step in (2, 2, 3, 4):
        await refreshed(buffer, step, tokens=1, math=9)
        [item] = await buffer._storage.get({"status": Status.EXPIRED})
        kept, cleared = item.item
        seen.append((kept.status, kept.seq_staleness, cleared.seq_staleness))
    assert seen == [
        (Status.COMPLETED, 0, 0),
        (Status.COMPLETED, 0, 0),
        (Status.EXPIRED, 1, 0),
        (Status.EXPIRED, 0, 0),
    ]


async def test_expiry_by_max_staleness_of_the_buffer(build: Open) -> None:
    """`max_staleness` expires a group with all its members."""
    buffer = build()
    await put(buffer, 1, response_model_steps=[0] * 3)
    buffer._storage.buffer.update_settings(max_staleness=2)
    await buffer.refresh_staleness(task_stale_thresholds={"math": 99}, current_train_step=9)
    [[found]] = await buffer.get(9, "math", Status.EXPIRED)
    assert (found.status, found.response_ids) == (Status.EXPIRED, [])


async def test_a_trainer_returns_to_an_earlier_step(build: Open) -> None:
    buffer = build()
    await put(buffer, 1, response_model_steps=[1] * 3)
    for step, staleness in ((9, 7), (3, 1)):
        await buffer.refresh_staleness(task_stale_thresholds={"math": 99}, current_train_step=step)
        assert [item.staleness for item in await buffer._storage.get({})] == [staleness]


@pytest.mark.parametrize("threshold", [0, None, float("nan")])
async def test_invalid_thresholds_are_refused(build: Open, threshold: Any) -> None:
    buffer = build()
    await put(buffer, 1, response_model_steps=[1] * 3)
    for field in ("task_stale_thresholds", "task_token_stale_thresholds"):
        thresholds: dict[str, Any] = {"task_stale_thresholds": {"math": 2}}
        thresholds[field] = {"math": threshold}
        with pytest.raises(ValueError, match=rf"{field}\['math'\]: expected above 0"):
            await buffer.refresh_staleness(**thresholds, current_train_step=9)
    assert buffer._storage.buffer.policy_version == 1


async def test_a_put_advances_the_train_step(build: Open) -> None:
    """Before the first refresh, the staleness is as put."""
    buffer = build()
    await buffer.put([state(1)], "math", model_step=3, current_train_step=5)
    [item] = await buffer._storage.get({"staleness": 1})
    assert (item.item[0].response_model_steps, item.item[0].seq_staleness) == ([3, 3, 3], 1)
    await buffer.put([state(2)], "math", model_step=1, current_train_step=5, stale_threshold=3)
    assert await buffer.count("math", Status.EXPIRED) == 1


async def test_a_run_continues_another(build: Open) -> None:
    """A run without `lineage` is refused at once, because its groups would have no staleness."""
    first = build(run="a")
    await put(first, 1, response_model_steps=[1] * 3)
    with pytest.raises(rdb.InvalidInputError, match=r"run: .*lineage 'a'"):
        build(run="b")
    second = build(run="c", lineage="a")
    await second.refresh_staleness(task_stale_thresholds={"math": 9}, current_train_step=4)
    await second.put([state(2, response_model_steps=[2] * 3)], "math", current_train_step=6)
    assert [item.staleness for item in await second._storage.get({})] == [4, 3]


async def test_a_put_of_a_run_that_the_buffer_no_longer_follows(build: Open, url: str) -> None:
    buffer = build(run="a")
    await put(buffer, 1, response_model_steps=[1] * 3)
    with rdb.blocking.Store.open(url, run="b") as store:
        store.buffer("xtuner").advance_policy(0, take_over=True)
    with pytest.raises(rdb.InvalidInputError, match="lineage 'b'"):
        await put(buffer, 2, response_model_steps=[5] * 3)


@postgresql_nightly
async def test_killed_before_the_first_checkpoint(url: str, build: Open) -> None:
    """Without a checkpoint `resume` is not called: training starts at step 1 again."""
    with workers(Worker(processes.die_beginning, url)) as [trainer]:
        assert await trainer.ended() == -9
    other = build(consume="saved", order="fifo", owner="other")
    assert await taken(other, math=1) == {"math": [[2]]}
    buffer = build(consume="saved", order="fifo")
    await refreshed(buffer, 1, math=9)
    assert await taken(buffer, math=9) == {"math": [[0], [1], [3]]}
    assert len(buffer._storage.buffer.leases()) == 2


@pytest.mark.parametrize("reported", ["refresh", "put"])
async def test_a_checkpoint_without_the_buffer(build: Open, tmp_path: Path, reported: str) -> None:
    """Groups of earlier steps are trained on, groups of later steps return, others are kept."""
    first = build(consume="saved", order="fifo")
    await put(first, 1, 2, 3, 4)
    for step in (1, 2, 3):
        await refreshed(first, step, math=99)
        await taken(first, math=1)
    second = build(consume="saved", order="fifo")
    assert len(second) == 0  # or the manager would refuse to resume
    if reported == "refresh":
        await refreshed(second, 3, math=99)
    else:
        await second.put([state(5)], "code", current_train_step=3)
    assert await taken(second, math=9) == {"math": [[3], [4]]}
    await refreshed(second, 4, math=99)  # does not settle leases of this process
    await second.resume(tmp_path)
    await refreshed(second, 4, math=99)
    assert await taken(second, math=9) == {"math": []}
    assert len(second) == (1 if reported == "put" else 0)


@pytest.mark.parametrize("consume", ["taken", "saved", "never"])
async def test_undecodable_groups_do_not_block_the_others(
    build: Open, monkeypatch: pytest.MonkeyPatch, consume: str
) -> None:
    buffer = build(consume=consume, order="fifo")
    await put(buffer, 1, 2)

    def refuses_the_first(episode: rdb.Episode) -> RolloutState:
        found = states.to_state(episode)
        if found.rollout_id == 1:
            raise KeyError
        return found

    monkeypatch.setattr(storage, "to_state", refuses_the_first)
    is_taken = consume != "never"  # if not, the others are returned
    for _ in range(3):
        with pytest.raises(KeyError) if is_taken else nullcontext():
            assert await taken(buffer, math=2) == {"math": [[2]]}
        assert buffer._storage.buffer.leases() == []
    assert await taken(buffer, math=9) == {"math": [[2]]}
    assert await buffer.count("math", Status.FAILED) == 1


async def test_a_damaged_group_does_not_block_refreshes(build: Open, url: str) -> None:
    buffer = build()
    await put(buffer, 1, 2, response_model_steps=[1] * 3)
    await damage(url, 1)
    with pytest.raises(rdb.CorruptPayloadError):
        await refreshed(buffer, 9, math=2)
    assert await refreshed(buffer, 9, math=2) == {"math": 1}
    assert await buffer.count("math", Status.FAILED) == 1


async def test_takes_use_an_index(build: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A take filters by tasks and statuses, so other groups are not read."""
    buffer = build()
    await put(buffer, *range(3))
    calls = []
    lease = buffer._storage.buffer.lease

    def noted(*args: Any, **named: Any) -> Any:
        calls.append(named)
        return lease(*args, **named)

    monkeypatch.setattr(buffer._storage.buffer, "lease", noted)
    await buffer.get(1, "math", Status.COMPLETED)
    assert (calls[0]["tasks"], calls[0]["statuses"], calls[0]["where"]) == (
        ["math"],
        ["completed"],
        None,
    )


async def test_a_batch_is_taken_in_one_transaction(build: Open) -> None:
    """Two trainers in one process: each group is in exactly one batch."""
    first, second = build(), build()
    await put(first, *range(20))
    await put(first, *range(20, 40), task="code")
    batches = await asyncio.gather(
        *(one.take_batch({"math": 2, "code": 2}) for one in (first, second) for _ in range(5))
    )
    found = [uid for batch, _ in batches for groups in batch.values() for [uid] in uids(groups)]
    assert sorted(found) == list(range(40))


async def test_event_loops_of_several_threads(build: Open) -> None:
    buffers = [build(), build()]
    await put(buffers[0], *range(12))

    def take(buffer: SqlReplayBuffer) -> list[list[int]]:
        batches = [asyncio.run(buffer.take_batch({"math": 2})) for _ in range(3)]
        return [uid for batch, _ in batches for uid in uids(batch["math"])]

    with ThreadPoolExecutor() as pool:
        found = await asyncio.gather(
            *(asyncio.get_running_loop().run_in_executor(pool, take, one) for one in buffers)
        )
    assert sorted(uid for several in found for [uid] in several) == list(range(12))


@postgresql_nightly
async def test_processes_share_a_buffer(url: str, build: Open, tmp_path: Path) -> None:
    buffer = build()
    await put(buffer, *range(12))
    await put(buffer, *range(12, 24), task="code")
    logs = [tmp_path / f"took-{k}" for k in range(2)]
    with workers(*(Worker(processes.consume, url, 2, str(log)) for log in logs)) as crew:
        assert [await one.ended() for one in crew] == [0, 0]
    found = " ".join(log.read_text() for log in logs).split()
    assert sorted(map(int, found)) == list(range(24))


@pytest.mark.parametrize(
    ("engine_name", "consume", "left"),
    [
        ("sqlite", "taken", [4, 5]),
        ("postgresql", "saved", [2, 3, 4, 5]),
        ("sqlite", "never", [0, 1, 2, 3, 4, 5]),
        pytest.param("postgresql", "taken", [4, 5], marks=pytest.mark.nightly),
        ("sqlite", "saved", [2, 3, 4, 5]),
        pytest.param("postgresql", "never", [0, 1, 2, 3, 4, 5], marks=pytest.mark.nightly),
    ],
)
async def test_killed_while_a_checkpoint_is_saved(
    url: str, build: Open, tmp_path: Path, consume: str, left: list[int]
) -> None:
    """XTuner saves the buffer before the model, so the checkpoint before is the latest one."""
    with workers(Worker(processes.die_training, url, consume, str(tmp_path), 2)) as [trainer]:
        assert await trainer.ended() == -9
    buffer = build(consume=consume, order="fifo")
    await buffer.resume(tmp_path / "ckpt-step-0")
    assert len(buffer) == len(left)
    assert (await taken(buffer, math=9))["math"] == [[uid] for uid in left]


@both_engines
async def test_a_save_acknowledges_the_checkpoint_before(build: Open, tmp_path: Path) -> None:
    buffer = build(consume="saved", order="fifo")
    await put(buffer, *range(5))

    def outcomes() -> list[str]:
        return [one.status for one in buffer._storage.buffer.find()]

    for step, expected in enumerate([0, 1, 1, 3]):
        await taken(buffer, math=1)
        await buffer.save(tmp_path / "ab"[step == 1 or step == 2])  # "a", "b", "b" again, "a"
        left = 5 - step - 1
        assert outcomes() == (
            ["archived"] * expected + ["leased"] * (step + 1 - expected) + ["completed"] * left
        )
    await buffer.resume(tmp_path / "a")
    assert outcomes() == ["archived"] * 4 + ["completed"]


@both_engines
async def test_any_checkpoint_can_be_resumed(build: Open, tmp_path: Path) -> None:
    """Groups of later checkpoints return, and so do groups of no checkpoint, if they are moved."""
    before = build(consume="saved", order="fifo")
    await put(before, *range(5))
    await put(before, 5, status=Status.ABORTED)
    for step in range(3):
        await taken(before, math=1)
        if step == 1:
            await before.get(1, "math", Status.ABORTED)
        await before.save(tmp_path / "work" / f"ckpt-step-{step}")
    await taken(before, math=1)
    folder = (tmp_path / "work").rename(tmp_path / "moved")
    for resumed, first in ((1, 2), (0, 1), (0, 1)):
        buffer = build(consume="saved", order="fifo")
        await buffer.resume(folder / f"ckpt-step-{resumed}")
        assert await taken(buffer, math=9) == {"math": [[uid] for uid in range(first, 5)]}
    await buffer.save(folder / "ckpt-step-1")  # saved again
    buffer = build(consume="saved", order="fifo")
    await buffer.resume(folder / "ckpt-step-1")
    assert await taken(buffer, math=9) == {"math": []}
    assert await buffer.count("math", Status.ABORTED) == 0


async def test_groups_that_lost_their_payload_do_not_return(
    build: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = build(consume="saved", order="fifo")
    buffer._storage.buffer.update_settings(archived_payload="drop")
    await put(buffer, 0, 1, 2)
    for step in range(3):
        await buffer.save(tmp_path / str(step))
        await taken(buffer, math=1)
    await buffer.resume(tmp_path / "0")
    assert "1 groups taken since" in caplog.text
    assert await taken(buffer, math=9) == {"math": [[1], [2]]}


async def test_a_checkpoint_without_a_mark(build: Open, tmp_path: Path) -> None:
    """It was made without replaydb, or by an older version: the next train step decides."""
    before = build(consume="saved", order="fifo")
    await put(before, 0, 1, 2)
    for step in (1, 2):
        await refreshed(before, step, math=99)
        await taken(before, math=1)
    buffer = build(consume="saved", order="fifo")
    await buffer.resume(tmp_path)
    await refreshed(buffer, 2, math=99)
    assert await taken(buffer, math=9) == {"math": [[1], [2]]}
    (tmp_path / "replaydb.json").write_text("[]")
    with pytest.raises(rdb.InvalidInputError, match=r"path: expected .*replaydb\.json"):
        await buffer.resume(tmp_path)


async def test_owners_resume_independently(build: Open, tmp_path: Path) -> None:
    one, two = build(consume="saved", owner="one"), build(consume="saved", owner="two")
    await put(one, 1, 2)
    for step in range(2):
        for owner in (one, two):
            await owner.save(tmp_path / owner._storage._owner / str(step))
            if step == 0:
                await taken(owner, math=1)
    await one.save(tmp_path / "one" / "2")
    await two.save(tmp_path / "two" / "2")
    await one.resume(tmp_path / "one" / "0")
    assert await taken(two, math=9) == {"math": [[1]]}


async def test_reading_without_taking(build: Open) -> None:
    buffer = build(consume="never", order="fifo")
    await put(buffer, 1, 2)
    await put(buffer, 3, status=Status.ABORTED)
    for _ in range(2):
        assert await taken(buffer, math=9) == {"math": [[1], [2]]}
        assert uids(await buffer.get(1, "math", Status.COMPLETED)) == [[1]]
    assert uids(await buffer.get(9, "math", Status.ABORTED)) == [[3]]  # to continue generation
    assert await buffer.get(9, "math", Status.ABORTED) == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"order": "random"}, ValidationError),
        ({"consume": "later"}, ValidationError),
        ({"path": "x"}, ValidationError),
        ({"url": "mysql://x"}, rdb.InvalidURLError),
        ({"name": ""}, rdb.InvalidInputError),
    ],
)
def test_invalid_configs_are_refused(url: str, fields: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        SqlReplayBufferConfig(**{"url": url} | fields).build()
