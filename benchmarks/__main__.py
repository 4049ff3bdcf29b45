"""Run benchmarks and show what came of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bench import Bench
from benchmarks.databases import databases
from benchmarks.options import Options
from benchmarks.progress import shown
from benchmarks.registry import BENCHMARKS, WITHOUT_ENGINE
from benchmarks.results import ITSELF, Result, machine, to_json, to_table

ENGINES = {
    "sqlite": ["sqlite"],
    "postgresql": ["postgresql"],
    "both": ["sqlite", "postgresql"],
}


async def measure(
    names: Sequence[str],
    engines: Sequence[str],
    options: Options,
    results: list[Result],
    facts: dict[str, Any],
) -> None:
    """Add the results of benchmarks on engines, in order, as they come, and what they hang on."""
    for name in names:
        for engine in [""] if name in WITHOUT_ENGINE else engines:
            with shown(f"{name} {engine}".strip()) as say:
                async with databases() as made:
                    start = time.perf_counter()
                    bench = Bench(name, engine, options, made, say)
                    async for one in BENCHMARKS[name](bench):
                        results.append(one)
                    results.append(bench.result(ITSELF, time.perf_counter() - start, "s"))
                    facts |= made.facts


def main() -> None:
    """Parse arguments, measure, print; an interrupt ends the measuring only."""
    arguments = _arguments()
    options = Options(rows=tuple(arguments.rows), rounds=arguments.rounds)
    names = arguments.names or list(BENCHMARKS)
    facts, results = machine(), list[Result]()
    try:
        asyncio.run(measure(names, ENGINES[arguments.database], options, results, facts))
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted: these are the results so far")
    finally:
        if arguments.json is not None:
            content = json.dumps(to_json(results, facts), indent=2)
            arguments.json.write_text(content + "\n", encoding="utf8")
        Console(width=None if Console().is_terminal else 130).print(to_table(results, facts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=Options().rows, help="for scale")
    parser.add_argument("--rounds", type=int, default=Options().rounds)
    parser.add_argument("--database", choices=ENGINES, default="both")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark: {', '.join(sorted(unknown))}")
    return arguments


if __name__ == "__main__":
    main()
