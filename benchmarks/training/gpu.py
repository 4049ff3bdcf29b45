"""Batches on a GPU, compared with a copy of the same tensors from page-locked memory.

32 groups are drawn, with payloads in a folder. The waiting time is that of a trainer of a small
model in bfloat16 whose steps run on the GPU, with a blocking loader.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.groups import MIDDLE, SMALL, Source, put_all
from benchmarks.results import Result
from replaydb import blocking
from replaydb.batch import PaddedBatch

BATCH = 32
BANDWIDTH_TARGET, WAITING_TARGET = 0.8, 1.0
COPY, LOADER = "page-locked memory", "the store, by a loader"
WIDTH, LAYERS, VOCABULARY = 512, 4, 8192
#: Tokens of a forward and backward pass.
MICRO_BATCH = 131_072
#: Rounds, batches and steps that are not measured.
WARM_UP = 3


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure GB/s and their ratio to the copy; milliseconds and the share of waiting."""
    with tempfile.TemporaryDirectory(prefix="replaydb-bench-") as folder:
        for shape in (SMALL, MIDDLE):
            url, payloads = await bench.database(), Path(folder, str(shape.tokens)).as_uri()
            what = f"{BATCH} groups of {shape}"
            async with rdb.Store.open(url, payloads=payloads, payload_cache=0) as store:
                buffer = await store.buffer("bench", seed=0)
                bench.report(f"{shape}: putting")
                await put_all(buffer, Source(shape), 4 * BATCH)
                for result in await _bandwidths(bench, what, buffer):
                    yield result
            for prefetch in (0, 2):
                bench.report(f"{shape}: training, prefetch {prefetch}")
                train = partial(_train, url, payloads, prefetch, max(2, bench.options.rounds))
                target = WAITING_TARGET if prefetch and shape == MIDDLE else None
                seconds = await asyncio.to_thread(train)
                for result in _shares(bench, what, prefetch, target, *seconds):
                    yield result


async def _bandwidths(bench: Bench, what: str, buffer: rdb.Buffer) -> list[Result]:
    batch, collate = await buffer.sample(BATCH), partial(rdb.Batch.padded, pad_token_id=0)
    to_gpu = partial(collate, device="cuda")
    sources = [one.pin_memory() for one in _token_tensors(collate(batch))]
    targets = [torch.empty_like(one, device="cuda") for one in sources]
    gigabytes = sum(one.nbytes for one in sources) / 1e9

    async def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    async def move() -> None:
        to_gpu(batch)
        torch.cuda.synchronize()

    async def draw() -> None:
        to_gpu(await buffer.sample(BATCH))
        torch.cuda.synchronize()

    works = {COPY: copy, "a decoded batch": move, "the store": draw}
    timings = await bench.times(what, works, bench.options.rounds, warm_up=WARM_UP)
    medians = {name: timings.median(name) for name in works}
    bench.report(f"{what}: loader")
    async with buffer.loader(BATCH, collate=to_gpu) as loader:
        for _ in range(WARM_UP):
            await anext(loader)
        start = time.perf_counter()
        for _ in range(bench.options.rounds):
            await anext(loader)
        torch.cuda.synchronize()
        medians[LOADER] = (time.perf_counter() - start) / bench.options.rounds
    results = []
    for name, seconds in medians.items():
        facts: dict[str, Any] = {"groups": what, "from": name}
        target = BANDWIDTH_TARGET if name == LOADER else None
        rate, ratio = gigabytes / seconds, medians[COPY] / seconds
        results += [
            bench.result(f"{what}: from {name}", 1e3 * seconds, "ms", side="time", **facts),
            bench.result(f"{what}: from {name}, rate", rate, "GB/s", side="rate", **facts),
            bench.result(
                f"{what}: from {name} / copy",
                ratio,
                "x",
                target,
                more_is_better=True,
                side="rate / copy",
                **facts,
            ),
        ]
    return results


def _train(url: str, payloads: str, prefetch: int, steps: int) -> tuple[float, float]:
    """Return the mean seconds of waiting for a batch, and of a step including the wait."""
    model, waits, totals = _Model().cuda(), [], []
    optimizer = torch.optim.AdamW(model.parameters())
    collate = partial(rdb.Batch.padded, pad_token_id=0, device="cuda")
    with (
        blocking.Store.open(url, payloads=payloads, payload_cache=0) as store,
        store.buffer("bench").loader(
            BATCH, prefetch=prefetch, collate=collate, num_steps=WARM_UP + steps
        ) as loader,
    ):
        start = time.perf_counter()
        for batch in loader:
            drawn = time.perf_counter()
            model.step(batch, optimizer)
            end = time.perf_counter()
            waits.append(drawn - start)
            totals.append(end - start)
            start = end
    return statistics.mean(waits[WARM_UP:]), statistics.mean(totals[WARM_UP:])


def _shares(
    bench: Bench,
    what: str,
    prefetch: int,
    target: float | None,
    waiting: float,
    total: float,
) -> Iterator[Result]:
    facts: dict[str, Any] = {"groups": what, "prefetch": prefetch}
    what = f"{what}: training, prefetch {prefetch}"
    yield bench.result(f"{what}: waiting", 1e3 * waiting, "ms", side="waiting", **facts)
    yield bench.result(f"{what}: step", 1e3 * total, "ms", side="step", **facts)
    share = 100 * waiting / total
    yield bench.result(f"{what}: share", share, "%", target, side="waiting / step", **facts)


class _Model(nn.Module):
    """Predicts each token from the one before it, by layers as wide as those of a small model."""

    def __init__(self) -> None:
        super().__init__()
        self._embedding = nn.Embedding(VOCABULARY, WIDTH)
        self._layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(LAYERS)
        )

    def step(self, batch: PaddedBatch, optimizer: torch.optim.Optimizer) -> float:
        """Train on all tokens of a batch. Return the loss, for which the GPU must have ended."""
        weights = batch.shifted(batch.per_token(batch.rewards.nan_to_num() - 0.5))
        ids, labels = batch.token_ids % VOCABULARY, batch.labels
        labels = torch.where(labels >= 0, labels % VOCABULARY, labels)
        count = max(1, MICRO_BATCH // ids.shape[1])
        losses = []
        for rows in zip(*(one.split(count) for one in (ids, labels, weights)), strict=True):
            with torch.autocast("cuda", torch.bfloat16):
                loss = self._loss(*rows) / ids.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).sum())

    def _loss(self, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = self._embedding(ids)
        for layer in self._layers:
            hidden = hidden + layer(hidden)
        logits = functional.linear(hidden, self._embedding.weight)
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
        )
        return (losses * weights.flatten()).sum()


def _token_tensors(batch: PaddedBatch) -> list[torch.Tensor]:
    names = ("token_ids", "attention_mask", "loss_mask", "logprobs", "token_versions")
    return [one for name in names if (one := getattr(batch, name)) is not None]
