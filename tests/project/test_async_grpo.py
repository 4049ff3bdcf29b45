"""The processes of `examples/async_grpo` are killed in each phase, and nothing is done twice."""

from __future__ import annotations

import asyncio
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from examples.async_grpo import checkpoint
from examples.async_grpo.job import (
    DATASET,
    GROUPS_PER_STEP,
    MAX_STALENESS,
    NUM_WORKERS,
    STEP,
    worker_cursor,
)
from examples.grpo_digits import task
from examples.grpo_digits.grpo import clipped_loss, token_logprobs
from examples.grpo_digits.model import Policy
from examples.grpo_digits.rollout import complete
from sqlalchemy import Select, func, select

from replaydb import Episode, EpisodeGroup, Fifo, blocking
from replaydb.database.tables.schema import buffer, cursor, draw, draw_group, episode_group, lease
from replaydb.training import advantages
from support import ranks as calls
from support.connections import transaction
from support.invariants import check_invariants
from support.ranks import running_ranks

STEPS = 6
#: Killed with the first rank and with another one, in each phase. Numbers: steps, or prompts.
BEFORE_THE_RESTART = (
    *("generated-4-worker0", "put-0-worker1"),
    *("leased-0-rank0", "leased-1-rank3", "computed-1-rank0"),
    # Then the supervisor is killed too, and the step is repeated by two ranks.
    *("checkpointed-2-rank0", "restart-3-supervisor"),
)
AFTER_THE_RESTART = ("computed-3-rank1", "checkpointed-3-rank1", "acked-4-rank1", "acked-5-rank0")


async def test_exactly_once_although_every_process_is_killed_in_every_phase(
    url: str, tmp_path: Path
) -> None:
    code, output = await _run(url, tmp_path, 4, BEFORE_THE_RESTART)
    assert code == -signal.SIGKILL, output
    assert await _query(url, select(func.count()).select_from(lease)) == [(1,)]  # to be resumed
    code, output = await _run(url, tmp_path, 2, AFTER_THE_RESTART)
    assert code == 0, output
    assert list((tmp_path / "kill").iterdir()) == []  # all were killed
    await _check_steps(url)
    await _check_groups(url)
    await check_invariants(url)
    _check_checkpoint(tmp_path)


def test_a_step_of_several_ranks_is_a_step_on_all_their_tokens(
    sqlite_url: str, tmp_path: Path
) -> None:
    """Also if one rank, or each of them, has no tokens in the loss."""
    torch.manual_seed(0)
    policy, generator = Policy(), torch.Generator().manual_seed(0)
    one, *others = complete(policy, 0, "0", DATASET[:4], generator)
    with blocking.Store.open(sqlite_url) as store, running_ranks(2, tmp_path) as ranks:
        made = store.buffer("math")
        for groups in (
            [one, *others],
            [EpisodeGroup(one.task_name, one.episodes), _without_loss(one)],
            [_without_loss(one), _without_loss(one)],
        ):
            made.put(groups)
            tensors = made.peek(len(groups), Fifo()).padded(pad_token_id=0)
            found, other = ranks.call(calls.grpo_update, sqlite_url, len(groups))
            policy.zero_grad()
            gain = advantages.grpo(tensors.rewards, tensors.group_index)
            loss = clipped_loss(token_logprobs(policy, tensors.token_ids), tensors, gain)
            assert loss.isfinite()  # gradients would be right, but no check or log of the loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            for name, weight in policy.named_parameters():
                assert weight.grad is not None
                expected = (weight - weight.grad).detach().numpy()
                assert np.abs(found[name] - expected).max() < 1e-5
                assert (found[name] == other[name]).all()


def _without_loss(group: EpisodeGroup) -> EpisodeGroup:
    episodes = [
        Episode(
            token_ids=one.token_ids,
            loss_mask=np.zeros(one.num_tokens, np.bool_),
            logprobs=one.logprobs,
            reward=one.reward,
        )
        for one in group.episodes
    ]
    return EpisodeGroup(group.task_name, episodes)


async def _run(url: str, folder: Path, ranks: int, kills: tuple[str, ...]) -> tuple[int, str]:
    """Run the example. Return its exit code and what it has written."""
    log = folder / "log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.async_grpo", "--url", url, "--folder", str(folder)),
            *("--steps", str(STEPS), "--ranks", str(ranks), "--kill", *kills),
            stdout=file,
            stderr=file,
            cwd=Path(__file__).parents[2],
        )
    try:
        async with asyncio.timeout(240):
            code = await process.wait()
    except TimeoutError:
        process.kill()  # its processes end with it
        code = await process.wait()
    return code, log.read_text()


async def _check_steps(url: str) -> None:
    """Every step was trained on one draw, of groups that no other step was trained on."""
    drawn = select(draw.c.step, draw_group.c.outcome, draw_group.c.group_id).join_from(
        draw, draw_group
    )
    acked = drawn.where(draw_group.c.outcome == "acked").subquery()
    draws = (
        select(draw.c.step, draw_group.c.outcome, func.count())
        .join_from(draw, draw_group)
        .group_by(draw.c.id, draw.c.step, draw_group.c.outcome)
    )
    of_steps = await _query(url, draws)
    assert {(outcome, groups) for _, outcome, groups in of_steps} <= {
        ("acked", GROUPS_PER_STEP),
        ("nacked", GROUPS_PER_STEP),
    }
    assert sorted(step for step, outcome, _ in of_steps if outcome == "acked") == [*range(STEPS)]
    twice = select(acked.c.group_id).group_by(acked.c.group_id).having(func.count() > 1)
    assert await _query(url, twice) == []
    archived = select(episode_group.c.id).where(episode_group.c.group_status == "archived")
    assert set(await _query(url, archived)) == set(await _query(url, select(acked.c.group_id)))
    assert await _query(url, select(buffer.c.policy_version)) == [(STEPS,)]
    assert await _cursor(url, STEP) == STEPS
    assert await _query(url, select(lease)) == []


async def _check_groups(url: str) -> None:
    """Every prompt before the cursors is one group, and no group became too stale."""
    positions = [await _cursor(url, worker_cursor(number)) for number in range(NUM_WORKERS)]
    numbers = {
        worker + NUM_WORKERS * n for worker, count in enumerate(positions) for n in range(count)
    }
    groups = await _query(url, select(episode_group.c.group_uid, episode_group.c.prompt_uid))
    assert dict(groups) == {str(number): task.to_text(DATASET[number]) for number in numbers}
    assert len(groups) == len(numbers)
    statuses = await _query(url, select(episode_group.c.group_status).distinct())
    assert {status for (status,) in statuses} <= {"archived", "completed"}
    [(stalest,)] = await _query(url, select(func.max(draw_group.c.staleness)))
    assert stalest <= MAX_STALENESS


def _check_checkpoint(folder: Path) -> None:
    """The checkpoint is complete, and has all steps."""
    assert [path.name for path in folder.glob("step-*")] == [f"step-{STEPS}"]
    name = "head.1.weight"
    policy, state = Policy(), {"step": torch.tensor(0.0)}
    before = policy.state_dict()[name].clone()
    checkpoint.load_weights(folder, STEPS, policy)
    assert not torch.equal(before, policy.state_dict()[name])
    with warnings.catch_warnings(action="ignore"):  # that there are no other ranks
        everything = {"optimizer": {"state": {name: state}}}
        dcp.load(everything, checkpoint_id=folder / f"step-{STEPS}", no_dist=True)
    # To create the state of a new optimizer, torch takes a step with a learning rate of 0.
    assert state["step"] == 1 + STEPS


async def _cursor(url: str, name: str) -> Any:
    [(value,)] = await _query(url, select(cursor.c.value).where(cursor.c.name == name))
    return value


async def _query(url: str, statement: Select[Any]) -> list[tuple[Any, ...]]:
    async with transaction(url) as connection:
        return [tuple(row) for row in await connection.execute(statement)]
