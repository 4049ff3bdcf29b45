"""The plots of a report, by plotly."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from replaydb.analysis.report.summary import Bins, Summary
from replaydb.errors import NotSupportedError

#: Tasks that have a line of their own.
SHOWN_TASKS = 10


def figures(summary: Summary) -> Iterator[tuple[str, Any]]:
    """Plots with their headings.

    Raises:
        NotSupportedError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise NotSupportedError("reports need plotly: pip install 'replaydb[report]'") from error

    def figure(x: str, y: str, *traces: Any, **layout: Any) -> Any:
        axes = {"xaxis_title": x, "yaxis_title": y, "template": "plotly_white", "height": 360}
        return go.Figure(traces, {**axes, "margin": {"t": 16, "r": 16}, **layout})

    def bars(bins: Bins, name: str) -> Any:
        x = [start + (bins.width - 1) / 2 for start, _ in bins.items()]
        return go.Bar(x=x, y=[count for _, count in bins.items()], width=bins.width, name=name)

    yield (
        "Reward by policy version",
        figure(
            "oldest policy version of the group",
            "mean reward",
            *(
                go.Scatter(
                    x=list(rewards), y=list(rewards.values()), mode="lines+markers", name=name
                )
                for name, rewards in _rewards(summary).items()
            ),
        ),
    )
    yield (
        "Staleness at training",
        figure("policy versions behind, at the draw", "groups", bars(summary.staleness, "groups")),
    )
    yield (
        "Staleness at training over time",
        figure(
            "",
            "mean policy versions behind",
            go.Scatter(
                x=_times(summary.aged.means()),
                y=list(summary.aged.means().values()),
                mode="lines+markers",
            ),
        ),
    )
    yield "How often groups were used", figure("draws", "groups", bars(summary.uses, "groups"))
    yield (
        "Priorities",
        figure("priority", "groups", _priorities(summary, go), xaxis_type="category"),
    )
    yield (
        "Generated against trained",
        figure(
            "",
            "groups so far",
            *(
                go.Scatter(
                    x=_times(bins.padded()),
                    y=list(accumulate(bins.padded().values())),
                    mode="lines",
                    name=name,
                )
                for name, bins in _flows(summary).items()
            ),
        ),
    )
    yield (
        "Throughput",
        figure(
            "",
            "groups a second",
            *(
                go.Scatter(
                    x=_times(bins.padded()),
                    y=[count / bins.width for count in bins.padded().values()],
                    mode="lines",
                    name=name,
                )
                for name, bins in _flows(summary).items()
            ),
        ),
    )


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


def _flows(summary: Summary) -> dict[str, Bins]:
    return {"generated": summary.put, "trained on": summary.trained}


def _times(seconds: Iterable[int]) -> list[datetime]:
    return [datetime.fromtimestamp(second, UTC) for second in seconds]


def _priorities(summary: Summary, go: Any) -> Any:
    """A bar for each tenth of a power of ten."""
    places = sorted(place for place in summary.priorities if place is not None)
    names = [f"{10 ** (place / 10):.3g}" for place in places]
    counts = [summary.priorities[place] for place in places]
    if none := summary.priorities[None]:
        names, counts = ["0", *names], [none, *counts]
    return go.Bar(x=names, y=counts, name="groups")


def label(name: str) -> str:
    """A name that plotly shows as it is; it would obey some tags of HTML."""
    return html.escape(visible(name))


def visible(text: str) -> str:
    """Text of others: of what is no letter or sign only ends of lines stay as they are."""
    return "".join(
        sign
        if sign.isprintable() or sign == "\n"
        else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )
