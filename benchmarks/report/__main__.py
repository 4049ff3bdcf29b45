"""Write what was measured into docs/benchmarks.md and the README, and draw it.

python -m benchmarks.report RESULTS.json [PEERS.json ...]

Tables go between `<!-- results: NAME -->` and `<!-- /results -->`, where NAME is a benchmark,
"bars" (everything that has one), "machine", "peers", "peer-bars" or "beside-reverb". What the files
do not have stays as it was.
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
_PLACE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def main() -> None:
    """Parse arguments, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="what --json has written")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of benchmarks.md")
    arguments = parser.parse_args()
    findings = Findings.load(arguments.files)
    for page in (arguments.docs / "benchmarks.md", arguments.docs.parent / "README.md"):
        page.write_text(filled(page.read_text(encoding="utf8"), findings), encoding="utf8")
    for path in draw(arguments.docs / "plots", findings):
        print(path)


def filled(text: str, findings: Findings) -> str:
    """A page with the tables of what was found."""

    def fill(place: re.Match[str]) -> str:
        lines = table(place[2], findings)
        return "\n".join([place[1], *lines, "", place[3]]) if lines else place[0]

    return _PLACE.sub(fill, text)


def draw(folder: Path, findings: Findings) -> Iterable[Path]:
    """SVG files of what was found; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: they take matplotlib, the extra `bench`")
        return []
    from benchmarks.report import plots

    return plots.draw(folder, findings)


if __name__ == "__main__":
    main()
