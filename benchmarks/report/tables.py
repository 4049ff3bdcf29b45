"""Markdown tables of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.peers.race import loads
from benchmarks.peers.report import BATCH, SAFETY, SIZES, SMALLEST, SPEED
from benchmarks.report import fleet
from benchmarks.report.findings import ENGINES, Findings
from benchmarks.report.markdown import markdown
from benchmarks.results import Result, number, target

MARKS = {"ok": "✓", "missed": "✗", "": ""}
#: Facts that form the rows and the columns of a table per engine. Results of other benchmarks are
#: listed one per line.
PIVOTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "put": (("shape", "size", "producers"), ("side",)),
    "sample": (("shape", "groups"), ("side",)),
    "claim": (("shape", "groups"), ("side",)),
    "packs": (("shape", "groups"), ("side",)),
    "files": (("groups",), ("side",)),
    "scale": (("call",), ("rows",)),
    "trainers": (("how", "trainers"), ("side",)),
    "shards": (("shape", "payloads", "each rank reads"), ("side",)),
    "step": (("prefetch",), ("side",)),
    "loader": (("prefetch",), ("side",)),
    "gpu": (("groups", "from"), ("side",)),
    "blocking": (("call",), ("side",)),
    "memory": (("shape", "prefetch", "previous batch"), ("side",)),
    "loop": (("load",), ("side",)),
    "neighbors": (("call", "neighbors"), ("side",)),
    "network": (("call", "side"), ("column",)),
    "shared": (("call", "processes"), ("side",)),
    "tasks": (("call",), ("tasks",)),
    "tensors": (("layout",), ("lengths", "side")),
    "branches": (("layout",), ("side",)),
    "sizes": (("group",), ("side",)),
}
#: Target for the time of replaydb divided by the time of a peer.
PEER_TARGETS: tuple[tuple[str, str, float], ...] = (
    ("replaydb-sqlite", "dm-reverb", 1.0),
    ("replaydb-sqlite-files", "dm-reverb", 0.5),
    ("replaydb-sqlite", "dm-reverb-in-process", 1.5),
)
#: Rows of the comparison with Reverb's server in the README: the operation for each group size.
RELATIVE_TO_REVERB = {
    "time of a sample": ["sample uniform"] * 3,
    "groups/s, single puts": ["put one"] * 3,
    "groups/s, batched puts": [f"put {load.batch}" for load in loads(0).values()],
}
REPLAYDB = {
    "replaydb-sqlite": "SQLite",
    "replaydb-sqlite-files": "SQLite, payloads in files",
    "replaydb-postgresql": "PostgreSQL",
}
HEADINGS = {"size": "groups per put", "shape": "episodes x tokens", "how": "tasks", "side": "by"}


def table(name: str, findings: Findings) -> list[str]:
    """Return the lines of the table of this name; none if there are no results for it."""
    if name in _TABLES:
        return _TABLES[name](findings)
    results = findings.of(name)
    if name not in PIVOTS:
        return _list(results)
    lines: list[str] = []
    rest = list(results)
    for engine, title in ENGINES.items():
        pivoted = [one for one in results if one.database == engine and _fits(one, name)]
        if pivoted:
            lines += ["", f"{title}:", ""] if title else [""]
            lines += _pivot(pivoted, *PIVOTS[name])
            rest = [one for one in rest if one not in pivoted]
    return [*lines[1:], *(["", *_list(rest)] if rest else [])]


def _growth(findings: Findings, row: str) -> list[str]:
    """Return the table of what `growth` measured for each call, or each database table."""
    results = [one for one in findings.of("growth") if row in one.facts]
    return _pivot(results, (row,), ("column",)) if results else []


def _all_peers(findings: Findings) -> list[str]:
    lines = [*_peers(findings, SPEED), "", *_peers(findings, SAFETY)]
    for size, columns in SIZES.items():
        larger = _peers(findings, columns, size)
        lines += ["", f"Groups of {size}:", "", *larger] if larger else []
    return lines if findings.peers else []


def _targets(findings: Findings) -> list[str]:
    return _list([one for one in findings.results.values() if one.target is not None])


def _peers(
    findings: Findings, columns: Mapping[str, Sequence[str]], size: str = SMALLEST
) -> list[str]:
    """Return a line for each store. Operations with the same heading share a cell."""
    found = {(one.peer, one.operation): one.value for one in findings.peers if one.size == size}
    rows = []
    for peer in dict.fromkeys(peer for peer, _ in found):
        cells = [
            " / ".join(_value(found[peer, one]) for one in operations if (peer, one) in found)
            for operations in columns.values()
        ]
        rows.append([peer, *cells])
    return markdown(["", *(heading.replace("\n", " ") for heading in columns)], rows, left=1)


def _peer_targets(findings: Findings) -> list[str]:
    """Compare replaydb with Reverb: samples of every size, batched puts of the smallest groups."""
    found = {(one.peer, one.operation, one.size): one.value for one in findings.peers}
    sizes = [SMALLEST, *SIZES]

    def row(what: str, ours: str, theirs: str, operation: str, limit: Result) -> list[str]:
        cells = []
        for size in sizes:
            mine, other = (found.get((peer, operation, size)) for peer in (ours, theirs))
            ratio = replace(limit, value=mine / other) if mine and other else None
            cells.append(_cell(ratio))
        return [f"{what}: {ours} / {theirs}", *cells, target(limit)]

    rows = []
    for ours, theirs, most in PEER_TARGETS:
        limit = Result("peers", "", "", 0.0, "x", most)
        rows.append(row("sample, time", ours, theirs, "sample uniform", limit))
        rows.append(row("sample as tensors, time", ours, theirs, "sample uniform, columns", limit))
    least = Result("peers", "", "", 0.0, "x", 1.0, more_is_better=True)
    for ours in dict.fromkeys(ours for ours, _, _ in PEER_TARGETS):
        rows.append(row(f"puts of {BATCH}, groups/s", ours, "dm-reverb", f"put {BATCH}", least))
    rows = [one for one in rows if any(one[1:-1])]
    return markdown(["", *sizes, "target"], rows, left=1)


def _relative_to_reverb(findings: Findings) -> list[str]:
    """Return multiples of the values of Reverb's server, for every size, for the README."""
    found = {(one.peer, one.operation, one.size): one.value for one in findings.peers}
    rows = []
    for what, operations in RELATIVE_TO_REVERB.items():
        for peer, store in REPLAYDB.items():
            cells = []
            for size, operation in zip([SMALLEST, *SIZES], operations, strict=True):
                mine, other = (found.get((one, operation, size)) for one in (peer, "dm-reverb"))
                cells.append(number(mine / other, "x") if mine and other else "")
            rows.append([what, store, *cells])
    rows = [one for one in rows if any(one[2:])]
    sizes = [f"groups of {size}" for size in [SMALLEST, *SIZES]]
    return markdown(["relative to Reverb's server", "", *sizes], rows, left=2)


def _value(value: float | None) -> str:
    return "none" if value is None else number(value, "").rstrip()


def _machine(findings: Findings) -> list[str]:
    facts = [f"{name} {value}" for name, value in findings.machine.items()]
    if not facts:
        return []
    return [f"{', '.join(facts)}.", f"Total time: {findings.seconds() / 60:.0f} minutes."]


def _fits(one: Result, name: str) -> bool:
    rows, columns = PIVOTS[name]
    return {*rows, *columns} <= one.facts.keys()


def _list(results: Sequence[Result]) -> list[str]:
    """Return a line for each measurement, with a column for each engine."""
    engines = [one for one in ENGINES if any(result.database == one for result in results)]
    found = {(one.what, one.database): one for one in results}
    rows = []
    for what in dict.fromkeys(one.what for one in results):
        several = [found.get((what, engine)) for engine in engines]
        targets = dict.fromkeys(target(one) for one in several if one is not None)
        rows.append([what, *map(_cell, several), " / ".join(targets)])
    headings = ["", *(ENGINES[one] or "no database" for one in engines), "target"]
    if not any(row[-1] for row in rows):
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    return markdown(headings, rows, left=1)


def _pivot(results: Sequence[Result], rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    found = {(_key(one, rows), _key(one, columns)): one for one in results}
    names = dict.fromkeys(key for _, key in found)
    cells = [
        [*row, *(_cell(found.get((row, name))) for name in names)]
        for row in dict.fromkeys(key for key, _ in found)
    ]
    headings = [HEADINGS.get(name, name) for name in rows]
    headings += [", ".join(name).replace(" / ", "&nbsp;/ ") for name in names]
    return markdown(headings, cells, left=len(rows))


def _key(one: Result, names: Iterable[str]) -> tuple[str, ...]:
    values = (one.facts[name] for name in names)
    return tuple(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def _cell(one: Result | None) -> str:
    if one is None:
        return ""
    return f"{number(one.value, one.unit)} {MARKS[one.verdict]}".rstrip()


#: Tables that are not of one benchmark, or have a form of their own.
_TABLES: Mapping[str, Callable[[Findings], list[str]]] = {
    "machine": _machine,
    "targets": _targets,
    "peers": _all_peers,
    "peer-targets": _peer_targets,
    "relative-to-reverb": _relative_to_reverb,
    "growth-calls": partial(_growth, row="call"),
    "growth-tables": partial(_growth, row="table"),
    "growth": lambda findings: _list(
        [one for one in findings.of("growth") if "column" not in one.facts]
    ),
    "fleet": fleet.costs,
    "fleet-needs": fleet.needs,
    "fleet-limits": fleet.limits,
}
