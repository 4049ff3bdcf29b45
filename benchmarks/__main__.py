"""Run benchmarks and show what came of them."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console

from benchmarks import advance, loop, opening, put, sample, scale
from benchmarks.databases import Databases, databases
from benchmarks.options import Options
from benchmarks.results import Result, to_json, to_table

Benchmark = Callable[[Databases, str, Options], Awaitable[list[Result]]]
BENCHMARKS: dict[str, Benchmark] = {
    "put": put.run,
    "sample": sample.run,
    "loop": loop.run,
    "advance": advance.run,
    "open": opening.run,
    "scale": scale.run,
}
ENGINES = {
    "sqlite": ["sqlite"],
    "postgresql": ["postgresql"],
    "both": ["sqlite", "postgresql"],
}


async def measure(names: list[str], engines: list[str], options: Options) -> list[Result]:
    """Results of benchmarks on engines, in order."""
    results: list[Result] = []
    for name in names:
        for engine in engines:
            async with databases() as made:
                results += await BENCHMARKS[name](made, engine, options)
    return results


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=Options().rows, help="for scale")
    parser.add_argument("--rounds", type=int, default=Options().rounds)
    parser.add_argument("--database", choices=ENGINES, default="both")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark: {', '.join(sorted(unknown))}")
    names = arguments.names or list(BENCHMARKS)
    options = Options(rows=tuple(arguments.rows), rounds=arguments.rounds)
    results = asyncio.run(measure(names, ENGINES[arguments.database], options))
    Console(width=None if Console().is_terminal else 130).print(to_table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(results), indent=2), encoding="utf8")


if __name__ == "__main__":
    main()
