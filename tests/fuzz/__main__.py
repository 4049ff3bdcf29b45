"""Check mutations of the corpus, each target in a process of its own: `make fuzz`.

PYTHONPATH=tests python -m fuzz [--seconds 60] [--seed N] [TARGET ...]
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fuzz.mutations import mutants
from fuzz.targets import TARGETS

#: Seconds after which a check counts as endless.
PATIENCE_SECONDS = 60
#: Address space that the checks of a target may add to that of its process.
MEMORY_BYTES = 4 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each target")
    parser.add_argument("--seed", type=int, help="seed of an earlier run to repeat")
    parser.add_argument("--here", action="store_true", help="check in this process")
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    seed = random.randrange(10**6) if options.seed is None else options.seed
    names = options.targets or list(TARGETS)
    if options.here:
        for name in names:
            run(name, seed, options.seconds)
    else:
        sys.exit(any([not passes(name, seed, options.seconds) for name in names]))


def passes(name: str, seed: int, seconds: float) -> bool:
    """Run a target in another process, which a check may end. Report the input of a failure."""
    options = "--here", "--seed", f"{seed}", "--seconds", f"{seconds}"
    command = [sys.executable, "-W", "error", "-m", "fuzz", name, *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    is_passed = subprocess.run(command, env=environment).returncode == 0
    if not is_passed:
        print(f"{name} failed, seed {seed}: move {last_input(name)} to tests/fuzz/corpus/{name}")
    return is_passed


def run(name: str, seed: int, seconds: float) -> None:
    """Check mutants for some time."""
    logging.getLogger("replaydb").setLevel(logging.ERROR)  # warnings are expected
    number, end = 0, time.monotonic() + seconds
    with TARGETS[name]() as check:
        _limit_memory()
        for data in mutants(name, seed):
            last_input(name).write_bytes(data)
            faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
            check(data)
            faulthandler.cancel_dump_traceback_later()
            number += 1
            if time.monotonic() > end:
                break
    last_input(name).unlink()
    print(f"{name}: {number} inputs, seed {seed}", flush=True)


def last_input(name: str) -> Path:
    return Path(tempfile.gettempdir(), f"replaydb-fuzz-{name}")


def _limit_memory() -> None:
    """Limit the address space, which Linux reports in pages."""
    known = Path("/proc/self/statm")
    if known.exists():
        used = int(known.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
