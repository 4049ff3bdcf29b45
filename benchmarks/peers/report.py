"""Tables and JSON of the findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Group as Renderables
from rich.table import Table
from rich.text import Text

from benchmarks.peers.catalog import PEERS
from benchmarks.peers.findings import Finding
from benchmarks.peers.race import loads
from benchmarks.results import machine

# Headings, and the operations in each column, separated by slashes.
_SMALLEST, *_LARGER = loads(0).values()
SMALLEST = _SMALLEST.size
BATCH, N = _SMALLEST.batch, _SMALLEST.n
SPEED = {
    "single puts,\ngroups/s": ["put one"],
    f"puts of {BATCH},\ngroups/s": [f"put {BATCH}"],
    f"sample {N}\nuniformly, ms": ["sample uniform", "sample uniform, columns"],
    f"sample {N}\nby priority, ms": ["sample priority", "sample priority, columns"],
    f"sample {N}\nin order, ms": ["sample order", "sample order, columns"],
    f"sample {N}\nafter a put, ms": [
        "sample uniform after a put",
        "sample priority after a put",
        "sample order after a put",
    ],
    f"update {N}\npriorities, ms": ["update priorities"],
}
#: Columns for larger groups, which are drawn by the first policy that a store has.
SIZES = {
    load.size: {
        "single puts,\ngroups/s": ["put one"],
        f"puts of {load.batch},\ngroups/s": [f"put {load.batch}"],
        f"sample {load.n},\nms": [
            f"sample {policy}{how}"
            for how in ("", ", columns")
            for policy in ("uniform", "priority", "order")
        ],
        "memory / mapped\nfiles, MB": ["memory", "memory, of files"],
    }
    for load in _LARGER
}
SAFETY = {
    "memory / mapped\nfiles, MB": ["memory", "memory, of files"],
    "groups lost\nby kill -9": ["lost"],
    "recovery,\nms": ["recovery"],
    "checkpoint,\ns": ["checkpoint"],
    "groups lost after\na checkpoint": ["lost with a checkpoint"],
    "recovery from\ncheckpoint, ms": ["recovery with a checkpoint"],
}


def to_tables(findings: list[Finding], groups: int) -> Renderables:
    """Return a table for each group size, a table of memory and recovery, and the notes."""
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    speed = [
        _table(f"{size}: as returned / as one array per field", columns, findings, size)
        for size, columns in ({SMALLEST: SPEED} | SIZES).items()
    ]
    title = f"{groups:,} groups: memory, and recovery, also from a checkpoint of half of them"
    safety = _table(title, SAFETY, findings, SMALLEST)
    safety.caption = facts
    return Renderables(*speed, safety, Text("\n".join(_notes(findings))))


def to_json(findings: Iterable[Finding], groups: int) -> dict[str, Any]:
    """Convert findings to JSON values."""
    return {
        "machine": machine(),
        "groups": groups,
        "results": [asdict(finding) for finding in findings],
    }


def _table(title: str, columns: dict[str, list[str]], findings: list[Finding], size: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    found = {(one.peer, one.operation): one for one in findings if one.size == size}
    for peer in (name for name in PEERS if any(name == other for other, _ in found)):
        cells = [
            " / ".join(_shown(found[peer, one]) for one in operations if (peer, one) in found)
            for operations in columns.values()
        ]
        table.add_row(peer, *cells)
    return table


def _notes(findings: list[Finding]) -> list[str]:
    """Return a line for each reason why a peer lacks operations."""
    operations: dict[tuple[str, str], list[str]] = {}
    for one in findings:
        if one.value is None and not one.operation.startswith("recovery"):
            operations.setdefault((one.peer, one.note), []).append(one.operation)
    return [f"{peer}, {', '.join(names)}: {note}" for (peer, note), names in operations.items()]


def _shown(finding: Finding) -> str:
    value = finding.value
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
