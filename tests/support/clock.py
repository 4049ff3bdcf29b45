"""Adjustable clock for leases and deadlines."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class Clock:
    """A running clock that `jump` moves forward."""

    def __init__(self) -> None:
        self._ahead = timedelta()

    def jump(self, seconds: float) -> None:
        self._ahead += timedelta(seconds=seconds)

    def now(self) -> datetime:
        return datetime.now(UTC) + self._ahead
