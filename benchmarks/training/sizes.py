"""Bytes of payloads in both formats. They are exact, and the same on every machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bench import Bench
from benchmarks.results import Result
from benchmarks.scaling.projection import Assumptions
from replaydb import codec
from replaydb.domain.episodes import Episode, Turn

#: The fleet for which bytes a day are computed.
GPUS, DAY_SECONDS = 64, 86_400
#: Layers and experts of each token, uint8.
EXPERTS = 48, 8


class Group(NamedTuple):
    """A group of agents with turns, or of answers if there is one turn.

    Attributes:
        episodes: Number of episodes.
        turns: Number of turns of each episode.
        prompt: Tokens of the prompt, which all episodes have in common.
        sampled: Sampled tokens of a turn.
        answer: Tokens of a tool's answer.
        removed: Number of sampled tokens that the next context does not have.
        experts: Whether tokens have routed experts.
        target: Maximum of the bytes in format 2, divided by those in format 1.
    """

    episodes: int
    turns: int
    prompt: int
    sampled: int
    answer: int = 0
    removed: int = 0
    experts: bool = False
    target: float | None = None

    def __str__(self) -> str:
        size = f"{self.episodes} x ({self.prompt:,} + {self.sampled:,})"
        if self.turns > 1:
            size = f"{self.episodes} x {self.turns} turns"
        if self.removed:
            size += f", {self.removed} of {self.sampled} tokens removed"
        return f"{size}, routed experts" if self.experts else size


GROUPS = (
    Group(8, 1, 256, 768, target=0.75),
    Group(16, 1, 8192, 1024, target=0.2),
    Group(8, 15, 1024, 256, 768, target=0.15),
    Group(4, 100, 1024, 256, 256, target=0.03),
    Group(2, 64, 1024, 400, 300, removed=300, target=0.15),
    Group(8, 1, 256, 768, experts=True),
    Group(8, 15, 1024, 256, 768, experts=True),
)


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure bytes of groups and of sampled tokens, and bytes a day."""
    tokens = GPUS * Assumptions().gpu_tokens * DAY_SECONDS
    for group in GROUPS:
        bench.report(str(group))
        shape = group
        if bench.options.rounds == 1:  # the short form for tests
            shape = group._replace(turns=min(group.turns, 3), prompt=64, sampled=48, removed=0)
        episodes = _episodes(shape)
        size = _num_bytes(episodes, 2)
        sides: list[tuple[str, float, str, float | None]] = [("format 2", size, "bytes", None)]
        if not (group.experts and group.turns > 1):  # format 1 would have half a gigabyte
            before = _num_bytes(episodes, 1)
            sides.insert(0, ("format 1", before, "bytes", None))
            sides.append(("format 2 / format 1", size / before, "x", group.target))
        each = size / sum(episode.num_loss_tokens for episode in episodes)
        sides.append(("of a sampled token", each, "bytes", None))
        sides.append((f"a day, {GPUS} GPUs", each * tokens / 1e9, "GB", None))
        for side, value, unit, target in sides:
            yield bench.result(f"{group}: {side}", value, unit, target, group=str(group), side=side)


def _num_bytes(episodes: list[Episode], version: int) -> int:
    return sum(len(part.data) for part in codec.encode(episodes, version=version))


def _episodes(group: Group) -> list[Episode]:
    rng = np.random.default_rng(0)
    prompt, routed = _tokens(rng, group.prompt), _experts(rng, group, group.prompt)
    episodes = []
    for i in range(group.episodes):
        turns = _turns(rng, group, prompt, routed)
        tokens: dict[str, Any] = {"turns": turns}
        if len(turns) == 1:
            names = ("prompt_ids", "response_ids", "logprobs", "token_extras")
            tokens = {name: getattr(turns[0], name) for name in names}
        episodes.append(Episode(**tokens, reward=float(i % 2), policy_version=0))
    return episodes


def _turns(
    rng: np.random.Generator, group: Group, prompt: np.ndarray, routed: np.ndarray
) -> list[Turn]:
    """Return turns whose contexts repeat the tokens before them, and their experts."""
    turns = []
    context, kept = prompt, group.sampled - group.removed
    for _ in range(group.turns):
        response = _tokens(rng, group.sampled)
        more = _experts(rng, group, group.sampled)
        extras: dict[str, Any] = {}
        if group.experts:
            extras["routed_experts"] = np.concatenate([routed, more])
        turns.append(
            Turn(
                prompt_ids=context,
                response_ids=response,
                logprobs=rng.standard_normal(group.sampled, np.float32),
                token_extras=extras,
            )
        )
        context = np.concatenate([context, response[-kept:], _tokens(rng, group.answer)])
        routed = np.concatenate([routed, more[-kept:], _experts(rng, group, group.answer)])
    return turns


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 150_000, count, np.int32)


def _experts(rng: np.random.Generator, group: Group, count: int) -> np.ndarray:
    return rng.integers(0, 128, (count * group.experts, *EXPERTS), np.uint8)
