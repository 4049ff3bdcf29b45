"""Forward and backward of a small transformer with trees, and with padded rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bench import Bench
from benchmarks.results import Result, Work
from replaydb import Batch, Episode, EpisodeGroup, Turn

#: Tokens of the vocabulary; width, heads and layers of the transformer.
VOCABULARY, WIDTH, HEADS, LAYERS = 256, 256, 4, 2
#: Padded rows that are computed together.
ROWS = 12
EPISODES, TURNS, PROMPT = 4, 60, 64
#: Sampled tokens of a turn, how many of them the next context does not have, and a tool's answer.
SAMPLED, REMOVED, ANSWER = 16, 8, 4
TARGET = 0.4


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure seconds, tokens and their ratios, for one group."""
    short = bench.options.rounds == 1  # the form for tests
    batch = Batch([_group(2 if short else EPISODES, 3 if short else TURNS)])
    model = _Transformer()
    works: dict[str, Work] = {
        "padded": _called(partial(_step_on_rows, model, batch)),
        "trees": _called(partial(_step_on_trees, model, batch)),
    }
    timings = await bench.times("forward and backward", works, bench.options.long_rounds)
    what = f"{EPISODES} x {TURNS} turns"
    tokens = {
        "padded": batch.padded(0).attention_mask.sum(),
        "trees": batch.trees(0).attention_mask.sum(),
    }
    sides: dict[str, dict[str, tuple[float, str]]] = {
        "time": {way: (timings.median(way), "s") for way in works},
        "tokens": {way: (float(count), "tokens") for way, count in tokens.items()},
    }
    ratio = timings.ratio("trees", "padded"), float(tokens["trees"] / tokens["padded"])
    for side, value in zip(sides, ratio, strict=True):
        sides[side]["trees / padded"] = value, "x"
        for layout, (number, unit) in sides[side].items():
            target = TARGET if (layout, side) == ("trees / padded", "time") else None
            name = f"{what}: {layout}, {side}"
            yield bench.result(name, number, unit, target, layout=layout, side=side)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        shape = hidden.shape
        parts = self.attention(self.first(hidden)).view(*shape[:2], 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None
        )
        hidden = hidden + self.out(found.transpose(1, 2).reshape(shape))
        return hidden + self.narrow(self.wide(self.second(hidden)).relu())


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([_Layer() for _ in range(LAYERS)])
        self.last = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask`: whether a token attends to another one, [A, B, B]. Default: causal."""
        rates = torch.exp(-torch.arange(WIDTH) / 16)
        hidden = self.tokens(ids) + torch.sin(positions[..., None] * rates)
        for layer in self.layers:
            hidden = layer(hidden, None if mask is None else mask[:, None])
        return self.last(hidden)


def _step_on_trees(model: nn.Module, batch: Batch[Any]) -> None:
    made = batch.trees(0)
    logits = made.before(model(made.token_ids, made.position_ids, made.tree_mask))
    _backward(logits, torch.where(made.predicted, made.token_ids, -100))


def _step_on_rows(model: nn.Module, batch: Batch[Any]) -> None:
    """As trainers do: rows of similar lengths together, as wide as the longest of them."""
    made = batch.padded(0)
    labels, positions = made.labels, made.position_ids
    for rows in made.lengths.argsort().split(ROWS):
        width = int(made.lengths[rows].max())
        logits = model(made.token_ids[rows, :width], positions[rows, :width])
        _backward(logits, labels[rows, :width])


def _backward(logits: Tensor, labels: Tensor) -> None:
    flat = logits.flatten(0, 1), labels.flatten()
    nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum").backward()


def _group(episodes: int, turns: int) -> EpisodeGroup:
    """Return agents whose contexts do not have the reasoning of earlier turns."""
    rng = np.random.default_rng(0)
    prompt = _tokens(rng, PROMPT)
    several = []
    for _ in range(episodes):
        mine, context = [], prompt
        for _ in range(turns):
            sampled = _tokens(rng, SAMPLED)
            mine.append(Turn(prompt_ids=context, response_ids=sampled))
            context = np.concatenate([context, sampled[REMOVED:], _tokens(rng, ANSWER)])
        several.append(Episode(turns=mine, reward=1.0))
    return EpisodeGroup("agents", several)


def _tokens(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, size).astype(np.int32)


def _called(make: Callable[[], object]) -> Work:
    async def work() -> None:
        make()

    return work
