"""The time that leases and deadlines go by, set by tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class Clock:
    """It runs, and jumps ahead when told."""

    def __init__(self) -> None:
        self._ahead = timedelta()

    def jump(self, seconds: float) -> None:
        self._ahead += timedelta(seconds=seconds)

    def now(self) -> datetime:
        return datetime.now(UTC) + self._ahead
