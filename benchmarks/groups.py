"""Generated groups for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal
from uuid import uuid4

import numpy as np

import replaydb as rdb

TASK = "bench"
Extras = Literal["none", "top-20 logprobs", "routed experts"]
#: Bytes per token: 20 ids (int32) and logprobs (float16), or 8 experts (uint8) in each of 48
#: layers.
EXTRA_BYTES: Mapping[Extras, int] = {"none": 0, "top-20 logprobs": 120, "routed experts": 384}


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a group: episodes, tokens per episode, and what each token has as token extras."""

    episodes: int
    tokens: int
    extras: Extras = "none"

    def __str__(self) -> str:
        return f"{self.episodes} x {self.tokens:,}"

    @property
    def num_tokens(self) -> int:
        """Tokens of a group, including prompts."""
        return self.episodes * self.tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors of a group (token ids, mask, logprobs, extras), without its rows."""
        return (9 + EXTRA_BYTES[self.extras]) * self.num_tokens


SMALL, MIDDLE, LARGE = Shape(8, 1024), Shape(8, 8192), Shape(16, 32_768)
#: Groups of a mixture-of-experts model: 6.4 MB of routed experts.
ROUTED = Shape(8, 2048, "routed experts")


class Source:
    """Generates groups of one shape quickly.

    All groups share the arrays of a few, but each has its own uid.
    """

    def __init__(self, shape: Shape, *, variety: int = 8, task_name: str = TASK) -> None:
        rng = np.random.default_rng(0)
        self.shape = shape
        self._task_name = task_name
        self._episodes = cycle([_episodes(shape, rng) for _ in range(variety)])

    def take(self, count: int) -> list[rdb.EpisodeGroup]:
        """Return new groups."""
        return [
            rdb.EpisodeGroup(self._task_name, next(self._episodes), group_uid=uuid4().hex)
            for _ in range(count)
        ]

    def batches(self, count: int, size: int) -> Iterator[list[rdb.EpisodeGroup]]:
        """Yield `count` new groups in batches of up to `size`."""
        for first in range(0, count, size):
            yield self.take(min(size, count - first))


async def put_all(buffer: rdb.Buffer, source: Source, count: int) -> list[int]:
    """Put new groups, up to 32 MB at a time. Return their ids."""
    size = max(1, 32_000_000 // source.shape.num_bytes)
    return [
        one for batch in source.batches(count, min(size, 500)) for one in await buffer.put(batch)
    ]


def small_group(task_name: str = TASK, **fields: Any) -> rdb.EpisodeGroup:
    """Return a group of one episode with two tokens."""
    episode = rdb.Episode(prompt_ids=[1], response_ids=[2], reward=1.0, policy_version=0)
    return rdb.EpisodeGroup(task_name, [episode], group_uid=uuid4().hex, **fields)


def _episodes(shape: Shape, rng: np.random.Generator) -> list[rdb.Episode]:
    prompt = shape.tokens // 4
    return [
        rdb.Episode(
            prompt_ids=rng.integers(0, 150_000, prompt),
            response_ids=rng.integers(0, 150_000, shape.tokens - prompt),
            logprobs=rng.standard_normal(shape.tokens - prompt).astype(np.float32),
            reward=float(i % 2),
            policy_version=0,
            token_extras=_token_extras(shape, rng),
        )
        for i in range(shape.episodes)
    ]


def _token_extras(shape: Shape, rng: np.random.Generator) -> dict[str, Any]:
    if shape.extras == "top-20 logprobs":
        size = (shape.tokens, 20)
        return {
            "top_ids": rng.integers(0, 150_000, size, np.int32),
            "top_logprobs": rng.standard_normal(size, np.float32).astype(np.float16),
        }
    if shape.extras == "routed experts":
        return {"routed_experts": rng.integers(0, 128, (shape.tokens, 48, 8), np.uint8)}
    return {}
