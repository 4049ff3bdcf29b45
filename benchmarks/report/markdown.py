"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table whose first `left` columns are aligned left; none for no rows."""
    rows = list(rows)
    if not rows:
        return []
    ruler = ["---"] * left + ["--:"] * (len(headings) - left)
    return [f"| {' | '.join(cells)} |" for cells in (headings, ruler, *rows)]
