"""Time of calls as a function of buffer size: the same call on buffers of several sizes.

Buffers have four tasks. Calls for one task use the one with seven tenths of the groups.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.filling import fill
from benchmarks.results import Result, Timings
from benchmarks.scaling import calls
from benchmarks.scaling.calls import Calls


@dataclass(frozen=True, slots=True)
class Part:
    """Calls that are timed in the same rounds, on buffers of all sizes.

    Attributes:
        calls: The calls by name; each returns how many seconds it took.
        rounds: Number of rounds that count.
        ratio_target: Target for the time in the largest buffer divided by that in the smallest.
        targets: Target milliseconds, by groups in the buffer.
        alone: Whether buffers are measured one after another: each call writes so much that the
            engine is still busy with it afterwards.
        settings: Returns settings to change beforehand, given a buffer and its number of groups.
    """

    calls: Calls
    rounds: int
    ratio_target: float | None = None
    targets: Mapping[int, float] | None = None
    alone: bool = False
    settings: Callable[[rdb.Buffer, int], Mapping[str, object]] = lambda _, __: {}


def parts(bench: Bench) -> list[Part]:
    """Return the parts. Their order matters: the last ones change the buffers."""
    rounds, few = bench.options.rounds, bench.options.long_rounds
    targets = {100_000: {"sqlite": 300.0, "postgresql": 1000.0}[bench.engine]}
    return [
        Part(calls.DRAWS, rounds, ratio_target=2.0),
        Part(calls.RARE_DRAWS, few),
        Part(calls.INDEXED_DRAWS, few, settings=_indexed),
        Part(calls.LEASES, rounds, settings=_not_indexed),
        Part(calls.PUTS, rounds),
        Part(calls.PUTS_AT_CAPACITY, rounds, settings=_full),
        Part(calls.ADVANCES, few, targets=targets, alone=True, settings=_without_limits),
        Part(calls.EXPIRIES, few, targets=targets, alone=True, settings=_expiring),
    ]


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure milliseconds of every call and size, and the ratio of the largest to the smallest."""
    async with AsyncExitStack() as stack:
        buffers: dict[int, rdb.Buffer] = {}
        for rows in bench.options.rows:
            url = await bench.database()
            await fill(url, rows, bench.report)
            store = await stack.enter_async_context(rdb.Store.open(url))
            buffers[rows] = await store.buffer("bench")
        gc.collect()
        for part in parts(bench):
            for buffer in buffers.values():
                stored = await buffer.count(statuses=[rdb.GroupStatus.COMPLETED])
                await buffer.update_settings(**part.settings(buffer, stored))
            for result in await _measure(bench, part, buffers):
                yield result


async def _measure(bench: Bench, part: Part, buffers: Mapping[int, rdb.Buffer]) -> list[Result]:
    works = {
        (name, rows): partial(call, buffer)
        for name, call in part.calls.items()
        for rows, buffer in buffers.items()
    }
    what = next(iter(part.calls))
    timings = Timings()
    for heat in [[key] for key in works] if part.alone else [list(works)]:
        # Rewriting millions of rows once is enough.
        once = part.alone and heat[0][1] > 10**6
        timings |= await bench.race(
            what,
            {key: works[key] for key in heat},
            1 if once else part.rounds,
            warm_up=0 if once else min(3, part.rounds // 2),
        )
    results = []
    smallest, largest = min(buffers), max(buffers)
    for name in part.calls:
        for rows in buffers:
            milliseconds = 1e3 * timings.median((name, rows))
            target = (part.targets or {}).get(rows)
            what = f"{name}, {rows:,} groups"
            results.append(bench.result(what, milliseconds, "ms", target, call=name, rows=rows))
        if largest > smallest:
            ratio = timings.median((name, largest)) / timings.median((name, smallest))
            what = f"{name}, {largest:,} / {smallest:,} groups"
            results.append(
                bench.result(what, ratio, "x", part.ratio_target, call=name, rows="ratio")
            )
    return results


def _full(_: rdb.Buffer, stored: int) -> Mapping[str, object]:
    return {"capacity": rdb.Capacity(groups=stored)}


def _indexed(_: rdb.Buffer, __: int) -> Mapping[str, object]:
    return {"indexed_tags": ["level"]}


def _not_indexed(_: rdb.Buffer, __: int) -> Mapping[str, object]:
    return {"indexed_tags": ()}


def _without_limits(_: rdb.Buffer, __: int) -> Mapping[str, object]:
    return {"capacity": None}


def _expiring(buffer: rdb.Buffer, _: int) -> Mapping[str, object]:
    """Let the groups of one version of fifty expire at each advance of the policy version."""
    return {"max_staleness": buffer.policy_version}
