"""Chart data for plotly.js, with an equivalent table for screen readers."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from replaydb.util.display import visible

#: Rows of a table.
ROWS = 100


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. The macro `ui.chart` of `macros.html` renders it.

    Attributes:
        title: Title of the chart.
        summary: A sentence with the main numbers.
        headings: Column headings of the table.
        rows: Rows of the table. The first cell is the row heading.
        traces: Plotly traces. Pass names through `label`.
        layout: Plotly layout that overrides the defaults of `ui.js`.
    """

    title: str
    summary: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> Markup:
        """Traces and layout as JSON for `ui.js`, with `<` escaped for the script element."""
        layout = {"showlegend": any("name" in it for it in self.traces), **self.layout}
        text = json.dumps({"data": self.traces, "layout": layout}, allow_nan=False)
        return Markup(text.replace("<", "\\u003c"))  # noqa: S704


def axis(title: str, numbers: Sequence[int] = ()) -> dict[str, Any]:
    """Return the Plotly layout of an axis.

    Args:
        title: Title of the axis.
        numbers: The values, if they are integers. A small range gets a tick at each integer.
    """
    few = bool(numbers) and max(numbers) - min(numbers) <= 20
    # Plotly's default exponents need an inline style, which the content policy forbids.
    exponents = {} if numbers else {"exponentformat": "e"}
    return {"title": {"text": title}, **exponents, **({"dtick": 1} if few else {})}


def label(name: str) -> str:
    """Escape a name for Plotly, which interprets some HTML tags."""
    return html.escape(visible(name), quote=False)


def by_number(
    title: str,
    axes: tuple[str, str],
    lines: Mapping[str, Mapping[int, float]],
    styles: Sequence[Mapping[str, Any]],
    *,
    summary: str | None = None,
    **layout: Any,
) -> Chart:
    """Return a chart of values by integers.

    Args:
        title: Title of the chart.
        axes: Titles of both axes.
        lines: Values of each trace by their integers, by name of the trace.
        styles: Plotly traces without a name and data, one for each of `lines` or more.
        summary: Summary of the chart. Default: its number of points.
        layout: Plotly layout.
    """
    points = sorted({x for line in lines.values() for x in line})
    counts = [it for line in lines.values() for it in line.values() if isinstance(it, int)]
    return Chart(
        title,
        f"{len(points)} points of {' and '.join(lines)}" if summary is None else summary,
        (axes[0], *lines),
        [(x, *(line.get(x) for line in lines.values())) for x in _thin(points)],
        [
            {"name": label(name), "x": list(line), "y": list(line.values()), **style}
            for (name, line), style in zip(lines.items(), styles, strict=False)
        ],
        {
            "xaxis": axis(axes[0], points),
            "yaxis": axis(axes[1], [0, *counts] if counts else ()),
            "showlegend": len(lines) > 1,  # even if one of them is empty
            **layout,
        },
    )


def _thin(points: Sequence[int]) -> Sequence[int]:
    """Return at most `ROWS` of the points at regular intervals, including the last one."""
    every = -(-len(points) // ROWS) or 1
    return points[::-1][::every][::-1]
