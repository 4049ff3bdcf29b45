"""Turns of agents."""

from __future__ import annotations

from typing import Any

from replaydb import Episode, Turn

PROMPT = list(range(1, 65))
#: Number of turns of the trajectories of agents that are killed.
NUM_TURNS = 3


def turn(uid: str, parent: Turn | None = None, **more: Any) -> Turn:
    """A turn after its parent, or at the beginning, with two sampled tokens."""
    context: dict[str, Any] = {"prompt_ids": PROMPT} if parent is None else {"new_ids": [8, 9]}
    values = {"response_ids": [5, 6], "logprobs": [-0.5, -0.25], "policy_version": 3, **more}
    return Turn(uid=uid, parent=parent, **context, **values)


def chain(number: int, prefix: str = "t") -> list[Turn]:
    """Turns, each after the one before."""
    found: list[Turn] = []
    for i in range(number):
        found.append(turn(f"{prefix}{i}", found[-1] if found else None))
    return found


def long_prompt(seed: int, length: int = 4096) -> Episode:
    """An episode of a prompt that is worth sharing, with an answer of its own."""
    return Episode(
        prompt_ids=[i * i % 50_021 for i in range(length)],
        response_ids=[seed, seed + 1],
        logprobs=[-0.5, -0.25],
        reward=float(seed),
    )
