"""Results of several files, combined."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.results import TOTAL_TIME, Result, from_json

ENGINES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "": ""}


@dataclass(frozen=True, slots=True)
class PeerValue:
    """Value of an operation of a peer on groups of a size; None if the peer does not support it."""

    peer: str
    operation: str
    value: float | None
    unit: str
    size: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of several runs. Results of a later file replace equal measurements of earlier ones.

    Attributes:
        machine: Facts about the machine and versions, of the last file.
        results: Results by benchmark, database and description, in order.
        peers: Values of `benchmarks.peers`.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    results: dict[tuple[str, str, str], Result] = field(default_factory=dict)
    peers: list[PeerValue] = field(default_factory=list)

    @classmethod
    def load(cls, files: Iterable[Path]) -> Self:
        """Read files of results."""
        findings = cls()
        for path in files:
            findings.add(json.loads(path.read_text(encoding="utf8")))
        return findings

    def add(self, content: Mapping[str, Any]) -> None:
        """Add the content of a file of results, or of a file of peers."""
        if any("peer" in one for one in content["results"]):
            self.peers.extend(
                PeerValue(one["peer"], one["operation"], one["value"], one["unit"], one["size"])
                for one in content["results"]
            )
            return
        self.machine.update(content["machine"])
        for one in from_json(content):
            self.results[one.benchmark, one.database, one.what] = one

    def of(self, benchmark: str, engine: str | None = None, **facts: Any) -> list[Result]:
        """Return the results of a benchmark that have these facts."""
        return [
            one
            for one in self.results.values()
            if one.benchmark == benchmark
            and engine in (None, one.database)
            and one.what != TOTAL_TIME
            and facts.items() <= one.facts.items()
        ]

    def seconds(self) -> float:
        """Return the total duration of all benchmarks."""
        return sum(one.value for one in self.results.values() if one.what == TOTAL_TIME)
