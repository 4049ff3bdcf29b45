"""Runs of agents: each turn's context repeats all tokens before it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from replaydb import EpisodeGroup, codec

TURNS = 15


class Step(NamedTuple):
    """A turn: its context, the sampled tokens with their logprobs, and the answer of a tool."""

    context: list[int]
    response: list[int]
    logprobs: list[float]
    answer: list[int]


def tokens(rng: random.Random, count: int) -> list[int]:
    """Return tokens of a vocabulary of usual size."""
    return [rng.randrange(150_000) for _ in range(count)]


def trajectories(rng: random.Random, count: int = 8) -> Iterator[list[Step]]:
    """Yield the turns of each trajectory of a prompt of 200 tokens."""
    prompt = tokens(rng, 200)
    for _ in range(count):
        steps, context = [], prompt
        for _ in range(TURNS):
            response, answer = tokens(rng, rng.randrange(50, 150)), tokens(rng, 250)
            logprobs = [-rng.randrange(1, 512) / 64 for _ in response]  # exact in float32
            steps.append(Step(context, response, logprobs, answer))
            context = context + response + answer
        yield steps


def payload_bytes(groups: Iterable[EpisodeGroup], version: int) -> int:
    """Return how many bytes the payloads of groups have in a format."""
    return sum(
        len(part.data)
        for group in groups
        for part in codec.encode(group.episodes, group.context, version=version)
    )
