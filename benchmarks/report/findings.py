"""What several files of results say together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.results import ITSELF, Result, from_json

ENGINES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "": ""}


@dataclass(frozen=True, slots=True)
class PeerValue:
    """What a peer took for an operation on groups of a size, or did not."""

    peer: str
    operation: str
    value: float | None
    unit: str
    size: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of any number of runs; a later file replaces what it measures again.

    Attributes:
        machine: What the numbers depend on, of the last file.
        results: In the order they came.
        peers: Those of `benchmarks.peers`.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    results: dict[tuple[str, str, str], Result] = field(default_factory=dict)
    peers: list[PeerValue] = field(default_factory=list)

    @classmethod
    def load(cls, files: Iterable[Path]) -> Self:
        """Read files."""
        findings = cls()
        for path in files:
            findings.add(json.loads(path.read_text(encoding="utf8")))
        return findings

    def add(self, content: Mapping[str, Any]) -> None:
        """Take in a file of results, or one of peers."""
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
        """Results of a benchmark, whose facts are these."""
        return [
            one
            for one in self.results.values()
            if one.benchmark == benchmark
            and engine in (None, one.database)
            and one.what != ITSELF
            and facts.items() <= one.facts.items()
        ]

    def seconds(self) -> float:
        """How long all of it took."""
        return sum(one.value for one in self.results.values() if one.what == ITSELF)
