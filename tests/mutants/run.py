"""Execution of mutants in two processes, each with its own copy of the checkout."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import psutil
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome, WorkItem, WorkResult

from mutants import examples
from mutants.suites import Suite, suite_of
from support.postgres import SERVER_VARIABLE, running_server

CHECKOUT = Path(__file__).resolve().parents[2]
PROCESSES = 2
LONGEST_SUITE = 900.0
#: Attempts to run a suite without a mutant: on a busy machine a test may exceed a time limit.
_TRIES = 3
_NOT_COPIED = shutil.ignore_patterns(".*", "site", "dist")
_PYTEST = (
    *("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
    *("-p", examples.__name__, f"--hypothesis-profile={examples.PROFILE}"),
)


@contextmanager
def copies() -> Iterator[ProcessPoolExecutor]:
    """Start processes, each with a copy of the checkout and a PostgreSQL server.

    They are killed if the block is interrupted. The servers are started here, since a server that a
    test starts would keep running when the test is killed after a timeout.
    """
    context = multiprocessing.get_context("spawn")
    environments: SimpleQueue[tuple[Path, str]] = context.SimpleQueue()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="replaydb-mutants-"))
        for number in range(PROCESSES):
            root = shutil.copytree(CHECKOUT, Path(folder, str(number)), ignore=_NOT_COPIED)
            environments.put((root, stack.enter_context(running_server()).url))
        pool = stack.enter_context(ProcessPoolExecutor(PROCESSES, context, _enter, (environments,)))
        try:
            yield pool
        except BaseException:
            # Tests run in their own sessions, so neither Ctrl-C nor the end of a worker stops them.
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in map(psutil.Process, (one.pid for one in context.active_children())):
                for process in worker, *worker.children(recursive=True):
                    process.kill()
            raise


def unmutated(suites: Iterable[Suite], pool: ProcessPoolExecutor) -> Iterator[tuple[str, float]]:
    """Yield the duration of each suite in seconds without a mutant. All tests must pass."""
    running = [pool.submit(_try_unmutated, suite) for suite in suites]
    for future in as_completed(running):
        yield future.result()


def outcomes(
    mutants: Iterable[WorkItem], seconds: Mapping[str, float], pool: ProcessPoolExecutor
) -> Iterator[tuple[WorkItem, WorkResult]]:
    """Yield the result of each mutant when it is available."""
    running: dict[Future[WorkResult], WorkItem] = {}
    for mutant in mutants:
        suite = suite_of(mutant.mutations[0].module_path)
        running[pool.submit(_try_mutant, mutant, suite, 4 * seconds[suite.name] + 30)] = mutant
    for future in as_completed(running):
        yield running[future], future.result()


def _enter(environments: SimpleQueue[tuple[Path, str]]) -> None:
    """Make one of the copies the current directory, where cosmic-ray writes its mutants."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the parent decides; tests get the default
    root, os.environ[SERVER_VARIABLE] = environments.get()
    os.chdir(root)
    os.environ["PYTHONPATH"] = f"{root / 'src'}{os.pathsep}{root / 'tests'}"


def _try_unmutated(suite: Suite) -> tuple[str, float]:
    for _ in range(_TRIES):
        begun = time.monotonic()
        outcome, output = run_tests(_command(suite), timeout=LONGEST_SUITE)
        if outcome is TestOutcome.SURVIVED:
            return suite.name, time.monotonic() - begun
    raise RuntimeError(f"the tests fail without a mutant: {suite.options}\n{output}")


def _try_mutant(mutant: WorkItem, suite: Suite, timeout: float) -> WorkResult:
    return mutate_and_test(mutant.mutations, _command(suite), timeout)


def _command(suite: Suite) -> str:
    return shlex.join([sys.executable, *_PYTEST, *suite.options])
