"""Results of benchmarks, and timing in interleaved rounds to reduce the effect of noise."""

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

#: Label of the duration of a whole benchmark.
TOTAL_TIME = "total time of the benchmark"

Work = Callable[[], Awaitable[object]]
#: Work that returns how many seconds of it count.
TimedWork = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Result:
    """One measured value.

    Attributes:
        benchmark: Name of the benchmark.
        database: "sqlite" or "postgresql"; empty without a database.
        what: Description of the measurement, with its size.
        value: The value, usually a median.
        unit: "ms", "groups/s", "x" and the like.
        target: Maximum that the value should have, or minimum if more is better; None: no target.
        more_is_better: Whether higher values are better.
        facts: Parts of the description, for programs: sizes, sampling strategies and the like.
    """

    benchmark: str
    database: str
    what: str
    value: float
    unit: str
    target: float | None = None
    more_is_better: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """ "ok" or "missed", or "" without a target."""
        if self.target is None:
            return ""
        good = self.value >= self.target if self.more_is_better else self.value <= self.target
        return "ok" if good else "missed"


class Timings(dict[Hashable, list[float]]):
    """Seconds of several works by name, one value per round."""

    def median(self, name: Hashable) -> float:
        """Return the median of one work."""
        return statistics.median(self[name])

    def ratio(self, name: Hashable, other: Hashable) -> float:
        """Return the median over all rounds of the time of one work divided by another's."""
        pairs = zip(self[name], self[other], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


async def seconds(work: Awaitable[object]) -> float:
    """Return how long an awaitable takes, without the evaluation of its arguments."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def race(
    works: Mapping[Any, TimedWork],
    rounds: int,
    *,
    warm_up: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> Timings:
    """Time all works in every round, so that noise affects all of them alike.

    The order is shuffled in each round, since a work affects caches and memory of the next one.
    """
    timings = Timings({name: [] for name in works})
    order, chance = list(works), Random(0)
    for number in range(warm_up + rounds):
        report(f"round {number + 1} of {warm_up + rounds}")
        for name in order:
            taken = await works[name]()
            if number >= warm_up:
                timings[name].append(taken)
        chance.shuffle(order)
    return timings


def timed(works: Mapping[Any, Work]) -> dict[Any, TimedWork]:
    """Wrap works so that their whole duration counts."""

    async def run(work: Work) -> float:
        return await seconds(work())

    return {name: partial(run, work) for name, work in works.items()}


def machine() -> dict[str, Any]:
    """Return facts about the machine and the versions that results depend on."""
    return {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        **_gpu(),
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


def _gpu() -> dict[str, str]:
    """Return the name of the GPU, if there is one."""
    import torch

    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def number(value: float, unit: str) -> str:
    """Format a value with three significant digits."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}"


def target(one: Result) -> str:
    """Format the target of a result."""
    sign = "≥" if one.more_is_better else "≤"
    return "" if one.target is None else f"{sign} {one.target:g} {one.unit}"


def to_table(results: Iterable[Result], facts: Mapping[str, Any] | None = None) -> Table:
    """Format results as a table for the terminal."""
    caption = ", ".join(f"{name} {value}" for name, value in (facts or machine()).items())
    table = Table(title="replaydb", caption=caption)
    for name in ("benchmark", "database", "what"):
        table.add_column(name)
    for name in ("median", "target"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in results:
        style = {"ok": "green", "missed": "red"}.get(one.verdict)
        value = number(one.value, one.unit)
        table.add_row(
            one.benchmark, one.database, one.what, value, target(one), one.verdict, style=style
        )
    return table


def to_json(results: Iterable[Result], facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Convert results to JSON values."""
    return {
        "machine": dict(facts or machine()),
        "results": [asdict(one) | {"verdict": one.verdict} for one in results],
    }


def from_json(content: Mapping[str, Any]) -> list[Result]:
    """Restore the results from the output of `to_json`."""
    return [
        Result(**{name: value for name, value in one.items() if name != "verdict"})
        for one in content["results"]
    ]
