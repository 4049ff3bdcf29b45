"""Attack every promise: `make torture`.

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
from torture.run import Verdict, run, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=870.0, help="for everything together")
    parser.add_argument("--seed", type=int, help="repeat the choices of an earlier run")
    parser.add_argument("--record", action="store_true", help="into docs/reliability.md")
    options = parser.parse_args()
    if unknown := set(options.attacks) - ATTACKS.keys():
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    logging.getLogger("replaydb").setLevel(logging.ERROR)  # losses and retries are meant
    console = Console()
    console.print(f"seed {seed}: repeat with --seed {seed}")
    verdicts = targets(options.attacks)
    try:
        _run(verdicts, console, seed, options.seconds)
    except KeyboardInterrupt:
        console.print("interrupted: this is what is known so far")
    console.print(_table(verdicts))
    for one in verdicts:
        for problem in one.broken[:3]:
            console.rule(f"{one.name}, {one.engine}: {promise_of(ATTACKS[one.name])}")
            console.print(problem, markup=False, highlight=False)
    if options.record:
        record(verdicts, seed)
    sys.exit(any(one.broken for one in verdicts))


def _run(verdicts: list[Verdict], console: Console, seed: int, seconds: float) -> None:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        running_server() as server,
        tempfile.TemporaryDirectory(prefix="replaydb-torture-") as folder,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        line = progress.add_task("")

        def tell(verdict: Verdict) -> None:
            at = f"{verdicts.index(verdict) + 1}/{len(verdicts)}"
            what = f"{at} {verdict.name}, {verdict.engine}: round {verdict.rounds + 1}"
            bad = f", broken {len(verdict.broken)}" if verdict.broken else ""
            progress.update(line, description=what + bad)

        run(verdicts, server.url, Path(folder), seed=seed, seconds=seconds, tell=tell)


def _table(verdicts: list[Verdict]) -> Table:
    table = Table("attack", "engine", "rounds", "broken", "what was done")
    for one in verdicts:
        done = ", ".join(f"{count:,} {what}" for what, count in one.figures.most_common())
        style = "red" if one.broken else None
        row = one.name, one.engine, str(one.rounds), str(len(one.broken)), done
        table.add_row(*row, style=style)
    return table


if __name__ == "__main__":
    main()
