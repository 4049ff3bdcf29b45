"""Figures of a run for docs/reliability.md."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from torture.run import AttackResult

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: make torture -->", "<!-- end of figures -->"


def record(results: list[AttackResult], seed: int) -> None:
    """Replace the recorded figures in docs/reliability.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{figures(results, seed)}{END}{after}")


def figures(results: list[AttackResult], seed: int) -> str:
    """Return a Markdown table with one row per attack and engine."""
    today = datetime.now(UTC).date().isoformat()
    where = f"Python {platform.python_version()}, {os.cpu_count()} processors"
    lines = [
        "",
        f"{today}, {where}, seed {seed}:",
        "",
        "| attack | engine | rounds | broken | what was done |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in results:
        done = ", ".join(f"{count:,} {what}" for what, count in one.figures.most_common())
        cells = one.name, one.engine, str(one.rounds), str(len(one.broken)), done
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])
