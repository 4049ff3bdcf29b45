"""Charts as data for plotly.js, with the same as a table for who cannot see them."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from replaydb.display import visible


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; `ui.chart(it)` of `macros.html` shows it on a page that has the block `plotly`.

    Attributes:
        title: What it shows.
        summary: That in a sentence, with its main numbers.
        headings: Of the columns of its table.
        rows: Of its table; the first cell is what the others are about.
        traces: What plotly draws. Names in it are to be made by `label`.
        layout: Of plotly, where the defaults of `ui.js` are not enough.
    """

    title: str
    summary: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> Markup:
        """What `ui.js` reads; no text in it ends the script that it is in."""
        layout = {"showlegend": any("name" in it for it in self.traces), **self.layout}
        text = json.dumps({"data": self.traces, "layout": layout}, allow_nan=False)
        return Markup(text.replace("<", "\\u003c"))  # noqa: S704


def axis(title: str, numbers: Sequence[int] = ()) -> dict[str, Any]:
    """An axis with a title; of few whole numbers each is said, and nothing between them."""
    few = bool(numbers) and max(numbers) - min(numbers) <= 20
    # Plotly raises exponents by a style in the page, which the content policy refuses: 5e+36.
    said = {} if numbers else {"exponentformat": "e"}
    return {"title": {"text": title}, **said, **({"dtick": 1} if few else {})}


def label(name: str) -> str:
    """A name that plotly shows as it is; it would obey some tags of HTML."""
    return html.escape(visible(name), quote=False)
