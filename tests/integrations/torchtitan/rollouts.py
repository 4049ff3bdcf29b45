"""Random rollouts in the form of torchtitan's rollouter."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout import Rollout, RolloutGroup, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.types import RolloutTurnID


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A sample of a dataset, with tuples, like those of torchtitan's own examples."""

    question: str
    names_per_turn: tuple[tuple[str, ...], ...] = ()


def _logprobs(rng: random.Random, size: int) -> list[float]:
    return [-rng.randrange(1, 512) / 64 for _ in range(size)]  # exact in float32


def rollout(rng: random.Random, group_id: int = 0, rollout_id: int = 0, turns: int = 1) -> Rollout:
    """A chain of turns. Most prompts extend the turns before, some do not."""
    made: list[RolloutTurn] = []
    tokens: list[int] = []
    version = rng.randrange(3)
    for position in range(turns):
        match rng.randrange(5):
            case 0:  # the history was edited
                tokens = [*tokens[: rng.randrange(len(tokens) + 1)], rng.randrange(4)]
            case 1:  # no tokens between two answers
                pass
            case _:
                tokens = tokens + [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        answer = [rng.randrange(4) for _ in range(rng.randrange(1, 5))]
        newest = version + (rng.randrange(3) == 0)
        made.append(
            RolloutTurn(
                rollout_id=RolloutTurnID(group_id, rollout_id, position),
                prompt_token_ids=list(tokens),
                completion_token_ids=answer,
                completion_logprobs=_logprobs(rng, len(answer)),
                min_policy_version=version,
                max_policy_version=newest,
                prompt_messages=[{"role": "user", "content": "2 + 2?"}],
                completion_message={"role": "assistant", "content": [{"type": "text"}]},
                env_messages=[{"role": "tool", "content": "4"}],
                env_rewards={"format": rng.random()},
                metrics=[m.Metric("generator/queue_time_ms", m.Mean(rng.random()))],
            )
        )
        version = newest
        tokens = tokens + answer
    return Rollout(
        group_id=group_id,
        rollout_id=rollout_id,
        turns=made,
        status=RolloutStatus.COMPLETED,
        reward=rng.random(),
        reward_breakdown={"correct": 1.0},
        advantage=rng.uniform(-1, 1),
    )


def rollout_group(group_id: int, *, size: int = 2, turns: int = 1) -> RolloutGroup:
    """A group that depends only on its arguments."""
    rng = random.Random(group_id)
    return RolloutGroup(
        group_id=group_id,
        rollouts=[rollout(rng, group_id, i, turns) for i in range(size)],
        metrics=[
            m.Metric("rollout/length", m.Max.from_list([])),  # NaN
            m.Metric("rollout/reward", m.SummaryStats.from_list([])),  # infinite
            m.Metric("rollout/turns", m.Sum(3.0)),
        ],
    )


def failed_group(group_id: int) -> RolloutGroup:
    """The group that the controller creates if a rollouter raised an error."""
    failure = m.Metric("rollout/group_failures", m.Sum(1.0))
    return RolloutGroup(group_id=group_id, rollouts=[], metrics=[failure])
