"""Run the demo: `python -m examples.grpo_digits --database sqlite`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

import replaydb as rdb
from examples.grpo_digits import checkpoint
from examples.grpo_digits.child import ChildFailedError
from examples.grpo_digits.database import Database, postgresql_server, sqlite_file
from examples.grpo_digits.display import Display
from examples.grpo_digits.job import MAX_STALENESS, STEP, URL_VARIABLE, checkpoint_path
from examples.grpo_digits.model import Policy
from examples.grpo_digits.report import Evaluation, Outcome, failures, print_report
from examples.grpo_digits.supervisor import group_uids_acknowledged, supervise
from examples.grpo_digits.trainer import new_optimizer

INTRODUCTION = """\
A transformer with 100,000 random parameters learns to sort eight digits by GRPO alone: it sees no
examples, only the rewards of its own completions. Two rollout workers and a trainer, each in its
own process, share one database. Halfway the trainer and a worker are killed with SIGKILL.
"""

STEPS_TO_LEARN = 150
SECONDS_TO_LEARN = 30.0


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    options.directory.mkdir(parents=True, exist_ok=True)
    console = Console()
    try:
        with open_database(options) as database:
            return asyncio.run(demo(options, database, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"Stopped all processes of the demo. Files: {options.directory}")
        return 130
    except (ChildFailedError, rdb.ReplayDBError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo_digits",
        description="A small transformer learns to sort digits by GRPO from a replaydb buffer; "
        "halfway the trainer and a rollout worker are killed with SIGKILL.",
    )
    parser.add_argument(
        "--database",
        choices=["sqlite", "postgresql"],
        default="sqlite",
        help="database engine (default: %(default)s)",
    )
    parser.add_argument(
        "--url",
        help=f"PostgreSQL server to use (default: ${URL_VARIABLE}, else one is started)",
    )
    parser.add_argument(
        "--directory", type=Path, help="folder for files (default: a new temporary folder)"
    )
    parser.add_argument(
        "--steps",
        type=at_least(50),
        default=400,
        help="number of optimizer steps (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=65.0,
        help="limit of the training time in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the initial weights (default: %(default)s)"
    )
    parser.add_argument(
        "--keep-server", action="store_true", help="leave the PostgreSQL server running afterwards"
    )
    options = parser.parse_args()
    if options.url and options.database == "sqlite":
        parser.error("--url requires --database postgresql")
    directory = options.directory or Path(tempfile.mkdtemp(prefix="replaydb-demo-"))
    options.directory = directory.resolve()
    return options


def at_least(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"expected at least {lowest}, got {text}")
        return int(text)

    return parse


def open_database(options: argparse.Namespace) -> AbstractContextManager[Database]:
    if options.database == "sqlite":
        return sqlite_file(options.directory)
    return postgresql_server(options.url, keep_running=options.keep_server)


async def demo(options: argparse.Namespace, database: Database, console: Console) -> int:
    """Train once, then check the content of the database. Return the exit code."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    run = f"digits-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}"
    folder = options.directory / run
    folder.mkdir()
    torch.manual_seed(options.seed)
    policy = Policy()
    before = Evaluation.of(policy)
    console.print(INTRODUCTION, highlight=False, soft_wrap=True)
    async with rdb.Store.open(database.url, run=run, migrate=True) as store:
        buffer = await store.buffer(run, max_staleness=MAX_STALENESS, on_ack="return")
        checkpoint.save(checkpoint_path(folder, 0), policy, new_optimizer(policy))
        await buffer.put([], cursor={STEP: 0})
        with Display(console, options.steps) as display:
            recovered = await supervise(
                buffer, folder, database.url, options.steps, options.seconds, display
            )
        step = await buffer.cursor(STEP)
    checkpoint.load(checkpoint_path(folder, step), policy)
    after = Evaluation.of(policy)
    outcome = await Outcome.of(run, group_uids_acknowledged(folder), database)
    print_report(console, database, run, outcome, before, after)
    wrong = failures(outcome, step, before, after, expect_learning=is_long_enough(options))
    if not recovered:
        wrong.append("the run ended before the trainer was killed and resumed")
    for failure in wrong:
        console.print(f"Failed: {failure}", style="red")
    return 1 if wrong else 0


def is_long_enough(options: argparse.Namespace) -> bool:
    """Return whether the run is long enough to learn; shorter runs only check for lost groups."""
    return bool(options.steps >= STEPS_TO_LEARN and options.seconds >= SECONDS_TO_LEARN)


if __name__ == "__main__":
    sys.exit(main())
