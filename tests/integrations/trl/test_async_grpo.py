"""The rollout buffer with the real AsyncGRPOTrainer."""

from __future__ import annotations

import math
import pickle
import queue
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

from integrations.agents import payload_bytes, trajectories
from integrations.trl.conftest import Child
from integrations.trl.tiny import asynchronous, put_samples, sample, train_async
from replaydb import (
    DatabaseUnavailableError,
    Episode,
    EpisodeGroup,
    InvalidInputError,
    StoreClosedError,
    Turn,
    blocking,
)
from replaydb.integrations.trl.async_grpo import PREFETCH, RolloutBuffer
from replaydb.integrations.trl.samples import to_group, to_sample
from support.engines import both_engines, postgresql_nightly


@pytest.fixture
def rollouts(url: str) -> Any:
    made = RolloutBuffer(url, run="tiny")
    yield made
    made.close()


def taken(buffer: RolloutBuffer) -> list[Any]:
    found = []
    while True:
        try:
            found.append(buffer.get(block=False))
        except queue.Empty:
            return found


def assert_same(before: Any, after: Any) -> None:
    for field in fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, np.ndarray):
            assert np.array_equal(old, new)
            assert old.dtype == new.dtype
        elif field.name == "metrics":
            assert new == pytest.approx(old, nan_ok=True)
        else:
            assert old == new


def test_samples_round_trip(rollouts: RolloutBuffer) -> None:
    before = sample(3, group_id=7)
    rollouts.put_nowait(before)
    for after in (to_sample(to_group(before)), rollouts.get(timeout=60)):
        assert_same(before, after)


def test_each_token_of_a_run_of_agents_is_stored_once(rollouts: RolloutBuffer) -> None:
    """TRL itself makes one row of the turns of a conversation, as long as they continue it."""
    made, turns = [], []
    for number, steps in enumerate(trajectories(random.Random(4))):
        records = [TurnRecord(one.context, one.response, one.logprobs) for one in steps]
        [row], _ = _chain_to_sequences(records, str(number), fork_threshold=1024)
        arrays = {
            "input_ids": np.asarray(row.input_ids, np.int64),
            "completion_mask": np.asarray(row.completion_mask, np.int64),
            "old_log_probs": np.asarray(row.old_log_probs, np.float32),
        }
        made.append(replace(sample(number, group_id=7), **arrays))
        turns.append(
            [
                Turn(
                    prompt_ids=one.prompt_ids,
                    response_ids=one.output_ids,
                    logprobs=one.output_log_probs,
                )
                for one in records
            ]
        )
    stored = payload_bytes(map(to_group, made), 2)
    whole = EpisodeGroup("of turns", [Episode(turns=several) for several in turns])
    assert stored <= 0.15 * payload_bytes([whole], 1)
    assert stored <= 0.95 * payload_bytes(map(to_group, made), 1)  # one row for a conversation, too
    for one in made:
        rollouts.put_nowait(one)
        assert_same(one, rollouts.get(timeout=60))


def test_queue_semantics(url: str) -> None:
    buffer = RolloutBuffer(url, run="tiny", maxsize=3)
    with pytest.raises(queue.Empty):
        buffer.get(timeout=0.1)
    for i in range(3):
        buffer.put_nowait(sample(i))
    with pytest.raises(queue.Full):
        buffer.put_nowait(sample(3))
    assert buffer.qsize() == 3
    assert [buffer.get(timeout=60).advantage for _ in range(3)] == [0.0, 1.0, 2.0]
    assert buffer.qsize() == 0
    buffer.put_nowait(sample(3))
    assert buffer.get().advantage == 3.0
    for field, value in {"advantage": math.nan, "metrics": {"reward": None}}.items():
        with pytest.raises(InvalidInputError, match=field):
            buffer.put_nowait(replace(sample(4), **{field: value}))
    buffer.close()


def test_timeouts_of_concurrent_gets(rollouts: RolloutBuffer) -> None:
    with ThreadPoolExecutor() as pool:
        patient = pool.submit(rollouts.get)
        with pytest.raises(TimeoutError):
            patient.result(0.3)
        hasty = pool.submit(rollouts.get, timeout=0.1)
        hastier = pool.submit(rollouts.get, block=False)
        try:
            for one in (hasty, hastier):
                assert isinstance(one.exception(30), queue.Empty)
        finally:
            for i in range(3):
                rollouts.put_nowait(sample(i))
        assert patient.result(30).advantage == 0.0


def test_done_needs_group_ids_of_get(rollouts: RolloutBuffer, url: str) -> None:
    rollouts.put_nowait(sample(0))
    taken = rollouts.get(timeout=60)
    for number in (7, int(taken.group_id)):
        with pytest.raises(InvalidInputError, match="group_ids: expected the group_id object"):
            rollouts.done([taken.group_id, number])
    other = RolloutBuffer(url, run="tiny")
    other.done([taken.group_id])  # a sample that was passed to another object
    other.close()
    assert rollouts.qsize() == 0


@postgresql_nightly
def test_two_consumers_and_a_worker_process(
    url: str, rollouts: RolloutBuffer, child: Child
) -> None:
    """The worker gets the buffer as a pickle; no sample goes to both, and none is lost."""
    assert child(put_samples, rollouts, 0, 2 * PREFETCH + 8) == [0]
    other = RolloutBuffer(url, run="tiny")
    mine, theirs = [rollouts.get()], [other.get()]
    mine += taken(rollouts)
    theirs += taken(other)
    assert sorted(one.advantage for one in mine + theirs) == list(range(2 * PREFETCH + 8))
    assert len(theirs) >= PREFETCH
    assert [one.group_id for one in mine[:5]] == [0, 0, 0, 0, 1]  # groups stay together
    assert {one.group_id for one in theirs} <= set(range(-100, 0))  # numbered by another buffer
    rollouts.done(one.group_id for one in mine)
    other.close()  # releases unacknowledged samples
    assert {one.advantage for one in taken(rollouts)} == {one.advantage for one in theirs}


@postgresql_nightly
def test_untrained_samples_survive_kill(url: str, tmp_path: Path, child: Child) -> None:
    """Killed in the third step: samples of two steps are done, all others return in order."""
    rollouts = RolloutBuffer(url, run="tiny")
    put_samples(rollouts, 0, 40)
    assert child(train_async, url, str(tmp_path), steps=5, kill_at=2) == [-signal.SIGKILL]
    with blocking.Store.open(url, run="tiny") as store:
        assert store.buffer("rollouts").count(statuses="archived") == 8
        assert store.buffer("rollouts").count(statuses="leased") == PREFETCH - 8
    again = RolloutBuffer(url, run="tiny")
    assert observe(asynchronous(tmp_path, again, steps=3)) == list(range(8, 12))
    again.close()
    last = RolloutBuffer(url, run="tiny")
    assert [one.advantage for one in taken(last)] == list(range(12, 40))
    last.close()


@both_engines
def test_checkpoints_acknowledge_their_samples(
    rollouts: RolloutBuffer, url: str, tmp_path: Path
) -> None:
    for i in range(40):
        rollouts.put_nowait(sample(i, group_id=i // 4))
    trainer = asynchronous(tmp_path, rollouts, steps=3)
    trainer.train()
    with blocking.Store.open(url, read_only=True) as store:
        buffer = store.buffer("rollouts", create=False)
        assert buffer.count(statuses="archived") == 12
        assert trainer._trained_groups >= {0, 1, 2}
        # A stale sample is returned to the trainer, which counts it, and not returned again.
        trainer.model_version = 100
        stale = rollouts.get(timeout=60)
        assert buffer.count(statuses="filtered") == 1
    assert stale.model_version == 0


class Broken(TrainerCallback):
    """Interrupts training in step 3, before its checkpoint or right after it."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.breaks)

    def breaks(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("broken")


def observe(trainer: Any, resume: bool = True) -> list[float]:
    """Resume training, or start one that is interrupted; return the advantages trained on."""
    trained: list[float] = []
    step = trainer.training_step

    def observed(model: Any, inputs: Any, *more: Any) -> Any:
        trained.extend(np.unique(inputs["advantages"].cpu()))
        return step(model, inputs, *more)

    trainer.training_step = observed
    with nullcontext() if resume else pytest.raises(RuntimeError, match="broken"):
        trainer.train(resume_from_checkpoint=resume)
    trainer.training_step = step
    return sorted(trained)


@postgresql_nightly
@pytest.mark.parametrize(
    ("event", "restarted"),
    [("on_step_end", False), ("on_save", True)],
    ids=["before the checkpoint, same trainer", "after the checkpoint, other trainer"],
)
def test_an_interrupted_training_trains_each_sample_once(
    url: str, tmp_path: Path, event: str, restarted: bool
) -> None:
    """A sample is trained on again only if the checkpoint does not include it."""
    buffer = RolloutBuffer(url, run="tiny")
    for i in range(40):
        one = sample(i, group_id=i)
        one.model_version = 100  # not stale
        buffer.put_nowait(one)
    trainer = asynchronous(tmp_path, buffer, steps=4, callbacks=[Broken(event)])
    assert observe(trainer, resume=False) == list(range(12))
    trainer.remove_callback(Broken)
    if restarted:  # the old buffer keeps its leases, as if it had been killed
        trainer = asynchronous(tmp_path, RolloutBuffer(url, run="tiny"), steps=4)
    in_checkpoint = 8 if event == "on_step_end" else 12
    assert observe(trainer) == list(range(in_checkpoint, 16))
    with blocking.Store.open(url, read_only=True) as store:
        stored = store.buffer("rollouts", create=False)
        done = stored.get([one.id for one in stored.find(statuses="archived")])
    assert sorted(one.episodes[0].advantage or 0.0 for one in done) == list(range(16))


def test_samples_of_a_checkpoint_whose_lease_has_ended(
    rollouts: RolloutBuffer, url: str, tmp_path: Path
) -> None:
    for i in range(3):
        rollouts.put_nowait(sample(i))
    trained: Any = rollouts.get()
    with blocking.Store.open(url) as store:
        store.buffer("rollouts").revoke(trained.group_id.lease_id, reason="it took too long")
        theirs = store.buffer("rollouts").lease(1, ttl=60, owner="other")
        rollouts.resume([trained.group_id.stored_uid, "of another store"])
        assert store.buffer("rollouts").count(statuses="archived") == 0  # another consumer has it
        theirs.nack()
        rollouts.resume([trained.group_id.stored_uid])
    assert [one.advantage for one in taken(rollouts)] == [1.0, 2.0]


def test_a_pickle_opens_nothing(tmp_path: Path) -> None:
    pickled = pickle.dumps(RolloutBuffer(f"sqlite:///{tmp_path}/no.db", run="tiny"))
    made = pickle.loads(pickled)  # noqa: S301
    assert not (tmp_path / "no.db").exists()
    made.put_nowait(sample(0))
    assert made.qsize() == 1
    made.close()


def test_the_store_is_closed_although_samples_cannot_be_released(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = RolloutBuffer(url, run="tiny")
    buffer.put_nowait(sample(0))

    def lost() -> Any:
        raise DatabaseUnavailableError("no server")

    monkeypatch.setattr(buffer, "_leases", lost)
    with pytest.raises(DatabaseUnavailableError):
        buffer.close()
    with pytest.raises(StoreClosedError):
        buffer.qsize()
