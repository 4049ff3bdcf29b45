"""Generator outputs and groups, merging compared with SkyRL's, and restarts of a trainer."""

from __future__ import annotations

import asyncio
import copy
import math
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from skyrl.train.fully_async_trainer import _AsyncStalenessManager
from skyrl.train.generators import utils
from skyrl.train.generators.base import BatchMetadata, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

import replaydb as rdb
from integrations.agents import payload_bytes, trajectories
from integrations.identical import identical
from integrations.skyrl import trainer
from integrations.skyrl.outputs import output
from replaydb import blocking
from replaydb.integrations.skyrl import (
    StoredGenerator,
    merge_stepwise_output,
    outputs,
    to_generator_output,
    to_groups,
)
from support.engines import both_engines, postgresql_nightly
from support.groups import groups

#: A field that SkyRL recomputes whenever it concatenates outputs.
METRICS = "rollout_metrics"


def without(made: Any, *names: str) -> dict[str, Any]:
    return {name: of for name, of in made.items() if name not in names and of is not None}


@pytest.fixture
def kept(url: str) -> Iterator[blocking.Buffer]:
    with blocking.Store.open(url, run="skyrl") as store:
        yield store.buffer("skyrl")


@pytest.mark.parametrize("step_wise", [True, False])
@pytest.mark.parametrize("token_rewards", [True, False])
def test_outputs_round_trip(kept: blocking.Buffer, step_wise: bool, token_rewards: bool) -> None:
    made = output(
        random.Random(1), ["a", "b", "c"], step_wise=step_wise, token_rewards=token_rewards
    )
    uids = None if step_wise else ["a", "a", "b", "b", "c", "c"]
    stored = to_groups(made, uids, step=7)
    assert [(one.prompt_uid, one.num_episodes) for one in stored] == [("a", 2), ("b", 2), ("c", 2)]
    back = to_generator_output(kept.get(kept.put(stored)))
    assert without(back, METRICS) == without(made, METRICS)
    assert back[METRICS]["generate/calls"] == 9  # of three groups, as SkyRL sums them
    assert {one.min_policy_version for one in stored} == {7}


def test_non_finite_metrics_round_trip(kept: blocking.Buffer) -> None:
    made = output(random.Random(1), ["a"], repetitions=1)
    made["env_metrics"][0] = {"accuracy": math.nan, "calls": 3}
    back = to_generator_output(kept.get(kept.put(to_groups(made))))
    assert repr(back["env_metrics"]) == repr(made["env_metrics"])


def test_metrics_keep_their_types(kept: blocking.Buffer) -> None:
    made = output(random.Random(1), ["a"], repetitions=1, step_wise=False)
    given = {"calls": np.int64(3), "won": np.bool_(True), "mean": np.float32(0.5), "of": np.ones(2)}
    made["env_metrics"] = [given]
    made[METRICS] = {"generate/largest": np.float64(0.5)}
    [group] = kept.get(kept.put(to_groups(made, ["a"])))
    assert identical(to_generator_output([group])["env_metrics"], [given])
    assert identical(outputs.to_output(group)[METRICS], made[METRICS])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("env_metrics", [{"a": object()}]),
        ("rollout_metrics", {"a": object()}),
        ("rewards", [1.0, 2.0]),
        ("loss_masks", []),
    ],
)
def test_refused_outputs(field: str, value: Any) -> None:
    made = output(random.Random(1), ["a"], repetitions=1, step_wise=False) | {field: value}
    with pytest.raises(rdb.InvalidInputError) as caught:
        to_groups(made, ["a"])
    assert caught.value.field == (f"{field}.a" if field.endswith("_metrics") else field)


def test_a_generator_can_be_copied(kept: blocking.Buffer) -> None:
    generator = StoredGenerator(Counting(), kept)
    assert copy.copy(generator).seen is generator.seen


def test_empty_fields_are_not_none(kept: blocking.Buffer) -> None:
    """SkyRL's function treats the empty logprobs of an output without tokens as missing."""
    made = output(random.Random(1), ["a"], repetitions=1, step_wise=False)
    made |= {name: [[]] for name in ("response_ids", "rewards", "loss_masks", "rollout_logprobs")}
    [group] = kept.get(kept.put(to_groups(made, ["a"])))
    [turn] = group.episodes[0].turns
    assert turn.logprobs is not None
    assert len(turn.logprobs) == 0


def test_images_and_experts(kept: blocking.Buffer) -> None:
    made = output(random.Random(2), ["a"], step_wise=False)
    made["pixel_values"] = [torch.rand(4, 3), torch.rand(2, 3).bfloat16()]
    made["image_grid_thw"] = [torch.tensor([[1, 2, 2]]), torch.tensor([[1, 1, 2]])]
    made["rollout_expert_indices"] = [[[[1, 2]], [[3, 0]]], [[[0, 1]], [[2, 2]]]]
    back = to_generator_output(kept.get(kept.put(to_groups(made, ["a", "a"]))))
    assert back["rollout_expert_indices"] == made["rollout_expert_indices"]
    for name in ("pixel_values", "image_grid_thw"):
        assert all(map(torch.equal, back[name], made[name]))
    made["rollout_expert_indices"] = [
        np.array(of, np.uint8) for of in made["rollout_expert_indices"]
    ]
    back = to_generator_output(kept.get(kept.put(to_groups(made, ["a", "a"]))))
    assert identical(back["rollout_expert_indices"], made["rollout_expert_indices"])


def test_time_splits(kept: blocking.Buffer) -> None:
    """This field is a dict of lists; all other fields are one list."""
    made = output(random.Random(2), ["a", "b"])
    size = len(made["response_ids"])
    made["trajectory_time_splits"] = {"llm": [0.1 * i for i in range(size)], "env": [2.0] * size}
    [a, b] = kept.get(kept.put(to_groups(made)))
    of_a, of_b = (outputs.to_output(group)["trajectory_time_splits"] for group in (a, b))
    splits = made["trajectory_time_splits"]
    assert {name: of_a[name] + of_b[name] for name in splits} == splits
    merged, _ = merge_stepwise_output(made)
    sizes = {len(of) for of in merged["trajectory_time_splits"].values()}
    assert sizes == {len(merged["response_ids"])} != {size}


def test_each_token_of_a_run_of_agents_is_stored_once(kept: blocking.Buffer) -> None:
    """A step-wise row has the sampled tokens, and those of the tool, as its response."""
    rows = [
        {
            "prompt_token_ids": step.context,
            "response_ids": step.response + step.answer,
            "rewards": [0.0] * (len(step.response) + len(step.answer)),
            "loss_masks": [1] * len(step.response) + [0] * len(step.answer),
            "stop_reasons": "stop",
            "rollout_logprobs": step.logprobs + [0.0] * len(step.answer),
            "trajectory_ids": TrajectoryID("a", repetition),
            "trajectory_generation_times": 12.5,
            "is_last_step": step is steps[-1],
            "env_metrics": {},
        }
        for repetition, steps in enumerate(trajectories(random.Random(4)))
        for step in steps
    ]
    made: Any = {name: [row[name] for row in rows] for name in rows[0]} | {METRICS: {}}
    stored = to_groups(made, step=7)
    assert payload_bytes(stored, 2) <= 0.15 * payload_bytes(stored, 1)
    back = to_generator_output(kept.get(kept.put(stored)))
    assert identical(without(back, METRICS), {name: made[name] for name in without(back, METRICS)})
    assert without(back, METRICS).keys() == rows[0].keys()


def test_experts_of_several_turns_are_refused() -> None:
    made = output(random.Random(3), ["a"], repetitions=1)
    made["rollout_expert_indices"] = [[[[1]]]] * len(made["response_ids"])
    assert len(made["response_ids"]) > 1
    with pytest.raises(rdb.InvalidInputError, match="rollout_expert_indices"):
        to_groups(made)


def test_rows_without_prompts_are_refused() -> None:
    with pytest.raises(rdb.InvalidInputError, match="trajectory_ids"):
        to_groups(output(random.Random(3), ["a"], step_wise=False))


def test_merged_rows_equal_skyrls() -> None:
    rng = random.Random(12)
    merged = 0
    for number in range(100):
        made = output(rng, [str(number), "x"], repetitions=10)
        theirs = utils.merge_stepwise_output(made)
        ours, metrics = merge_stepwise_output(made)
        names = theirs.keys() - {METRICS, "trajectory_generation_times", "env_metrics"}
        assert {name: ours[name] for name in names if theirs[name] is not None} == without(
            theirs, METRICS
        )
        assert metrics["generate/num_seq_before_merge"] == len(made["response_ids"])
        assert metrics["generate/num_seq_after_merge"] == len(theirs["response_ids"])
        merged += len(theirs["response_ids"]) < len(made["response_ids"])
    assert merged == 100


def test_a_merged_example() -> None:
    made = {
        "prompt_token_ids": [[10, 20, 30], [10, 20, 30, 40, 50, 60, 70]],
        "response_ids": [[40, 50], [80, 90]],
        "rewards": [0.25, 1.0],
        "loss_masks": [[1, 1], [1, 1]],
        "rollout_logprobs": [[-0.1, -0.2], [-0.3, -0.4]],
        "trajectory_ids": [TrajectoryID("a", 0)] * 2,
        "is_last_step": [False, True],
    }
    ours, metrics = merge_stepwise_output(made)
    assert ours["prompt_token_ids"] == [[10, 20, 30]]
    assert ours["response_ids"] == [[40, 50, 60, 70, 80, 90]]
    assert ours["loss_masks"] == [[1, 1, 0, 0, 1, 1]]
    assert ours["rollout_logprobs"] == [[-0.1, -0.2, 0.0, 0.0, -0.3, -0.4]]
    assert ours["rewards"] == [[0, 0.25, 0, 0, 0, 1.0]]  # SkyRL's is [1.0]
    assert metrics == {
        "generate/num_seq_before_merge": 2,
        "generate/num_seq_after_merge": 1,
        "generate/merge_ratio": 2.0,
        "generate/num_prefix_mismatches": 0,
    }


@pytest.mark.parametrize(
    ("masks", "expected"),
    [([[1, 0], [0]], [0.5, 0, 0, 2.0]), ([[0, 0], [1]], [0, 0.5, 0, 2.0])],
)
def test_rewards_of_earlier_turns_become_token_rewards(
    masks: list[list[int]], expected: list[float]
) -> None:
    made = {
        "prompt_token_ids": [[1], [1, 2, 3, 4], [9]],
        "response_ids": [[2, 3], [5], [8]],
        "rewards": [0.5, 2.0, 3.0],
        "loss_masks": [*masks, [1]],
        "trajectory_ids": [TrajectoryID("a", 0)] * 2 + [TrajectoryID("b", 0)],
        "is_last_step": [False, True, True],
    }
    assert merge_stepwise_output(made)[0]["rewards"] == [expected, [3.0]]
    made["rewards"] = [0.0, 2.0, 3.0]  # SkyRL's function discards no reward
    assert merge_stepwise_output(made)[0]["rewards"] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trajectory_ids", None),
        ("is_last_step", None),
        ("rollout_expert_indices", [np.zeros((3, 1, 2), np.uint8)] * 2),
        ("pixel_values", [torch.zeros(2, 3)] * 2),
        ("image_grid_thw", [torch.ones(1, 3)] * 2),
    ],
)
def test_outputs_that_skyrl_does_not_merge_are_refused(name: str, value: Any) -> None:
    made = output(random.Random(5), ["a"], repetitions=1) | {name: value}
    with pytest.raises((AssertionError, TypeError)) as theirs:
        utils.merge_stepwise_output(made)
    with pytest.raises(rdb.InvalidInputError, match=f"^{name}: expected") as ours:
        merge_stepwise_output(made)
    assert isinstance(ours.value, type(theirs.value))


def test_merging_keeps_all_rows_and_fields() -> None:
    """SkyRL's function drops rows after the last `is_last_step`, times, and metrics."""
    made = output(random.Random(5), ["a", "b"], repetitions=1)
    made["is_last_step"][-1] = False
    ours, _ = merge_stepwise_output(made)
    theirs = utils.merge_stepwise_output(made)
    assert {one.instance_id for one in ours["trajectory_ids"]} == {"a", "b"}
    assert {one.instance_id for one in theirs["trajectory_ids"]} == {"a"}
    assert ours["is_last_step"][-1] is False
    assert len(ours["env_metrics"]) == len(ours["trajectory_generation_times"])
    assert theirs.get("env_metrics") is theirs.get("trajectory_generation_times") is None


class Counting:
    """A generator that counts its prompts."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def generate(self, input_batch: Any) -> Any:
        uids = [one.instance_id for one in input_batch["trajectory_ids"]]
        self.seen += dict.fromkeys(uids)
        prompts = list(dict.fromkeys(uids))
        repetitions = len(uids) // len(prompts)
        return output(random.Random(0), prompts, repetitions=repetitions, step_wise=False)


def batch(*uids: str, phase: str = "train", step: int = 1, repetitions: int = 2) -> Any:
    ids = [TrajectoryID(uid, repetition) for uid in uids for repetition in range(repetitions)]
    return {
        "prompts": [[{"role": "user", "content": one.instance_id}] for one in ids],
        "env_classes": ["math"] * len(ids),
        "env_extras": [{} for _ in ids],
        "sampling_params": {},
        "trajectory_ids": ids,
        "batch_metadata": BatchMetadata(global_step=step, training_phase=phase),
    }


async def test_only_missing_prompts_are_generated(kept: blocking.Buffer) -> None:
    before, inner = StoredGenerator(Counting(), kept), Counting()
    await before.generate(batch("a", "c"))
    after = StoredGenerator(inner, kept)
    made = await after.generate(batch("a", "b", "c"))
    assert inner.seen == ["b"]
    assert len(made["response_ids"]) == 6
    await after.generate(batch("a", "b", "c", step=2))  # another epoch
    assert inner.seen == ["b", "a", "b", "c"]


async def test_evaluation_is_not_stored(kept: blocking.Buffer) -> None:
    await StoredGenerator(Counting(), kept).generate(batch("a", phase="eval"))
    assert kept.count() == 0


async def test_groups_older_than_max_staleness_are_generated_again(kept: blocking.Buffer) -> None:
    await StoredGenerator(Counting(), kept).generate(batch("a", step=1))
    inner = Counting()
    await StoredGenerator(inner, kept, max_staleness=3).generate(batch("a", step=5))
    assert inner.seen == ["a"]


async def test_another_number_of_samples_is_generated_again(kept: blocking.Buffer) -> None:
    await StoredGenerator(Counting(), kept).generate(batch("a"))
    inner = Counting()
    made = await StoredGenerator(inner, kept).generate(batch("a", "b", repetitions=4))
    assert inner.seen == ["a", "b"]
    assert len(made["response_ids"]) == 8


async def test_settled_groups_are_not_served(kept: blocking.Buffer) -> None:
    generator = StoredGenerator(Counting(), kept)
    await generator.generate(batch("a", "b", "c"))
    generator.settle(["a", "b"], ["b"])
    inner = Counting()
    again = StoredGenerator(inner, kept)
    assert (again.consumed_uids(), again.filtered_uids()) == ({"a", "b"}, {"b"})
    await again.generate(batch("a", "b", "c"))
    assert inner.seen == ["a", "b"]


async def test_two_trainers_have_a_buffer_each(url: str) -> None:
    with blocking.Store.open(url) as store:
        inner = [Counting(), Counting()]
        both = [
            StoredGenerator(one, store.buffer(name))
            for one, name in zip(inner, ("one", "two"), strict=True)
        ]
        await asyncio.gather(*(one.generate(batch("a", "b")) for one in both))
        assert inner[0].seen == inner[1].seen == ["a", "b"]


async def test_errors_name_values_that_cannot_be_stored(kept: blocking.Buffer) -> None:
    made = output(random.Random(0), ["a"], step_wise=False, token_rewards=False)
    made["rewards"][1] = float("nan")
    with pytest.raises(rdb.InvalidInputError, match="reward"):
        to_groups(made, ["a", "a"])


class Spoiled(Counting):
    """A generator whose outputs for the prompt "a" cannot be stored."""

    async def generate(self, input_batch: Any) -> Any:
        made = await super().generate(input_batch)
        uids = [one.instance_id for one in input_batch["trajectory_ids"]]
        made["rewards"] = [
            [math.inf] if uid == "a" else rewards
            for uid, rewards in zip(uids, made["rewards"], strict=True)
        ]
        made["response_ids"] = [
            [1] if uid == "a" else ids for uid, ids in zip(uids, made["response_ids"], strict=True)
        ]
        for name, value in {"loss_masks": 1, "rollout_logprobs": -0.5}.items():
            made[name] = [[value] * len(ids) for ids in made["response_ids"]]
        return made


@both_engines
@pytest.mark.parametrize("partly", [False, True])
async def test_outputs_that_cannot_be_stored_are_passed_on(
    kept: blocking.Buffer, partly: bool
) -> None:
    """The trainer gets them as it does without replaydb; a failed group has the reason."""
    if partly:
        await StoredGenerator(Counting(), kept).generate(batch("c"))
    inner = Spoiled()
    made = await StoredGenerator(inner, kept).generate(batch("b", "a", "c"))
    assert inner.seen == (["b", "a"] if partly else ["b", "a", "c"])
    assert [len(made[name]) for name in ("rewards", "loss_masks", "response_ids")] == [6] * 3
    assert [rewards == [math.inf] for rewards in made["rewards"]] == [False, False] + [True] * 2 + [
        False,
        False,
    ]
    [failed] = kept.find(statuses="failed")
    assert failed.prompt_uid == "a"
    assert "token_rewards" in (failed.status_reason or "")
    assert kept.count(statuses="completed") == 2
    again = Counting()
    await StoredGenerator(again, kept).generate(batch("a", "b", "c"))
    assert again.seen == ["a"]


def test_masks_of_floats_and_times_that_are_nan(kept: blocking.Buffer) -> None:
    made = output(random.Random(1), ["a"])
    masks = made["loss_masks"]
    made["loss_masks"] = [[float(one) for one in mask] for mask in masks]
    made["loss_masks"][0] = np.array(masks[0], np.float32)
    size = len(masks)
    made["trajectory_generation_times"] = [math.nan] * size
    made["trajectory_time_splits"] = {"llm": [math.inf] + [0.5] * (size - 1)}
    [group] = kept.get(kept.put(to_groups(made)))
    back = outputs.to_output(group)
    assert back["loss_masks"] == masks
    for name in ("trajectory_generation_times", "trajectory_time_splits"):
        assert repr(back[name]) == repr(made[name])
    made["loss_masks"][0] = [0.5] * len(masks[0])
    with pytest.raises(rdb.InvalidInputError, match="loss_mask"):
        to_groups(made)


async def test_admission_equals_skyrls_capacity(buffer: rdb.Buffer) -> None:
    """SkyRL counts steps from 1, and counts accepted and running groups that are not used yet."""
    for size, staleness, trained, ahead in [(2, 1, 0, 3), (4, 2, 3, 5), (3, 0, 2, 2)]:
        manager = _AsyncStalenessManager(1000, size, staleness)
        manager.load_state_from_checkpoint(trained + 1)
        manager._stat.accepted += ahead
        await buffer.delete(statuses=["completed"])
        await buffer.put(groups(ahead))
        admitted = await buffer.admission(size, max_staleness=staleness, timeout=0)
        assert admitted == manager._compute_capacity_unlocked()


@pytest.fixture
def start(
    kept: blocking.Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], trainer.Trainer]:
    """Create trainers that resume from the last checkpoint, like successive processes."""
    monkeypatch.setattr(RayPPOTrainer, "save_checkpoints", trainer.Saving.save_checkpoints)
    monkeypatch.setattr(RayPPOTrainer, "load_checkpoints", trainer.Saving.load_checkpoints)
    sampling = "skyrl.train.fully_async_trainer.get_sampling_params_for_backend"
    monkeypatch.setattr(sampling, lambda *_: {})

    def one() -> trainer.Trainer:
        made = trainer.Trainer(tmp_path, StoredGenerator(trainer.Generator(tmp_path / "log"), kept))
        made.load_checkpoints()
        return made

    return one


async def _use(one: trainer.Trainer, *uids: str) -> None:
    for uid in uids:
        await one.generator.generate(batch(uid, step=one.global_step))
    await one.async_train_dataloader.mark_consumed_uids(uids)


@both_engines
@pytest.mark.parametrize("killed", ["before saving", "while saving"])
@pytest.mark.parametrize("step", [1, 2])  # an exhausted epoch ends within its step
async def test_repeated_uids_of_a_later_epoch_stay_unsettled(
    kept: blocking.Buffer,
    start: Callable[[], trainer.Trainer],
    monkeypatch: pytest.MonkeyPatch,
    killed: str,
    step: int,
) -> None:
    one = start()
    await _use(one, "0", "1")
    one.save_checkpoints()
    await one.async_train_dataloader.reset_at_epoch_end()
    one.global_step, one.epoch = step, 1
    await _use(one, "0", "1")
    if killed == "while saving":
        with monkeypatch.context() as patched:
            patched.setattr(RayPPOTrainer, "save_checkpoints", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                one.save_checkpoints()
    again = start()
    assert kept.count(statuses="completed") == kept.count(statuses="archived") == 2
    await _use(again, "0", "1")
    assert kept.count() == 4  # none of them was generated twice


@both_engines
async def test_a_checkpoint_is_settled_when_it_is_complete(
    kept: blocking.Buffer, start: Callable[[], trainer.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyRL writes it in the background, and finishes it before it saves another one."""
    finished: list[tuple[str, int]] = []

    def finalize(model: str) -> None:
        finished.append((model, kept.count(statuses="archived")))

    one = start()
    one.dispatch = SimpleNamespace(finalize_pending_saves=finalize)
    monkeypatch.setattr(trainer.Trainer, "has_critic", True)
    for uid in ("0", "1"):
        await _use(one, uid)
        one.save_checkpoints()
        one.global_step += 1
    assert finished == [("policy", 0), ("critic", 0)]
    assert one.generator.consumed_uids() == {"0"}
    one.loop = partial(asyncio.sleep, 0)
    await one.train()
    assert one.generator.consumed_uids() == {"0", "1"}
    await one.train()
    assert len(finished) == 4


async def test_the_next_process_settles_a_saved_checkpoint(
    kept: blocking.Buffer, start: Callable[[], trainer.Trainer]
) -> None:
    one = start()
    await _use(one, "0")
    await one.generator.generate(batch("1"))
    await one.async_train_dataloader.mark_filtered_uids(["1"])
    one.save_checkpoints()
    assert kept.count(statuses="completed") == 2
    again = start()
    assert again.generator.consumed_uids() == {"0", "1"}
    assert again.generator.filtered_uids() == {"1"}


async def test_the_version_is_the_step_at_which_generation_starts(
    kept: blocking.Buffer, start: Callable[[], trainer.Trainer]
) -> None:
    """Workers take a prompt, and wait for a step to end before they generate."""
    one = start()
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=4)
    one.sample_full_batch = False
    workers = [asyncio.create_task(one._run_generate_for_a_group_loop(queue)) for _ in range(4)]
    scheduled: dict[str, int] = {}
    for _ in range(4):
        await asyncio.sleep(0.1)
        trained, _, _ = await one._collect_generation_mini_batch(queue, asyncio.Event())
        scheduled |= {group.uid: group.global_step_when_scheduled for group in trained}
        one.global_step += 1
        await one._staleness_manager.notify_capacity_change(one.global_step)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers)
    stored = {str(group.prompt_uid): group.min_policy_version for group in kept.find()}
    assert {uid: stored[uid] for uid in scheduled} == scheduled
    assert max(scheduled.values()) > 1


def _run(*arguments: object) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([trainer.__name__])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        process = context.Process(target=trainer.run, args=arguments)
        process.start()
        process.join(120)
    return process.exitcode


@postgresql_nightly
def test_restart_between_checkpoints(url: str, tmp_path: Path) -> None:
    """Killed between checkpoints: later steps are trained again, without generating again."""
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    folder.mkdir()
    assert _run(url, folder, log, 5, True) == -signal.SIGKILL
    first = log.read_text().splitlines()
    assert _run(url, folder, log, 8, False) == 0
    lines = log.read_text().splitlines()
    second = lines[len(first) :]

    generated = [line for line in lines if line.startswith("generated")]
    assert len(generated) - len(set(generated)) <= 3  # in flight in workers that were killed
    steps = [line.split()[1:] for line in lines if line.startswith("trained")]
    assert len(steps) == 9  # the fifth twice
    settled = [uid for step in steps[:4] + steps[5:] for uid in step]
    assert len(settled) == len(set(settled)) == 16
    again = [uid for line in second if line.startswith("trained") for uid in line.split()[1:]]
    assert set(steps[4]) <= set(again)  # groups of the lost step
    with blocking.Store.open(url) as store:
        kept = StoredGenerator(Counting(), store.buffer("skyrl", create=False))
        assert kept.consumed_uids() - kept.filtered_uids() == set(settled)
        assert {"0", "6", "12"} <= kept.filtered_uids()
