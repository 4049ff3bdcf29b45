"""Run the fault injection attacks: `make torture`.

PYTHONPATH=tests python -m torture [--seconds 870] [--seed N] [--record] [ATTACK ...]
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from support.postgres import running_server
from torture.attacks import ATTACKS, promise_of
from torture.record import record
from torture.run import AttackResult, run, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=870.0, help="total time")
    parser.add_argument("--seed", type=int, help="seed of an earlier run to repeat")
    parser.add_argument(
        "--record", action="store_true", help="write the figures to docs/reliability.md"
    )
    options = parser.parse_args()
    if unknown := set(options.attacks) - ATTACKS.keys():
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    logging.getLogger("replaydb").setLevel(logging.ERROR)  # warnings are expected
    console = Console()
    console.print(f"seed {seed}: repeat with --seed {seed}")
    results = targets(options.attacks)
    try:
        _run(results, console, seed, options.seconds)
    except KeyboardInterrupt:
        console.print("interrupted: these results are incomplete")
    console.print(_table(results))
    for one in results:
        for problem in one.broken[:3]:
            console.rule(f"{one.name}, {one.engine}: {promise_of(ATTACKS[one.name])}")
            console.print(problem, markup=False, highlight=False)
    if options.record:
        record(results, seed)
    sys.exit(any(one.broken for one in results))


def _run(results: list[AttackResult], console: Console, seed: int, seconds: float) -> None:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        running_server() as server,
        tempfile.TemporaryDirectory(prefix="replaydb-torture-") as folder,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        line = progress.add_task("")

        def show(result: AttackResult) -> None:
            at = f"{results.index(result) + 1}/{len(results)}"
            description = f"{at} {result.name}, {result.engine}: round {result.rounds + 1}"
            broken = f", broken {len(result.broken)}" if result.broken else ""
            progress.update(line, description=description + broken)

        run(results, server.url, Path(folder), seed=seed, seconds=seconds, on_round=show)


def _table(results: list[AttackResult]) -> Table:
    table = Table("attack", "engine", "rounds", "broken", "what was done")
    for one in results:
        done = ", ".join(f"{count:,} {what}" for what, count in one.figures.most_common())
        style = "red" if one.broken else None
        row = one.name, one.engine, str(one.rounds), str(len(one.broken)), done
        table.add_row(*row, style=style)
    return table


if __name__ == "__main__":
    main()
