"""Mutation tests: report small changes of the code that no test detects (`make mutants`).

    PYTHONPATH=tests python -m mutants [--number 300] [--seed 1] [--only PATH] [MUTANT ...]

Results are stored in `.mutants/session.db`. Run the command again to resume an interrupted run. The
file is a session of cosmic-ray, so its report tools work, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkItem, WorkResult
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from mutants.generate import PACKAGE, mutants_of, sample, source_files
from mutants.run import CHECKOUT, copies, outcomes, unmutated
from mutants.suites import suite_of

Results = dict[str, WorkResult]
OUTCOMES = "killed", "timed out", "survived", "incompetent"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mutants", nargs="*", metavar="MUTANT", help="run only these, again")
    parser.add_argument("--number", type=int, default=300, help="size of the sample")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument(
        "--only",
        type=Path,
        action="append",
        metavar="PATH",
        help="sample this file or folder",
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    parser.add_argument("--results", type=Path, default=CHECKOUT / ".mutants", metavar="FOLDER")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder: Path = options.results.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    timings = folder / "suites.json"
    os.chdir(CHECKOUT)
    console = Console()
    only = options.only or [PACKAGE]
    paths = [path for path in source_files() if any(path.is_relative_to(one) for one in only)]
    chosen = (
        [one for path in paths for one in mutants_of(path) if one.job_id in options.mutants]
        if options.mutants
        else sample(paths, options.number, options.seed)
    )
    if len(chosen) < max(1, len(options.mutants)):
        parser.error("there is no such mutant or file")
    with use_db(folder / "session.db") as session:
        if options.fresh:
            session.clear()
            timings.unlink(missing_ok=True)
        results: Results = dict(session.results)
        if options.list:
            for one in chosen:
                result = results.get(one.job_id)
                outcome = _outcome(result) if result else "not run"
                console.print(_title(one), outcome, highlight=False, soft_wrap=True)
            return
        known = {item.job_id for item in session.work_items}
        session.add_work_items(one for one in chosen if one.job_id not in known)
        pending = [one for one in chosen if options.mutants or one.job_id not in results]
        try:
            _run(pending, session, results, timings, console)
        except KeyboardInterrupt:
            console.print("Interrupted. Run it again to resume.")
    done = [(one, results[one.job_id]) for one in chosen if one.job_id in results]
    survivors = folder / "survivors.diff"
    survivors.write_text("".join(_diff(*one) for one in done if one[1].test_outcome == "survived"))
    console.print(_table(done))
    console.print(f"{len(done)} of {len(chosen)} mutants were run. Survivors: {survivors}")
    sys.exit(len(done) < len(chosen))


def _run(
    pending: list[WorkItem], session: WorkDB, results: Results, timings: Path, console: Console
) -> None:
    """Run the mutants and store each result immediately."""
    if not pending:
        return
    seconds: dict[str, float] = json.loads(timings.read_text()) if timings.exists() else {}
    suites = [suite_of(one.mutations[0].module_path) for one in pending]
    untimed = {suite.name: suite for suite in suites if suite.name not in seconds}
    columns = *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn()
    with (
        copies() as pool,
        Progress(*columns, TimeRemainingColumn(), console=console) as progress,
    ):
        timed = unmutated(untimed.values(), pool)
        for name, took in progress.track(timed, len(untimed), description="Suites"):
            seconds[name] = took
            timings.write_text(json.dumps(seconds))
        tried = outcomes(pending, seconds, pool)
        for mutant, result in progress.track(tried, len(pending), description="Mutants"):
            session.set_result(mutant.job_id, result)
            results[mutant.job_id] = result
            if _outcome(result) != "killed":
                console.print(_title(mutant), _outcome(result), highlight=False, soft_wrap=True)


def _outcome(result: WorkResult) -> str:
    """Return one of `OUTCOMES`; cosmic-ray counts a timeout as killed."""
    if result.output == "timeout":
        return "timed out"
    return str(result.test_outcome.value) if result.test_outcome else "incompetent"


def _title(mutant: WorkItem) -> str:
    (spec,) = mutant.mutations
    operator = spec.operator_name.partition("/")[2]
    return f"{mutant.job_id} {spec.module_path}:{spec.start_pos[0]} {operator}"


def _diff(mutant: WorkItem, result: WorkResult) -> str:
    """Return the change as a patch for `git apply`, after a line with the name of the mutant."""
    assert result.diff is not None
    return f"{_title(mutant)}\n{result.diff.partition(chr(10))[2]}\n\n"


def _table(done: list[tuple[WorkItem, WorkResult]]) -> Table:
    """Return a table of the outcomes of each folder, and in total."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, result in done:
        folder = mutant.mutations[0].module_path.parent.relative_to(PACKAGE)
        for name in folder.as_posix(), "all":
            counts[name][_outcome(result)] += 1
    table = Table(Column("folder", no_wrap=True), "mutants", *OUTCOMES, "detected")
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        count = counts[name]
        detected = 1 - count["survived"] / count.total()
        cells = count.total(), *(count[outcome] for outcome in OUTCOMES), f"{detected:.0%}"
        table.add_row(name, *map(str, cells))
    return table


if __name__ == "__main__":
    main()
