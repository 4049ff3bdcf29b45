"""The plots of a report, by plotly."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from replaydb.analysis.report.summary import Bins, Summary
from replaydb.display import visible

Trace = dict[str, Any]  # as plotly takes it

#: Tasks that have a line of their own.
SHOWN_TASKS = 10


def figures(summary: Summary) -> Iterator[tuple[str, Any]]:
    """Plots with their headings."""
    import plotly.graph_objects as go

    for heading, x, y, traces in _plots(summary):
        layout = {
            "xaxis_title": x,
            "yaxis_title": y,
            "template": "plotly_white",
            "height": 360,
            "margin": {"t": 16, "r": 16},
            "autotypenumbers": "strict",  # names of numbers are names
        }
        yield heading, go.Figure(traces, layout)


def _plots(summary: Summary) -> Iterator[tuple[str, str, str, list[Trace]]]:
    """Heading, titles of the axes, and what is drawn."""
    rewards, ages = _rewards(summary), summary.aged.means()
    flows = {"generated": summary.put, "trained on": summary.trained}
    yield (
        "Reward by policy version",
        "oldest policy version of the group",
        "mean reward",
        [_dots(means, means.values(), name=name) for name, means in rewards.items()],
    )
    yield (
        "Staleness at training",
        "policy versions behind, at the draw",
        "groups",
        [_bars(summary.staleness)],
    )
    yield (
        "Staleness at training over time",
        "",
        "mean policy versions behind",
        [_dots(_times(ages), ages.values())],
    )
    yield "How often groups were used", "draws", "groups", [_bars(summary.uses)]
    yield "Priorities", "priority", "groups", [_priorities(summary)]
    yield (
        "Generated against trained",
        "",
        "groups so far",
        [_total(*one) for one in flows.items()],
    )
    yield "Throughput", "", "groups a second", [_rate(*one) for one in flows.items()]


def _dots(x: Iterable[Any], y: Iterable[float], **name: str) -> Trace:
    return {"type": "scatter", "mode": "lines+markers", "x": list(x), "y": list(y), **name}


def _bars(bins: Bins) -> Trace:
    x = [start + (bins.width - 1) / 2 for start, _ in bins.items()]
    return {"type": "bar", "x": x, "y": [count for _, count in bins.items()], "width": bins.width}


def _total(name: str, bins: Bins) -> Trace:
    counts = bins.padded()
    y = list(accumulate(counts.values()))
    return {"type": "scatter", "mode": "lines", "x": _times(counts), "y": y, "name": name}


def _rate(name: str, bins: Bins) -> Trace:
    counts = bins.padded()
    y = [count / bins.width for count in counts.values()]
    return {"type": "scatter", "mode": "lines", "x": _times(counts), "y": y, "name": name}


def _rewards(summary: Summary) -> dict[str, dict[int, float]]:
    """Mean rewards by version, of the tasks with the most groups, and of the others together."""
    by_size = sorted(summary.tasks.items(), key=lambda item: -item[1].groups)
    lines = {label(name): task.rewards.means() for name, task in by_size[:SHOWN_TASKS]}
    others = Bins()
    for _, task in by_size[SHOWN_TASKS:]:
        for start, count in task.rewards.items():
            others.add(start, count, task.rewards.sums[start])
    if others.counts:
        lines[f"{len(by_size) - SHOWN_TASKS} other tasks"] = others.means()
    return lines


def _times(seconds: Iterable[int]) -> list[datetime]:
    return [datetime.fromtimestamp(second, UTC) for second in seconds]


def _priorities(summary: Summary) -> Trace:
    """A bar for each tenth of a power of ten."""
    places = sorted(place for place in summary.priorities if place is not None)
    names = [f"{10 ** (place / 10):.3g}" for place in places]
    counts = [summary.priorities[place] for place in places]
    if none := summary.priorities[None]:
        names, counts = ["0", *names], [none, *counts]
    return {"type": "bar", "x": names, "y": counts}


def label(name: str) -> str:
    """A name that plotly shows as it is; it would obey some tags of HTML."""
    return html.escape(visible(name))
