"""Timing that others on the machine disturb as little as possible, and what came of it."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from rich.table import Table

Work = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Result:
    """One number.

    Attributes:
        benchmark: Name of the module.
        database: "sqlite" or "postgresql"; empty where there is none.
        what: What was measured, with its size.
        value: The median.
        unit: "ms", "groups/s", "x" and the like.
        bar: What it is to reach: at most, or at least where more is better; None: no bar.
        more_is_better: Which side of the bar is good.
    """

    benchmark: str
    database: str
    what: str
    value: float
    unit: str
    bar: float | None = None
    more_is_better: bool = False

    @property
    def verdict(self) -> str:
        """ "ok", "missed" or nothing."""
        if self.bar is None:
            return ""
        good = self.value >= self.bar if self.more_is_better else self.value <= self.bar
        return "ok" if good else "missed"


async def medians(works: Mapping[str, Work], rounds: int, *, warm_up: int = 1) -> dict[str, float]:
    """Median seconds of each; all of them in every round, so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_number in range(warm_up + rounds):
        for name, work in works.items():
            start = time.perf_counter()
            await work()
            if round_number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(several) for name, several in seconds.items()}


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{name: version(name) for name in ("sqlalchemy", "aiosqlite", "asyncpg", "numpy")},
    }


def to_table(results: list[Result]) -> Table:
    """For people."""
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    table = Table(title="replaydb", caption=facts)
    for name in ("benchmark", "database", "what"):
        table.add_column(name)
    for name in ("median", "bar"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in results:
        sign = "≥" if one.more_is_better else "≤"
        bar = "" if one.bar is None else f"{sign} {one.bar:g} {one.unit}"
        value = (
            f"{one.value:,.3g} {one.unit}" if one.value < 1000 else f"{one.value:,.0f} {one.unit}"
        )
        style = {"ok": "green", "missed": "red"}.get(one.verdict)
        table.add_row(one.benchmark, one.database, one.what, value, bar, one.verdict, style=style)
    return table


def to_json(results: list[Result]) -> dict[str, Any]:
    """For programs."""
    return {
        "machine": machine(),
        "results": [asdict(one) | {"verdict": one.verdict} for one in results],
    }
