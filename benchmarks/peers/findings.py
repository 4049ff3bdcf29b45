"""What is found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A number, or why there is none; `size` is that of groups."""

    peer: str
    operation: str
    value: float | None
    unit: str = ""
    note: str = ""
    size: str = "72 KB"
