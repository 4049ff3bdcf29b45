"""Context of a benchmark: engine, sizes, databases and progress reports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.databases import Databases
from benchmarks.options import Options
from benchmarks.results import Result, TimedWork, Timings, Work, race, timed


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark on one engine.

    Attributes:
        name: Name of the benchmark.
        engine: "sqlite" or "postgresql"; empty if the benchmark needs no database.
        options: Sizes.
        databases: Creates databases.
        report: Called with a description of the current step.
    """

    name: str
    engine: str
    options: Options
    databases: Databases
    report: Callable[[str], None] = lambda _: None

    async def database(self) -> str:
        """Create a database with all tables and no rows. Return its URL."""
        return await self.databases.make(self.engine)

    async def race(
        self, what: str, works: Mapping[Any, TimedWork], rounds: int, *, warm_up: int = 1
    ) -> Timings:
        """Time all works in every round: see `benchmarks.results.race`."""
        return await race(
            works, rounds, warm_up=warm_up, report=lambda step: self.report(f"{what}: {step}")
        )

    async def times(
        self, what: str, works: Mapping[Any, Work], rounds: int, *, warm_up: int = 1
    ) -> Timings:
        """As `race`, for works whose whole duration counts."""
        return await self.race(what, timed(works), rounds, warm_up=warm_up)

    def result(
        self,
        what: str,
        value: float,
        unit: str,
        target: float | None = None,
        *,
        more_is_better: bool = False,
        **facts: Any,
    ) -> Result:
        """Return a result of this benchmark; arguments as the attributes of `Result`."""
        return Result(self.name, self.engine, what, value, unit, target, more_is_better, facts)


#: Yields results as soon as they are known, so that an interrupted run has the earlier ones.
Benchmark = Callable[[Bench], AsyncIterator[Result]]
