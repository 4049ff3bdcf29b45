"""The comparison with other stores runs, for stores that need no separate environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PEERS = CHECKOUT / "benchmarks" / "peers"
HERE = ("list", "replaydb-sqlite", "replaydb-sqlite-files", "replaydb-postgresql")
SIZES = ("72 KB", "590 KB")
PIN = re.compile(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+")
#: Check the tables of the report.
REPORT = """
import sys
from pathlib import Path
from dataclasses import replace

from benchmarks.report.findings import Findings
from benchmarks.report.tables import table

findings = Findings.load([Path(sys.argv[1])])
slower = [replace(one, peer="dm-reverb", value=4 * (one.value or 0)) for one in findings.peers
          if one.peer == "replaydb-sqlite"]
findings.peers.extend(slower)
lines = table("peer-targets", findings)
for row in ("sample, time: replaydb-sqlite / dm-reverb | 0.25 x ✓",
            "puts of 50, groups/s: replaydb-sqlite / dm-reverb | 0.25 x ✗"):
    assert any(line.startswith(f"| {row} |") for line in lines), lines

lines = table("peers", Findings.load([Path(sys.argv[1])]))
sizes = sys.argv[2].split(",")
assert all(f"Groups of {size}:" in lines for size in sizes[1:]), lines
for name in sys.argv[3:]:
    assert sum(line.startswith(f"| {name} | ") for line in lines) == 1 + len(sizes), lines
"""
#: Check that the tables in the docs are those of the recorded measurements.
RECORDED = """
from pathlib import Path

from benchmarks.report.__main__ import filled
from benchmarks.report.findings import Findings

measured = Path("docs/measurements/peers.json")
findings = Findings.load([measured])
for page in (Path("README.md"), Path("docs/benchmarks.md")):
    text = page.read_text(encoding="utf8")
    assert filled(text, findings) == text, (
        f"{page} is not up to date: python -m benchmarks.report {measured}"
    )
readme = Path("README.md").read_text(encoding="utf8")
assert readme.partition("<!-- results: relative-to-reverb -->")[2].count(" x |") >= 18
"""


def test_pages_have_the_recorded_factors() -> None:
    subprocess.run([sys.executable, "-c", RECORDED], check=True, cwd=CHECKOUT)


@pytest.mark.nightly
def test_the_comparison_runs(tmp_path: Path) -> None:
    """With tiny sizes. It compares the drawn groups with those that were put."""
    written = tmp_path / "findings.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--peers", *HERE]
    command += ["--groups", "100", "--sizes", *SIZES, "--rounds", "1"]
    command += ["--json", str(written)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
    subprocess.run(command, check=True, cwd=CHECKOUT, env=environment, stdout=subprocess.DEVNULL)
    results = json.loads(written.read_text(encoding="utf8"))["results"]
    found = {(one["peer"], one["operation"]): one for one in results if one["size"] == "72 KB"}
    for operation in ("put one", "put 50", "sample uniform", "sample priority, columns"):
        assert all(found[peer, operation]["value"] > 0 for peer in HERE)
    assert [found[peer, "lost"]["value"] for peer in HERE] == [100, 0, 0, 0]
    assert all(one["note"] for one in results if one["value"] is None)
    large = {(one["peer"], one["operation"]): one for one in results if one["size"] == "590 KB"}
    for operation in ("put 10", "sample uniform", "sample uniform, columns"):
        assert all(large[peer, operation]["value"] > 0 for peer in HERE)
    report = [sys.executable, "-c", REPORT, str(written), ",".join(SIZES), *HERE[1:3]]
    subprocess.run(report, check=True, cwd=CHECKOUT, env=environment)


@pytest.mark.parametrize("path", sorted(PEERS.glob("adapters/*.py")), ids=lambda path: path.stem)
def test_adapters_compile(path: Path) -> None:
    compile(path.read_text(encoding="utf8"), str(path), "exec")


def test_every_environment_has_its_requirements() -> None:
    catalog = (PEERS / "catalog.py").read_text(encoding="utf8")
    named = set(re.findall(r'environment="([^"]+)"', catalog))
    assert named == {path.stem for path in PEERS.glob("requirements/*.txt")}


@pytest.mark.parametrize(
    "path", sorted(PEERS.glob("requirements/*.txt")), ids=lambda path: path.stem
)
def test_requirements_are_names_and_versions(path: Path) -> None:
    lines = path.read_text(encoding="utf8").splitlines()
    pins = [line for line in lines if not line.startswith("# ")]
    assert pins
    assert all(PIN.fullmatch(line) for line in pins)
