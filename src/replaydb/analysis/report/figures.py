"""Plotly figures of a report."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from replaydb.analysis.report.summary import Bins, Summary
from replaydb.util.display import visible

Trace = dict[str, Any]  # as plotly takes it

#: Maximum number of tasks with their own line.
SHOWN_TASKS = 10


def figures(summary: Summary) -> Iterator[tuple[str, Any]]:
    """Yield the figures with their headings."""
    import plotly.graph_objects as go

    for heading, x, y, traces in _plots(summary):
        layout = {
            "xaxis_title": x,
            "yaxis_title": y,
            "template": "plotly_white",
            "height": 360,
            "margin": {"t": 16, "r": 16},
            "autotypenumbers": "strict",  # task names such as "1" are not numbers
        }
        yield heading, go.Figure(traces, layout)


def _plots(summary: Summary) -> Iterator[tuple[str, str, str, list[Trace]]]:
    """Yield heading, axis titles and traces of each plot."""
    rewards, ages = _rewards(summary), summary.aged.means()
    flows = {"generated": summary.put, "trained": summary.trained}
    yield (
        "Reward by policy version",
        "oldest policy version of the group",
        "mean reward",
        [_dots(means, means.values(), name=name) for name, means in rewards.items()],
    )
    yield (
        "Staleness at training",
        "staleness at the draw (policy versions)",
        "groups",
        [_bars(summary.staleness)],
    )
    yield (
        "Staleness at training over time",
        "",
        "mean staleness (policy versions)",
        [_dots(_times(ages), ages.values())],
    )
    yield "Draws per group", "draws", "groups", [_bars(summary.draws)]
    yield "Priorities", "priority", "groups", [_priorities(summary)]
    yield (
        "Generated and trained groups",
        "",
        "cumulative groups",
        [_total(*one) for one in flows.items()],
    )
    yield "Throughput", "", "groups per second", [_rate(*one) for one in flows.items()]


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
    """Return mean rewards by policy version, of the largest tasks and of all others combined."""
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
    """Return a histogram with ten bars for each power of ten."""
    bins = sorted(one for one in summary.priorities if one is not None)
    names = [f"{10 ** (one / 10):.3g}" for one in bins]
    counts = [summary.priorities[one] for one in bins]
    if none := summary.priorities[None]:
        names, counts = ["0", *names], [none, *counts]
    return {"type": "bar", "x": names, "y": counts}


def label(name: str) -> str:
    """Return a name escaped for plotly, which interprets some HTML tags."""
    return html.escape(visible(name))
