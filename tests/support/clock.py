"""Adjustable clock for leases and deadlines."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class Clock:
    """A clock that only `jump` moves."""

    def __init__(self) -> None:
        self._now = datetime.now(UTC)

    def jump(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)

    def now(self) -> datetime:
        return self._now
