"""Timing that others on the machine disturb as little as possible, and what came of it."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import psutil
from rich.table import Table

#: What the time of a whole benchmark is called.
ITSELF = "the benchmark itself"

Work = Callable[[], Awaitable[object]]
#: Work that knows how many seconds of it count.
TimedWork = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Result:
    """One number.

    Attributes:
        benchmark: Its name.
        database: "sqlite" or "postgresql"; empty where there is none.
        what: What was measured, with its size.
        value: The median.
        unit: "ms", "groups/s", "x" and the like.
        bar: What it is to reach: at most, or at least where more is better; None: no bar.
        more_is_better: Which side of the bar is good.
        facts: What `what` says, for programs: sizes, policies and the like.
    """

    benchmark: str
    database: str
    what: str
    value: float
    unit: str
    bar: float | None = None
    more_is_better: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """ "ok", "missed" or nothing."""
        if self.bar is None:
            return ""
        good = self.value >= self.bar if self.more_is_better else self.value <= self.bar
        return "ok" if good else "missed"


class Timings(dict[Hashable, list[float]]):
    """Seconds of several works, round by round."""

    def median(self, name: Hashable) -> float:
        """Of one work."""
        return statistics.median(self[name])

    def ratio(self, name: Hashable, other: Hashable) -> float:
        """How many times as long one takes as another: the median over the rounds."""
        pairs = zip(self[name], self[other], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


async def seconds(work: Awaitable[object]) -> float:
    """How long something takes; what makes its arguments does not count."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def race(
    works: Mapping[Any, TimedWork],
    rounds: int,
    *,
    warm_up: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Timings:
    """All of them in every round, so that noise hits all alike.

    Each round has an order of its own: who comes after whom matters, for caches and for memory.
    """
    timings = Timings({name: [] for name in works})
    order, chance = list(works), Random(0)
    for number in range(warm_up + rounds):
        say(f"round {number + 1} of {warm_up + rounds}")
        for name in order:
            taken = await works[name]()
            if number >= warm_up:
                timings[name].append(taken)
        chance.shuffle(order)
    return timings


def timed(works: Mapping[Any, Work]) -> dict[Any, TimedWork]:
    """Works all of which counts."""

    async def whole(work: Work) -> float:
        return await seconds(work())

    return {name: partial(whole, work) for name, work in works.items()}


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{
            name: version(name)
            for name in ("sqlalchemy", "aiosqlite", "asyncpg", "numpy", "torch", "replaydb")
        },
    }


def _processor() -> str:
    """Its name, where Linux tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def number(value: float, unit: str) -> str:
    """A value as people write it, three digits."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}"


def bar(one: Result) -> str:
    """What a result is to reach."""
    sign = "≥" if one.more_is_better else "≤"
    return "" if one.bar is None else f"{sign} {one.bar:g} {one.unit}"


def to_table(results: Iterable[Result], facts: Mapping[str, Any] | None = None) -> Table:
    """For people."""
    caption = ", ".join(f"{name} {value}" for name, value in (facts or machine()).items())
    table = Table(title="replaydb", caption=caption)
    for name in ("benchmark", "database", "what"):
        table.add_column(name)
    for name in ("median", "bar"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in results:
        style = {"ok": "green", "missed": "red"}.get(one.verdict)
        value = number(one.value, one.unit)
        table.add_row(
            one.benchmark, one.database, one.what, value, bar(one), one.verdict, style=style
        )
    return table


def to_json(results: Iterable[Result], facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """For programs."""
    return {
        "machine": dict(facts or machine()),
        "results": [asdict(one) | {"verdict": one.verdict} for one in results],
    }


def from_json(content: Mapping[str, Any]) -> list[Result]:
    """What `to_json` was given."""
    return [
        Result(**{name: value for name, value in one.items() if name != "verdict"})
        for one in content["results"]
    ]
