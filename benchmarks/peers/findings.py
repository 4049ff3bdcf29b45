"""Findings of the comparison."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A measured value, or in `note` the reason why there is none; `size` is the group size."""

    peer: str
    operation: str
    value: float | None
    unit: str = ""
    note: str = ""
    size: str = "72 KB"
