"""Run benchmarks and print the results."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.bench import Bench
from benchmarks.databases import databases
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.registry import BENCHMARKS, ONLY_GPU, ONLY_POSTGRESQL, WITHOUT_ENGINE
from benchmarks.results import TOTAL_TIME, Result, machine, to_json, to_table

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
    """Run benchmarks on engines. Append results as they come, and facts about the databases."""
    for name in names:
        if name in ONLY_GPU and not torch.cuda.is_available():
            Console(stderr=True).print(
                f"{name}: not measured, there is no CUDA device", style="red"
            )
            continue
        for engine in [""] if name in WITHOUT_ENGINE else engines:
            if name in ONLY_POSTGRESQL and engine != "postgresql":
                continue
            with progress(f"{name} {engine}".strip()) as report:
                async with databases() as made:
                    start = time.perf_counter()
                    bench = Bench(name, engine, options, made, report)
                    async for one in BENCHMARKS[name](bench):
                        results.append(one)
                    results.append(bench.result(TOTAL_TIME, time.perf_counter() - start, "s"))
                    facts |= made.facts


def main() -> None:
    """Parse arguments, run, print. After an interrupt the results so far are printed."""
    arguments = _arguments()
    options = Options(
        rows=tuple(arguments.rows), rounds=arguments.rounds, seconds=arguments.seconds
    )
    names = arguments.names or list(BENCHMARKS)
    facts, results = machine(), list[Result]()
    try:
        asyncio.run(measure(names, ENGINES[arguments.database], options, results, facts))
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; results so far:")
    finally:
        if arguments.json is not None:
            content = json.dumps(to_json(results, facts), indent=2)
            arguments.json.write_text(content + "\n", encoding="utf8")
        Console(width=None if Console().is_terminal else 130).print(to_table(results, facts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"benchmarks to run (default: all): {', '.join(BENCHMARKS)}"
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=Options().rows,
        help="groups in the buffers of scale; the largest up to 1,000,000 for advance and viewers; "
        "the smallest and largest for growth",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=Options().rounds,
        help="rounds of short measurements (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=Options().seconds,
        help="unit of measurements over a period of time (default: %(default)s)",
    )
    parser.add_argument(
        "--database", choices=ENGINES, default="both", help="engines (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark: {', '.join(sorted(unknown))}")
    return arguments


if __name__ == "__main__":
    main()
