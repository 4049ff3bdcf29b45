"""Update the tables in docs/benchmarks.md, docs/deployment.md and README.md, and the plots.

python -m benchmarks.report RESULTS.json [PEERS.json ...]

Tables are written between `<!-- results: NAME -->` and `<!-- /results -->`, where NAME is a
benchmark, "targets" (all results with a target), "machine", "peers", "peer-targets",
"relative-to-reverb", "fleet-needs", "fleet-limits", "growth-calls" or "growth-tables". Tables
without results in the files stay
unchanged.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report.findings import Findings
from benchmarks.report.tables import table

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def main() -> None:
    """Parse arguments, write tables and plots."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="results, as written by --json")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, help="folder of the pages (default: %(default)s)"
    )
    arguments = parser.parse_args()
    findings = Findings.load(arguments.files)
    docs: Path = arguments.docs
    for page in (docs / "benchmarks.md", docs / "deployment.md", docs.parent / "README.md"):
        page.write_text(filled(page.read_text(encoding="utf8"), findings), encoding="utf8")
    for path in draw(arguments.docs / "plots", findings):
        print(path)


def filled(text: str, findings: Findings) -> str:
    """Return a page with the tables of the findings."""

    def fill(block: re.Match[str]) -> str:
        lines = table(block[2], findings)
        return "\n".join([block[1], *lines, "", block[3]]) if lines else block[0]

    return _BLOCK.sub(fill, text)


def draw(folder: Path, findings: Findings) -> Iterable[Path]:
    """Write SVG files of the findings, if matplotlib is installed. Return their paths."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed (pip install 'replaydb[bench]')")
        return []
    from benchmarks.report import plots

    return plots.draw(folder, findings)


if __name__ == "__main__":
    main()
