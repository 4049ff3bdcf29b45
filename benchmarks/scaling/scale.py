"""How calls become slower as a buffer grows: the same call on buffers of several sizes.

Buffers have four tasks; where a call is for one task, that has seven tenths of the groups.
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
    """Calls that are timed together, round after round, on buffers of all sizes.

    Attributes:
        calls: By name; each says how many seconds it took.
        rounds: How many count.
        ratio_bar: How many times as long they may take in the largest as in the smallest buffer.
        bars: Milliseconds they may take, by groups in the buffer.
        alone: Whether one buffer has to be done before the next begins: each call writes so much
            that the engine still has to do with it later.
        settings: What is changed beforehand in a buffer that holds so many groups.
    """

    calls: Calls
    rounds: int
    ratio_bar: float | None = None
    bars: Mapping[int, float] | None = None
    alone: bool = False
    settings: Callable[[rdb.Buffer, int], Mapping[str, object]] = lambda _, __: {}


def parts(bench: Bench) -> list[Part]:
    """In this order: the last ones leave other buffers behind."""
    rounds, few = bench.options.rounds, bench.options.long_rounds
    bars = {100_000: {"sqlite": 300.0, "postgresql": 1000.0}[bench.engine]}
    return [
        Part(calls.DRAWS, rounds, ratio_bar=2.0),
        Part(calls.RARE_DRAWS, few),
        Part(calls.INDEXED_DRAWS, few, settings=_indexed),
        Part(calls.LEASES, rounds, settings=_not_indexed),
        Part(calls.PUTS, rounds),
        Part(calls.PUTS_AT_CAPACITY, rounds, settings=_full),
        Part(calls.ADVANCES, few, bars=bars, alone=True, settings=_without_limits),
        Part(calls.EXPIRIES, few, bars=bars, alone=True, settings=_expiring),
    ]


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Milliseconds of every call and size; then the ratio of the largest to the smallest."""
    async with AsyncExitStack() as stack:
        buffers: dict[int, rdb.Buffer] = {}
        for rows in bench.options.rows:
            url = await bench.database()
            await fill(url, rows, bench.say)
            store = await stack.enter_async_context(rdb.Store.open(url))
            buffers[rows] = await store.buffer("bench")
        gc.collect()
        for part in parts(bench):
            for buffer in buffers.values():
                held = await buffer.count(statuses=[rdb.GroupStatus.COMPLETED])
                await buffer.update_settings(**part.settings(buffer, held))
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
        # Of millions of rows that are all written anew, once is enough.
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
            bar = (part.bars or {}).get(rows)
            what = f"{name}, {rows:,} groups"
            results.append(bench.result(what, milliseconds, "ms", bar, call=name, rows=rows))
        if largest > smallest:
            ratio = timings.median((name, largest)) / timings.median((name, smallest))
            what = f"{name}, {largest:,} / {smallest:,} groups"
            results.append(bench.result(what, ratio, "x", part.ratio_bar, call=name, rows="ratio"))
    return results


def _full(_: rdb.Buffer, held: int) -> Mapping[str, object]:
    return {"capacity": rdb.Capacity(groups=held)}


def _indexed(_: rdb.Buffer, __: int) -> Mapping[str, object]:
    return {"indexed_tags": ["level"]}


def _not_indexed(_: rdb.Buffer, __: int) -> Mapping[str, object]:
    return {"indexed_tags": ()}


def _without_limits(_: rdb.Buffer, __: int) -> Mapping[str, object]:
    return {"capacity": None}


def _expiring(buffer: rdb.Buffer, _: int) -> Mapping[str, object]:
    """From now on the groups of one version, of fifty, expire when the policy advances."""
    return {"max_staleness": buffer.policy_version}
