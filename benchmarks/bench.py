"""What every benchmark is handed: where to measure, how long, and whom to tell."""

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
        name: Of the benchmark.
        engine: "sqlite" or "postgresql"; empty for what needs none.
        options: Sizes.
        databases: Where databases come from.
        say: Called with what is being done.
    """

    name: str
    engine: str
    options: Options
    databases: Databases
    say: Callable[[str], None] = lambda _: None

    async def database(self) -> str:
        """URL of a new database with all tables and no rows."""
        return await self.databases.make(self.engine)

    async def race(
        self, what: str, works: Mapping[Any, TimedWork], rounds: int, *, warm_up: int = 1
    ) -> Timings:
        """All works in every round; see `benchmarks.results.race`."""
        return await race(
            works, rounds, warm_up=warm_up, say=lambda progress: self.say(f"{what}: {progress}")
        )

    async def times(
        self, what: str, works: Mapping[Any, Work], rounds: int, *, warm_up: int = 1
    ) -> Timings:
        """The same for works all of which counts."""
        return await self.race(what, timed(works), rounds, warm_up=warm_up)

    def result(
        self,
        what: str,
        value: float,
        unit: str,
        bar: float | None = None,
        *,
        more_is_better: bool = False,
        **facts: Any,
    ) -> Result:
        """A number of this benchmark."""
        return Result(self.name, self.engine, what, value, unit, bar, more_is_better, facts)


#: Yields results as soon as they are known, so that a run that is cut off has those before.
Benchmark = Callable[[Bench], AsyncIterator[Result]]
