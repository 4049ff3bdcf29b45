"""Batches to tensors, compared with a copy of the same bytes; and tensors to groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.bench import Bench
from benchmarks.results import Result, Work
from replaydb.batch.batch import Batch
from replaydb.batch.stored import StoredGroup
from replaydb.batch.tensors import SplitBatch
from replaydb.domain.episodes import Episode, EpisodeGroup, GroupStatus
from replaydb.domain.episodes.context import GroupContext

NUM_GROUPS, NUM_EPISODES, NUM_TOKENS = 64, 8, 4096
PADDED_TARGET = 3.0


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds, and the ratio to a copy of the tensors."""
    tokens = NUM_TOKENS if bench.options.rounds > 1 else 64
    for lengths in ("equal", "ragged"):
        batch = make_batch(tokens, ragged=lengths == "ragged")
        makers: dict[str, Callable[[], Any]] = {
            "padded": partial(batch.padded, 0),
            "padded, pad token 9": partial(batch.padded, 9),
            "padded left": partial(batch.padded, 0, side="left"),
            "split": partial(batch.split, 0),
            "packed, next fit": partial(batch.packed, 0, max_tokens=4 * tokens),
            "packed, first fit": partial(batch.packed, 0, max_tokens=4 * tokens, fit="first"),
        }
        for name, make in makers.items():
            arrays = [one.numpy() for one in token_tensors(make())]
            works = {"make": _called(make), "copy": _called(partial(copy_all, arrays))}
            timings = await bench.times(f"{name}, {lengths}", works, min(bench.options.rounds, 9))
            shape = f"{NUM_EPISODES} x {tokens:,}"
            what = f"{NUM_GROUPS} groups of {shape}, {lengths} lengths: {name}"
            facts: dict[str, Any] = {"layout": name, "lengths": f"{lengths} lengths"}
            yield bench.result(what, 1e3 * timings.median("make"), "ms", side="time", **facts)
            target = PADDED_TARGET if (name, lengths) == ("padded", "equal") else None
            ratio = timings.ratio("make", "copy")
            side = "time / copy"
            yield bench.result(f"{what} / copy", ratio, "x", target, side=side, **facts)
        split = batch.split(0)
        ways = {"episodes": partial(_from_episodes, split), "arrays": partial(_from_arrays, split)}
        works = {way: _called(make) for way, make in ways.items()}
        timings = await bench.times(f"groups, {lengths}", works, min(bench.options.rounds, 9))
        for way in ways:
            what = f"{NUM_GROUPS} groups of {NUM_EPISODES} x {tokens:,}, {lengths} lengths"
            facts = {"layout": f"groups from {way}", "lengths": f"{lengths} lengths"}
            value = 1e3 * timings.median(way)
            yield bench.result(f"{what}: from {way}", value, "ms", side="time", **facts)


def make_batch(tokens: int, *, ragged: bool) -> Batch:
    """Return a decoded batch, as from a draw."""
    rng = np.random.default_rng(0)
    groups = [_stored_group(i, tokens, rng, ragged=ragged) for i in range(NUM_GROUPS)]
    return Batch(groups)


def _from_episodes(split: SplitBatch) -> list[EpisodeGroup]:
    prompt_lengths, response_lengths = split.prompt_mask.sum(1), split.response_mask.sum(1)
    assert split.logprobs is not None
    episodes = [
        Episode(
            prompt_ids=prompt[len(prompt) - num_prompt :],
            response_ids=response[:num_response],
            logprobs=logprobs[:num_response],
            reward=reward,
        )
        for prompt, num_prompt, response, num_response, logprobs, reward in zip(
            split.prompt_ids,
            prompt_lengths.tolist(),
            split.response_ids,
            response_lengths.tolist(),
            split.logprobs,
            split.rewards.tolist(),
            strict=True,
        )
    ]
    starts = range(0, len(episodes), NUM_EPISODES)
    return [EpisodeGroup("math", episodes[start : start + NUM_EPISODES]) for start in starts]


def _from_arrays(split: SplitBatch) -> list[EpisodeGroup]:
    assert split.logprobs is not None
    token_ids = torch.cat([split.prompt_ids, split.response_ids], 1)
    mask = torch.cat([split.prompt_mask, split.response_mask], 1)
    prompt_lengths = split.prompt_mask.sum(1)
    rows = [slice(at, at + NUM_EPISODES) for at in range(0, len(token_ids), NUM_EPISODES)]
    return [
        EpisodeGroup.from_arrays(
            "math",
            token_ids=token_ids[row],
            attention_mask=mask[row],
            prompt_lengths=prompt_lengths[row],
            logprobs=split.logprobs[row],
            rewards=split.rewards[row],
        )
        for row in rows
    ]


def copy_all(arrays: list[Any]) -> None:
    """Copy arrays."""
    for array in arrays:
        array.copy()


def token_tensors(made: Any) -> list[Any]:
    """Return the two-dimensional tensors of a batch."""
    names = [name for kind in type(made).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [getattr(made, name) for name in names]
    return [value for value in values if getattr(value, "ndim", 0) == 2]


def _stored_group(i: int, tokens: int, rng: np.random.Generator, *, ragged: bool) -> StoredGroup:
    episodes = []
    for _ in range(NUM_EPISODES):
        length = int(rng.integers(tokens // 4, tokens + 1)) if ragged else tokens
        prompt = length // 4
        episodes.append(
            Episode(
                prompt_ids=rng.integers(0, 150_000, prompt, np.int32),
                response_ids=rng.integers(0, 150_000, length - prompt, np.int32),
                logprobs=rng.standard_normal(length - prompt).astype(np.float32),
                reward=float(rng.random()),
                policy_version=3,
            )
        )
    facts: dict[str, Any] = defaultdict(lambda: None)
    facts |= {"id": i, "task_name": "t", "group_uid": str(i), "priority": 1.0, "tags": {}}
    facts |= {"group_status": GroupStatus.COMPLETED, "times_sampled": 1, "attempts": 0}
    return StoredGroup(facts, dict(enumerate(episodes)), GroupContext())


def _called(make: Callable[[], object]) -> Work:
    async def work() -> None:
        make()

    return work
