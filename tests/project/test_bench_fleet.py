"""The projection to larger fleets is computed correctly, and the docs have the recorded numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
ARITHMETIC = """
from benchmarks.scaling.projection import (
    Assumptions, connections, cost, groups_per_second, limits, locked, needs, waiting,
    waiting_limit,
)

assumed = Assumptions(gpu_tokens=2000, gpus_per_worker=8, gpus_per_rank=16)
assert groups_per_second(64, 16_000, assumed) == 8
group = cost({"CPU": 0.5, "PUT": 1.0}, {"CPU": 0.25, "GET": 1.0}, draws=1)
assert group == {"CPU": 0.5, "PUT": 1.0}
group = cost({"CPU": 0.5, "PUT": 1.0}, {"CPU": 0.25}, draws=4)
assert group == {"CPU": 1.25, "PUT": 1.0}
assert needs(group, 64, 16_000, assumed) == {"CPU": 10.0, "PUT": 8.0}
assert connections(64, 3.0, 4.0, assumed) == 24 + 16
found = limits(group | {"WAL": 0.0}, {"CPU": 20, "WAL": 1, "other": 1}, 16_000, assumed)
assert found == {"CPU": 128}
assert needs(group, 128, 16_000, assumed)["CPU"] == 20
assert waiting(64, 0.5, 16_000, assumed) == 8 * 4 * 0.5
assert waiting_limit(16, 0.5, 16_000, assumed) == 64
assert waiting(640, 0.5, 16_000, assumed) == 10 * 40 * 0.5  # not 80 times a second
assert waiting_limit(200, 0.5, 16_000, assumed) == 640
assert locked({20.0: 1.0, 60.0: 5.0}, 2.0, 0.25) == 0.45
"""
#: GPUs of 2,500 tokens/s, groups of 10,000 tokens, and so 16 groups/s of 64 GPUs.
TABLES = """
from benchmarks.report.findings import Findings
from benchmarks.report.tables import table
from benchmarks.results import Result
from benchmarks.scaling.fleet import (
    AGAIN, CONNECTIONS, FAR, FOR_RANKS, LEASES, ONCE, PUTS, RATE, SIDES, SLOW, WAIT,
)

findings = Findings()
facts = {"shape": "S", "extras": "none", "payloads": "database", "tokens": 10_000}

def add(load, side, value, unit="", delay=FAR):
    one = Result("fleet", "postgresql", f"{load}, {delay}: {side}", value, unit,
                 facts=facts | {"load": load, "delay": delay, "side": side})
    findings.results[one.benchmark, one.database, one.what] = one

for side, (unit, _) in SIDES.items():
    if not side.startswith("bucket"):
        add(ONCE, side, 10.0, unit)
        add(AGAIN, side, 5.0, unit)
for side in ("workers", "ranks"):
    add(CONNECTIONS, side, 4.0)
add(WAIT, FOR_RANKS, 4.0, "ms")  # of two ranks
for delay, seconds in zip(SLOW, (0.1, 0.3)):  # 5 round trips
    add(PUTS, RATE, 1 / (0.6 * seconds), "groups/s", delay)
    add(LEASES, RATE, 1 / (0.4 * seconds), "groups/s", delay)

lines = table("fleet-needs", findings)
assert len(lines) == 2 + 3, lines
first = [
    "S, in the database", "64", "16", "0.16 / 0.4", "0.16", "160 / 400", "0.16 / 0.4", "0.32 / 0.8",
    "", "", "64",
]
assert lines[2] == f"| {' | '.join(first)} |", lines[2]
lines = table("fleet-limits", findings)
lock, cores, *_, waiting, connections = lines[2:]
assert lock == "| the lock of one task | **270** |", lock
assert cores == "| 32 cores | 13,000 |", cores
assert waiting == "| 32 cores for waiting ranks | 13,000 |", waiting
assert connections == "| 1,000 connections | 1,000 |", connections
assert sum("**" in line for line in lines) == 1, lines
assert any(line == "| database: CPU | 10 ms |" for line in table("fleet", findings))
"""
RECORDED = """
from pathlib import Path

from benchmarks.report.__main__ import filled
from benchmarks.report.findings import Findings

findings = Findings.load([Path("docs/measurements/fleet.json")])
findings.machine.clear()  # the page names another machine for its other tables
for page, names in (("benchmarks", ["fleet"]), ("deployment", ["fleet-needs", "fleet-limits"])):
    text = Path(f"docs/{page}.md").read_text(encoding="utf8")
    assert all(f"<!-- results: {name} -->" in text for name in names), page
    assert filled(text, findings) == text, f"docs/{page}.md is not up to date"
"""


@pytest.mark.parametrize("code", [ARITHMETIC, TABLES, RECORDED], ids=["sums", "tables", "docs"])
def test_projection(code: str) -> None:
    path = os.pathsep.join([str(CHECKOUT), *sys.path])  # tests cannot import `benchmarks`
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, env=environment, check=True)
