"""A killed trainer resumes: nothing is generated twice, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import transfer_queue as tq
from examples.verl_cpu import PROMPTS, Trainer, generated, prompt
from tensordict import TensorDict
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tensordict_utils import get_tensordict

from integrations.verl.trainers import configured, forget, leave
from replaydb import Store
from support.engines import postgresql_nightly


class _Died(Exception):
    """Raised in place of an endless wait."""


def _until_it_dies(trainer: Trainer) -> None:
    with pytest.raises(_Died):  # noqa: PT012
        while True:
            trainer.step()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "generated"


@pytest.fixture
def begun(url: str, tmp_path: Path, log: Path, queue: None) -> Iterator[Callable[..., Trainer]]:
    """Start successive trainers, with an empty queue. They raise `_Died` in place of waiting."""
    trainers: list[Trainer] = []

    def begin(mode: str, limit: int = PROMPTS) -> Trainer:
        if trainers:
            leave(trainers[-1])
            forget()

        def die(*arguments: object) -> None:
            raise _Died

        trainers.append(Trainer(configured(mode, url, tmp_path), log, limit))
        trainers[-1].sampler._wait_for_next_poll = die
        return trainers[-1]

    yield begin
    leave(trainers[-1])


@postgresql_nightly
def test_synchronous(begun: Callable[..., Trainer], log: Path) -> None:
    first = begun("sync", limit=14)
    for _ in range(3):  # the checkpoint has two of them
        first.step()
    _until_it_dies(first)
    assert generated(log) == list(range(14))
    second = begun("sync")
    assert (second.verl.global_steps, second.model.trained) == (3, list(range(8)))
    for _ in range(4):
        second.step()
    assert sorted(second.model.trained) == list(range(24))
    assert sorted(generated(log)) == list(range(24))


def test_before_the_first_checkpoint(begun: Callable[..., Trainer], log: Path) -> None:
    for limit in (3, 3, PROMPTS):  # dies three times, each time a little later
        trainer = begun("sync", limit=limit)
        assert trainer.verl.global_steps == 1
        if limit < PROMPTS:
            _until_it_dies(trainer)
    for _ in range(3):
        trainer.step()
    assert sorted(trainer.model.trained) == sorted(generated(log)) == list(range(12))


@pytest.mark.parametrize(
    ("engine_name", "mode"),
    [
        ("sqlite", "colocate_async"),
        ("postgresql", "separate_async"),
        pytest.param("sqlite", "separate_async", marks=pytest.mark.nightly),
        pytest.param("postgresql", "colocate_async", marks=pytest.mark.nightly),
    ],
)
def test_asynchronous(begun: Callable[..., Trainer], mode: str, log: Path) -> None:
    first = begun(mode, limit=10)
    first.step()
    first.step()  # the checkpoint has two finished groups, and two prompts in flight
    assert sorted(first.model.trained) == list(range(8))
    first.manager.finish(first.manager.stuck[0])  # one of them, after the checkpoint
    _until_it_dies(first)
    assert generated(log) == list(range(11))
    second = begun(mode, limit=5)
    assert second.verl.global_steps == 3
    second.step()
    assert set(range(11)) <= set(second.model.trained)
    _until_it_dies(second)  # in step 5; step 4 is in a checkpoint
    third = begun(mode)
    assert len(third.model.trained) == 16
    for _ in range(4):
        third.step()
    trained = third.model.trained
    assert len(trained) == len(set(trained)) == 32
    assert sorted(generated(log)) == list(range(36))


@pytest.mark.parametrize("payload", ["keep", "drop"])
async def test_resuming_from_an_older_checkpoint(
    url: str, tmp_path: Path, queue: None, store: Store, payload: Any
) -> None:
    """Its queue has groups that later steps trained on, in a later checkpoint."""
    buffer = await store.buffer("grpo", archived_payload=payload)
    trainer = Trainer(configured("sync", url, tmp_path), tmp_path / "generated")
    trainer.verl.prepare_step()
    journal = trainer.manager._journal
    journal.keep()
    groups = (await buffer.sample(4)).groups
    before = {one.group_uid: one for one in groups}
    journal.take(list(before)[:2], 2)
    journal.settle(2)
    assert await buffer.count(statuses="archived") == 2
    behind, ahead = journal.rewind(1)
    leave(trainer)
    assert (behind, ahead) == (set(), {})
    assert await buffer.count(statuses="completed") == 4
    for one in await buffer.get(uids=before.keys()):
        assert (one.tags, one.prompt_uid) == (
            before[one.group_uid].tags,
            before[one.group_uid].prompt_uid,
        )
        assert [episode.response_ids.tolist() for episode in one.episodes] == [
            episode.response_ids.tolist() for episode in before[one.group_uid].episodes
        ]


def test_verls_own_manager_generates_missing_prompts(url: str, tmp_path: Path, queue: None) -> None:
    """It also generates all prompts of a validation."""
    config = configured("sync", url, tmp_path)
    name = "replaydb.integrations.verl.DurableAgentLoopManager"
    dispatched: list[list[int]] = []

    def remote(chunk: TensorDict) -> Any:
        dispatched.append(list(chunk["index"]))
        return ray.put(None)

    first = Trainer(config, tmp_path / "generated", limit=2)
    first.verl.prepare_step()
    first.sampler._sync_metadata_from_transfer_queue()
    leave(first)
    forget()
    manager = load_class_from_fqn(name)(config, llm_client=None)
    worker = SimpleNamespace(generate_sequences=SimpleNamespace(remote=remote))
    manager.agent_loop_workers = [worker]
    rows = {"uid": [f"new-{number}" for number in range(4)]} | {
        key: [prompt(number)[key] for number in range(4)]
        for key in ("raw_prompt", "data_source", "reward_model", "index")
    }
    manager.generate_sequences(get_tensordict(rows, {"validate": True, "global_steps": 0}))
    manager.generate_sequences(get_tensordict(rows, {"global_steps": 1}))
    assert dispatched == [[0, 1, 2, 3], [2, 3]]
    tags = tq.kv_list("train")["train"]
    prompts = {key: tag for key, tag in tags.items() if tag.get("is_prompt")}
    assert sorted(tag["status"] for tag in prompts.values()) == ["finished", "finished"]
    assert not {"new-0", "new-1"} & tags.keys()
    manager._journal.close()


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
async def test_outcomes_of_groups(
    begun: Callable[..., Trainer], mode: str, url: str, store: Store
) -> None:
    trainer = begun(mode)
    for _ in range(3):
        trainer.step()
    buffer = await store.buffer("grpo", create=False)
    assert await buffer.count(statuses="archived") == 8  # in the checkpoint of step 2
    assert await buffer.count(statuses="leased") == 4
    draws = await buffer.draws()
    assert sorted((one.step, *set(one.outcomes)) for one in draws) == [
        (1, "acked"),
        (2, "acked"),
        (3, "leased"),
    ]
    assert await buffer.count(statuses="completed") == (0 if mode == "sync" else 4)
    lags = {lag for one in draws for lag in one.staleness}
    assert lags == ({0} if mode == "sync" else {0, 1})
