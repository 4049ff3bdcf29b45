"""Plots as SVG files that are readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

from benchmarks.peers.report import SMALLEST
from benchmarks.report.findings import ENGINES, Findings, PeerValue
from benchmarks.results import Result, number

#: A colour with a contrast of at least 4 with both white and black.
INK = "#7d8590"
COLOURS = ("#4184e4", "#d9730d", "#2f9e62", "#a366e0", "#d64550", "#1f9aa8", "#a97f00", "#c2559b")
HEIGHT = 3.4
STYLE: Any = {
    "font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "replaydb",
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "axes.titlesize": 10,
    "axes.titlelocation": "left", "xtick.color": INK, "ytick.color": INK, "axes.grid": True,
    "axes.grid.axis": "y", "grid.color": INK, "grid.alpha": 0.25, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.left": False, "ytick.left": False,
    "axes.prop_cycle": cycler(color=COLOURS), "lines.marker": "o", "lines.markersize": 3.5,
    "legend.frameon": False, "legend.labelcolor": INK,
}  # fmt: skip


def draw(folder: Path, findings: Findings) -> Iterator[Path]:
    """Write the plots for which there are results. Yield their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[Findings], Figure | None]] = {
        "scale": _scale,
        "ratios": _ratios,
        "trainers": _trainers,
        "peers-put": lambda found: _peers(found, "put", "groups/s, more is better"),
        "peers-sample": lambda found: _peers(found, "sample", "ms, less is better"),
    }
    for name, make in makers.items():
        with mpl.rc_context(STYLE):
            figure = make(findings)
            if figure is not None:
                path = folder / f"{name}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None})
                yield path


def _scale(findings: Findings) -> Figure | None:
    """Plot milliseconds of every sampling strategy by groups in the buffer."""
    panels = [
        (title, [one for one in findings.of("scale", engine) if _is_policy(one)])
        for engine, title in ENGINES.items()
    ]
    with _panels(panels, "groups in the buffer", share_y=True) as (figure, axes):
        for panel, results in axes:
            lines = _by(results, lambda one: str(one.facts["call"]).partition(", ")[2])
            for name, several in lines.items():
                panel.plot([one.facts["rows"] for one in several], _values(several), label=name)
            panel.set_xscale("log")
        if axes:
            axes[0][0].set_ylim(bottom=0)  # after plotting, as the axis is shared by all panels
            axes[0][0].set_ylabel("sample 64, ms")
            axes[-1][0].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _is_policy(one: Result) -> bool:
    call, _, policy = str(one.facts.get("call", "")).partition(", ")
    return call == "sample 64" and policy.isalpha() and one.facts["rows"] != "ratio"


def _ratios(findings: Findings) -> Figure | None:
    """Plot the speed relative to the bare drivers, by the size of the groups."""
    producers = [one for one in findings.of("put", producers=1) if one.facts["size"] > 1]
    panels = [
        ("put, batches", [one for one in producers if one.facts["side"].startswith("replaydb /")]),
        (
            "sample, Uniform",
            [one for one in findings.of("sample") if one.facts["side"].startswith("Uniform /")],
        ),
    ]
    with _panels(panels, "episodes x tokens of a group", share_y=True) as (figure, axes):
        for panel, results in axes:
            lines = _by(results, lambda one: (one.database, one.facts["side"].partition(" / ")[2]))
            for (engine, other), several in lines.items():
                shares = [
                    100 * (one.value if one.more_is_better else 1 / one.value) for one in several
                ]
                panel.plot(
                    [one.facts["shape"] for one in several], shares,
                    color=COLOURS[list(ENGINES).index(engine)],
                    linestyle="-" if other == "bare" else ":",
                    label=f"{ENGINES[engine]} / bare{'' if other == 'bare' else ' + codec'}",
                )  # fmt: skip
            panel.axhline(100, color=INK, linewidth=0.8, marker="")
        if axes:
            axes[0][0].set_ylim(bottom=0)  # after plotting, as the axis is shared by all panels
            axes[0][0].set_ylabel("% of the driver's speed")
            axes[-1][0].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _trainers(findings: Findings) -> Figure | None:
    """Plot groups per second of all trainers together."""
    panels = [
        (title, findings.of("trainers", engine, side="throughput"))
        for engine, title in ENGINES.items()
    ]
    with _panels(panels, "trainers", share_y=True) as (figure, axes):
        for panel, results in axes:
            for how, several in _by(results, lambda one: one.facts["how"]).items():
                panel.plot([one.facts["trainers"] for one in several], _values(several), label=how)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sorted({one.facts["trainers"] for one in results}))
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.legend(loc="lower right")
        if axes:
            axes[0][0].set_ylim(bottom=0)  # after plotting, as the axis is shared by all panels
            axes[0][0].set_ylabel("groups/s")
    return figure


def _peers(findings: Findings, operation: str, unit: str) -> Figure | None:
    """Plot a bar for each peer and operation."""
    shown = {"put": ("put 50", "put one"), "sample": ("sample uniform",)}[operation]
    panels = [
        (
            name,
            [
                one
                for one in findings.peers
                if (one.operation, one.size) == (name, SMALLEST) and one.value
            ],
        )
        for name in dict.fromkeys(one.operation for one in findings.peers)
        if name in shown
    ]
    with _panels(panels, unit) as (figure, axes):
        for panel, values in axes:
            ordered: list[PeerValue] = sorted(values, key=lambda one: one.value or 0.0)
            if operation == "put":
                ordered.reverse()
            ours = [one.peer.startswith("replaydb") for one in ordered]
            bars = panel.barh(
                [one.peer for one in ordered], [one.value for one in ordered],
                color=[COLOURS[0] if mine else INK for mine in ours], height=0.6,
            )  # fmt: skip
            labels = [number(one.value or 0.0, "") for one in ordered]
            panel.bar_label(bars, labels, padding=3, color=INK, fontsize=8)
            panel.set_xscale("log")
            panel.margins(x=0.25)
            panel.invert_yaxis()
            panel.grid(visible=False)
    return figure


@contextmanager
def _panels(
    panels: Sequence[tuple[str, Sequence[Any]]], x_label: str, *, share_y: bool = False
) -> Iterator[tuple[Figure | None, list[tuple[Any, Sequence[Any]]]]]:
    """Yield a figure with a panel for each title that has values, side by side."""
    filled = [(title, values) for title, values in panels if values]
    if not filled:
        yield None, []
        return
    figure = Figure(figsize=(4.4 * len(filled), HEIGHT), layout="constrained")
    axes = figure.subplots(1, len(filled), sharey=share_y, squeeze=False)[0]
    for panel, (title, _) in zip(axes, filled, strict=True):
        panel.set_title(title)
        panel.set_xlabel(x_label)
    yield figure, [(panel, values) for panel, (_, values) in zip(axes, filled, strict=True)]


def _values(results: Iterable[Result]) -> list[float]:
    return [one.value for one in results]


def _by(results: Iterable[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    found: dict[Any, list[Result]] = {}
    for one in results:
        found.setdefault(key(one), []).append(one)
    return found
