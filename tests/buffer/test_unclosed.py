"""A script that does not close its store ends with its own error and exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import replaydb as rdb
from replaydb import blocking
from support.groups import groups

store = blocking.Store.open(sys.argv[1], run="crashing")
buffer = store.buffer("math")
buffer.put(groups(8))
loader = buffer.loader(2, prefetch=2)
next(loader)
lease = buffer.lease(1, ttl=600)
print(buffer.count(), flush=True)
"""
ENDINGS = {
    "raise ValueError('the trainer crashed')": (1, "ValueError: the trainer crashed"),
    "sys.exit(7)": (7, ""),
    "pass": (0, ""),
}


@pytest.mark.parametrize(
    ("engine_name", "ending"),
    [
        *(("sqlite", ending) for ending in ENDINGS),
        *(
            pytest.param("postgresql", ending, marks=() if code == 1 else pytest.mark.nightly)
            for ending, (code, _) in ENDINGS.items()
        ),
    ],
)
def test_the_script_ends(url: str, ending: str) -> None:
    code, message = ENDINGS[ending]
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + ending, url],
        capture_output=True,
        text=True,
        timeout=120,  # of a script that hangs
        check=False,
        env={"PYTHONPATH": ":".join([tests, *sys.path]), "PATH": "/usr/bin:/bin"},
    )
    assert (done.stdout, done.returncode) == ("8\n", code)
    lines = done.stderr.splitlines()
    assert (lines[-1] if lines else "") == message
    for noise in ("never retrieved", "was destroyed", "ResourceWarning"):
        assert noise not in done.stderr
