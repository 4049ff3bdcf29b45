"""Random outputs in the form of SkyRL's generators."""

from __future__ import annotations

import random
from typing import Any

from skyrl.train.generators.base import TrajectoryID


def _floats(rng: random.Random, size: int) -> list[float]:
    return [-rng.randrange(1, 512) / 64 for _ in range(size)]  # exact in float32


def chain(rng: random.Random, turns: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and responses of turns. Most prompts extend the turns before, some do not."""
    made: list[tuple[list[int], list[int]]] = []
    tokens = [rng.randrange(4)]
    for _ in range(turns):
        match rng.randrange(5):
            case 0:
                tokens = [*tokens[: rng.randrange(len(tokens) + 1)], rng.randrange(4)]
            case 1:
                pass
            case _:
                tokens = tokens + [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        response = [rng.randrange(4) for _ in range(rng.randrange(1, 5))]
        made.append((list(tokens), response))
        tokens = tokens + response
    return made


def output(
    rng: random.Random,
    uids: list[str],
    *,
    repetitions: int = 2,
    step_wise: bool = True,
    token_rewards: bool = True,
    reward: float | None = None,
) -> dict[str, Any]:
    """Trajectories of some prompts; `reward` is the reward of all, by default they differ."""
    rows: list[dict[str, Any]] = []
    for uid in uids:
        for repetition in range(repetitions):
            turns = chain(rng, rng.randrange(1, 5) if step_wise else 1)
            for position, (prompt, response) in enumerate(turns):
                number = repetition + 0.5 if reward is None else reward
                rows.append(
                    {
                        "prompt_token_ids": prompt,
                        "response_ids": response,
                        "rewards": [0.0] * (len(response) - 1) + [number]
                        if token_rewards
                        else number,
                        "loss_masks": [rng.randrange(2) for _ in response],
                        "stop_reasons": rng.choice(["stop", "length"]),
                        "rollout_logprobs": _floats(rng, len(response)),
                        "trajectory_ids": TrajectoryID(uid, repetition),
                        "trajectory_generation_times": repetition + 0.25,
                        "is_last_step": position == len(turns) - 1,
                        "env_metrics": {"calls": rng.randrange(9)},
                    }
                )
    made: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    if not step_wise:
        made["trajectory_ids"] = made["is_last_step"] = None
    return {**made, "rollout_metrics": {"generate/calls": 3}, "rollout_expert_indices": None}
