"""The samplers, on the real TransferQueue."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from examples.verl_cpu import BATCH_SIZE, prompt, put, trajectory
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from integrations.agents import payload_bytes, trajectories
from replaydb import GroupLeasedError, InvalidInputError, Store
from replaydb.integrations.verl import (
    AckOnCheckpoint,
    DurableReplayBuffer,
    DurableReplayBufferAsync,
)
from replaydb.integrations.verl.trajectories import rows, tag_of, to_fields
from support.damage import damage
from support.engines import both_engines

Made = Callable[..., DurableReplayBuffer]


@pytest.fixture
def sampler(url: str, queue: None) -> Iterator[Made]:
    made: list[DurableReplayBuffer] = []

    def make(
        kind: type[DurableReplayBuffer] = DurableReplayBufferAsync,
        threshold: int | None = 2,
        strategy: str = "drop",
        refill: Callable[[int], Any] | None = None,
        **others: Any,
    ) -> DurableReplayBuffer:
        one = kind(
            trainer_mode="sync" if kind is DurableReplayBuffer else "colocate_async",
            trainer_config={},
            max_off_policy_threshold=threshold,
            max_off_policy_strategy=strategy,
            sampler_kwargs={"url": url, "run": "grpo", "poll_interval": 0.02, **others},
            refill_fn=refill,
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def _finish(uid: str, number: int = 0, step: int = 1, status: str = "finished") -> None:
    tag = {"is_prompt": True, "status": "pending", "global_steps": step}
    tq.kv_batch_put([uid], "train", tags=[tag])
    for session in range(2):
        fields = trajectory(number, session, step=step) | prompt(number) | {"uid": uid}
        put([f"{uid}_{session}_0"], [fields], [{"status": "success", "min_global_steps": step - 1}])
    tq.kv_put(uid, "train", tag={"status": status})


def _uids(batch: KVBatchMeta) -> set[str]:
    return {key.split("_")[0] for key in batch.keys}


async def _by_status(store: Store) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in await (await store.buffer("grpo")).find():
        found.setdefault(one.status.value, set()).add(one.group_uid)
    return found


async def test_groups_are_stored_as_in_the_queue(sampler: Made, store: Store) -> None:
    """Every field and tag, even if sessions have different fields."""
    one = sampler()
    odd: dict[str, Any] = {
        "routed_experts": torch.arange(20, dtype=torch.int16).reshape(5, 2, 2),
        "position_ids": torch.arange(20).reshape(4, 5),
        "multi_modal_inputs": {"pixel_values": torch.randn(2, 3).bfloat16()},
        "extra_fields": {
            "nan": float("nan"),
            "none": None,
            "text": "a\0b",
            "$x": [1, [2.5]],
            3: b"x",
        },
    }
    tag = {"is_prompt": True, "status": "pending", "global_steps": 3, "prompt_uid": "p"}
    tq.kv_batch_put(["u"], "train", tags=[tag])
    turns = [trajectory(1, 0, turn, 3) | prompt(1) for turn in range(2)]
    put(["u_0_0", "u_0_1"], turns, [{"status": "success", "seq_len": 5}, {"status": "success"}])
    put(["u_1_0"], [trajectory(1, 1, 0, 3) | prompt(1) | odd], [{"min_global_steps": 1}])
    tq.kv_put("u", "train", tag={"status": "finished"})
    one.get_sampleable_count(3, "train")

    [group] = await (await store.buffer("grpo")).get(uids="u")
    assert (group.task_name, group.prompt_uid, group.tags["global_steps"]) == ("gsm8k", "p", 3)
    queue = tq.kv_list("train")["train"]
    keys = ["u_0_0", "u_0_1", "u_1_0"]
    assert [episode.metadata["verl"]["key"] for episode in group.episodes] == keys
    assert [episode.metadata["verl"]["tag"] for episode in group.episodes] == [
        queue[key] for key in keys
    ]
    assert [episode.policy_version for episode in group.episodes] == [2, 2, 1]
    for key, episode in zip(keys, group.episodes, strict=True):
        [expected] = rows(tq.kv_batch_get([key], "train"))
        fields = to_fields(group, episode)
        assert fields.keys() == expected.keys()
        for name, value in expected.items():
            _assert_same(fields[name], value)
        assert episode.response_ids.tolist() == expected["responses"].tolist()
        assert episode.reward == float(expected["rm_scores"].sum())
    assert group.episodes[1].loss_mask[group.episodes[1].prompt_length + 1]
    assert not group.episodes[0].loss_mask[group.episodes[0].prompt_length + 1]


def _assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_same(one[key], other[key])
    else:
        assert one == other or (one != one and other != other)


async def _generate(uid: str, *, experts: bool, several: bool) -> None:
    """Put runs of agents into the queue by verl's own code, as a row for each turn or each run."""
    kind = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = object.__new__(kind)
    worker.reward_loop_worker_handles = worker.processor = None
    worker.distillation_enabled = False
    rng = np.random.default_rng(0)
    for session, steps in enumerate(trajectories(random.Random(4), 3)):
        whole = steps[-1].context + steps[-1].response
        routed = rng.integers(0, 128, (len(whole) - 1, 2, 8)) if experts else None
        outputs = [
            AgentLoopOutput(
                prompt_ids=step.context,
                response_ids=step.response,
                response_mask=[1] * len(step.response),
                response_logprobs=step.logprobs,
                num_turns=2,
                metrics={"generate_sequences": 1.5},
                extra_fields={"min_global_steps": 3, "reward_extra_info": {"acc": 1.0}},
            )
            for step in steps
        ]
        if not several:
            start = len(steps[0].context)
            mask = np.zeros(len(whole), int)
            logprobs = np.zeros(len(whole))
            for step in steps:
                own = slice(len(step.context), len(step.context) + len(step.response))
                mask[own], logprobs[own] = 1, step.logprobs
            values = {
                "prompt_ids": steps[0].context,
                "response_ids": whole[start:],
                "response_mask": mask[start:].tolist(),
                "response_logprobs": logprobs[start:].tolist(),
            }
            outputs = [outputs[-1].model_copy(update=values)]
        outputs[-1].reward_score = float(session % 2)
        if routed is not None:
            for one in outputs:
                one.routed_experts = routed[: len(one.prompt_ids) + len(one.response_ids) - 1]
        row = prompt(7) | {"raw_prompt": [{"role": "user", "content": "Fix it. " * 100}]}
        row.pop("dummy_tensor")
        given = row | {"uid": uid, "session_id": session, "global_steps": 4}
        await worker._agent_loop_postprocess(outputs, False, **given)
    tag = {"is_prompt": True, "status": "finished", "global_steps": 4}
    tq.kv_batch_put([uid], "train", tags=[tag])


@pytest.mark.parametrize(
    ("experts", "several", "most"),
    [(True, True, 0.1), (False, False, 0.9)],
    ids=["a row for each turn", "a row for each run"],
)
async def test_each_token_of_a_run_of_agents_is_stored_once(
    sampler: Made, store: Store, experts: bool, several: bool, most: float
) -> None:
    """A row for each run repeats only the prompt."""
    await _generate("u", experts=experts, several=several)
    sampler().get_sampleable_count(4, "train")
    [group] = await (await store.buffer("grpo")).get(uids="u")
    assert group.num_episodes == 3 * (15 if several else 1)
    assert payload_bytes([group], 2) <= most * payload_bytes([group], 1)
    for episode in group.episodes:
        [expected] = rows(tq.kv_batch_get([episode.metadata["verl"]["key"]], "train"))
        fields = to_fields(group, episode)
        assert fields.keys() == expected.keys()
        for name, value in expected.items():
            _assert_same(fields[name], value)
        # scores follow from the reward, and fields of the prompt are those of the group
        assert set(episode.token_extras) == ({"routed_experts"} if experts else set())
        assert "raw_prompt" not in episode.metadata["verl"]["fields"]


async def test_a_sampler_does_not_read_experts(sampler: Made, store: Store, url: str) -> None:
    """The trainer reads them from the queue."""
    await _generate("u", experts=True, several=False)
    one = sampler()
    one.get_sampleable_count(4, "train")
    [info] = await (await store.buffer("grpo")).find()
    await damage(url, info.id, field="routed_experts")
    batch, _ = one.sample(4, "train", 1)
    assert _uids(batch) == {"u"}
    assert await _by_status(store) == {"leased": {"u"}}


async def test_groups_are_stored_without_sampling(sampler: Made, store: Store) -> None:
    sampler()
    buffer = await store.buffer("grpo")
    _finish("a")
    await buffer.wait_until(at_least=1, timeout=20)
    _finish("b", status="running")
    _finish("c", status="failure")
    _finish("d")
    await buffer.wait_until(at_least=2, timeout=20)
    assert await _by_status(store) == {"completed": {"a", "d"}}


@pytest.mark.parametrize("kind", [DurableReplayBuffer, DurableReplayBufferAsync])
async def test_two_samplers_get_different_groups(
    sampler: Made, store: Store, kind: type[DurableReplayBuffer]
) -> None:
    """verl's own samplers both get the same groups."""
    for number in range(24):
        _finish(f"u{number}", number)
    both = [sampler(kind), sampler(kind)]
    got: list[list[set[str]]] = [[], []]

    def consume(i: int) -> None:
        for _ in range(3):
            batch, _ = both[i].sample(1, "train", BATCH_SIZE)
            got[i].append(_uids(batch))
            assert len(tq.kv_batch_get(batch.keys, "train")) == 2 * BATCH_SIZE
            tq.kv_clear(batch.keys, "train")

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    everything = [uid for batches in got for batch in batches for uid in batch]
    assert sorted(everything) == sorted(f"u{number}" for number in range(24))
    assert {name: len(uids) for name, uids in (await _by_status(store)).items()} == {"leased": 24}


async def test_a_status_that_another_process_sets_meanwhile_stays(
    sampler: Made, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sampler(DurableReplayBuffer)
    journal, other = one._journal, one._journal._store.buffer("grpo")
    for uid in ("failed", "leased"):
        _finish(uid)
    journal.keep()
    find = journal._buffer.find

    def find_and_lose(*args: Any, **named: Any) -> Any:
        found = find(*args, **named)
        if named["uids"] == {"failed"}:
            other.update(uids="failed", status="failed")
        else:
            other.lease(1, ttl=60)
        return found

    monkeypatch.setattr(journal._buffer, "find", find_and_lose)
    journal.drop({"failed"}, "expired")
    with pytest.raises(GroupLeasedError):
        journal.drop({"leased"}, "expired")
    assert await _by_status(store) == {"failed": {"failed"}, "leased": {"leased"}}


async def test_stale_beyond_the_threshold(sampler: Made, store: Store) -> None:
    """verl's staleness is `global_steps - prompt_global_steps + 1`: 2 at step 5 for step 4."""
    for step in (3, 4, 5):
        _finish(f"of-{step}", step=step)
    requested: list[int] = []

    def refill(count: int) -> None:
        requested.append(count)
        for i in range(count):
            _finish(f"fresh-{i}", step=5)

    one = sampler(refill=refill)
    assert one.get_sampleable_count(5, "train") == 2
    batch, metrics = one.sample(5, "train", 3)
    assert _uids(batch) == {"of-4", "of-5", "fresh-0"}
    assert requested == [1]
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert metrics["training/off_policy/evicted_samples_staleness/max"] == 3
    assert await _by_status(store) == {"expired": {"of-3"}, "leased": {"of-4", "of-5", "fresh-0"}}


async def test_waiting_for_groups_that_would_become_stale(sampler: Made, store: Store) -> None:
    _finish("late", step=4, status="running")
    _finish("a", step=2)
    _finish("b", step=5)
    one = sampler(strategy="wait")
    polls: list[int] = []

    def poll(partition_id: str, last: float) -> float:
        polls.append(one.get_sampleable_count(5, "train"))
        tq.kv_put("late", "train", tag={"status": "finished"})
        return last

    one._wait_for_next_poll = poll
    batch, _ = one.sample(5, "train", 2)
    assert polls == [2]
    assert _uids(batch) == {"a", "late"}
    assert await _by_status(store) == {"leased": {"a", "late"}, "completed": {"b"}}


async def test_zero_variance_groups_are_filtered(sampler: Made, store: Store) -> None:
    for uid, numbers in {"equal": (0, 2), "mixed": (0, 1)}.items():
        tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
        for session, number in enumerate(numbers):
            fields = trajectory(number, 0, 1) | prompt(number) | {"uid": uid}
            put([f"{uid}_{session}_0"], [fields], [{"status": "success"}])
        tq.kv_batch_put([uid], "train", tags=[tag])
    one = sampler(refill=lambda count: None, filter_groups_metric="reward")
    sampleable, metrics = one.wait_for_sampleable(1, "train", 1)
    assert sampleable == {"mixed"}
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert await _by_status(store) == {"filtered": {"equal"}, "completed": {"mixed"}}


async def test_validation_is_not_stored(sampler: Made, store: Store) -> None:
    one = sampler(DurableReplayBuffer)
    put(["v_0_0"], [trajectory(0, 0) | prompt(0)], [{"status": "success"}])
    fields = tq.kv_batch_get(["v_0_0"], "train")
    tq.kv_clear(["v_0_0"], "train")
    tq.kv_batch_put(["v_0_0"], "val", fields=fields, tags=[{"status": "success"}])
    tag = {"is_prompt": True, "status": "finished", "global_steps": 0}
    tq.kv_batch_put(["v"], "val", tags=[tag])
    batch, _ = one.sample(0, "val", 1)
    assert batch.keys == ["v_0_0"]
    assert await _by_status(store) == {}


@both_engines
async def test_groups_of_a_checkpoint_are_archived(
    sampler: Made, store: Store, tmp_path: Path
) -> None:
    one = sampler(threshold=None)
    for step in (1, 2, 3):
        _finish(f"of-{step}", step=step)
        one.sample(step, "train", 1)
    trainer = SimpleNamespace(replay_buffer=one)
    callback = AckOnCheckpoint()
    folder = str(tmp_path / "global_step_2")
    callback.on_save(trainer=trainer, global_step=2, checkpoint_dir=folder, async_save=True)
    assert await _by_status(store) == {"leased": {"of-1", "of-2", "of-3"}}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")  # this one is written
    callback.on_save(trainer=trainer, global_step=2, checkpoint_dir=folder, async_save=True)
    assert await _by_status(store) == {"archived": {"of-1"}, "leased": {"of-2", "of-3"}}
    callback.on_save(trainer=trainer, global_step=2, checkpoint_dir=folder)
    assert await _by_status(store) == {"archived": {"of-1", "of-2"}, "leased": {"of-3"}}


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"url": None}, "trainer.v1.sampler.sampler_kwargs.url"),
        ({"run": ""}, "trainer.v1.sampler.sampler_kwargs.run"),
        ({"pollinterval": 1}, "trainer.v1.sampler.sampler_kwargs"),
    ],
)
def test_a_broken_configuration(sampler: Made, kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        sampler(**kwargs)
    assert caught.value.field == field


def test_a_callback_without_its_sampler() -> None:
    trainer = SimpleNamespace(replay_buffer=object())
    with pytest.raises(InvalidInputError, match="custom_sampler"):
        AckOnCheckpoint().on_save(trainer=trainer, global_step=1, checkpoint_dir="here")


@both_engines
@pytest.mark.parametrize("kind", [DurableReplayBuffer, DurableReplayBufferAsync])
async def test_groups_that_cannot_be_stored_fail(
    sampler: Made, store: Store, kind: type[DurableReplayBuffer]
) -> None:
    """verl replaces them like groups whose generation failed, also from a restored queue."""
    for number in range(2):
        fields = trajectory(0, 0) | prompt(0) | {"extra_fields": {"state": Path("here")}}
        put(["u_0_0"], [fields], [{"status": "success"}])
        tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
        tq.kv_batch_put(["u"], "train", tags=[tag])
        ours = {f"a{number}", f"b{number}"}
        for uid in ours:
            _finish(uid)
        one = sampler(kind, refill=lambda count, uid=f"c{number}": _finish(uid))
        if number:
            one._journal.rewind(1)
        batch, _ = one.sample(1, "train", 3)
        assert _uids(batch) == (ours if kind is DurableReplayBuffer else {*ours, f"c{number}"})
        assert "u" not in tq.kv_list("train")["train"]
        [failed] = await (await store.buffer("grpo")).find(uids="u")
        assert (failed.status, failed.num_episodes) == ("failed", 0)
        assert "u_0_0.extra_fields.state" in (failed.status_reason or "")
        tq.kv_clear(batch.keys, "train")
        one.close()


async def test_unusual_masks_names_and_tags_are_stored(sampler: Made, store: Store) -> None:
    one = sampler()
    masks = [torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.0])]
    for session, mask in enumerate(masks):
        fields = trajectory(0, session) | prompt(0)
        size = len(fields["responses"])
        fields |= {"response_mask": mask.repeat(size)[:size], "data_source": "a\0b"}
        put([f"u_{session}_0"], [fields], [{"status": "success", "score": float("nan")}])
    tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
    tq.kv_batch_put(["u"], "train", tags=[tag])
    one.get_sampleable_count(1, "train")
    [group] = await (await store.buffer("grpo")).get(uids="u")
    assert group.task_name == "verl"
    for session, episode in enumerate(group.episodes):
        [expected] = rows(tq.kv_batch_get([f"u_{session}_0"], "train"))
        fields = to_fields(group, episode)
        assert fields.keys() == expected.keys()
        for name, value in expected.items():
            _assert_same(fields[name], value)
        assert str(tag_of(episode)["score"]) == "nan"
