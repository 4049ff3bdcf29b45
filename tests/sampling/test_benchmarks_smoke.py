"""Every benchmark still runs, on sizes too small to mean anything."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TINY = """
import asyncio, sys
from benchmarks.__main__ import BENCHMARKS, measure
from benchmarks.options import Options
from benchmarks.results import to_json, to_table

options = Options(rows=(200, 400), live_rows=300, groups=64, file_rows=50, rounds=1)
results = asyncio.run(measure(sys.argv[2:], [sys.argv[1]], options))
assert results and all(one.value > 0 for one in results), results
assert to_table(results).row_count == len(to_json(results)["results"])
print(len(results))
"""


@pytest.fixture
def environment(engine_name: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """That of a checkout's own shell; PostgreSQL need not be started again."""
    own = {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
    if engine_name == "postgresql":
        own["REPLAYDB_URL"] = request.getfixturevalue("postgresql_url")
    return os.environ | own


async def test_benchmarks_run(engine_name: str, environment: dict[str, str]) -> None:
    """In a process of their own: `benchmarks` is no part of what tests can import."""
    names = ["put", "sample", "loop", "advance", "open", "scale"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TINY, engine_name, *names),
        stdout=subprocess.PIPE,
        cwd=CHECKOUT,
        env=environment,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert int(output) > 25
