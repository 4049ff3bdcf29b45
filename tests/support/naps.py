"""When a call that waits has really fallen asleep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replaydb.database.engines.signals import Signal


class Naps:
    """Counts how often the one call that waits goes to sleep until a signal comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._taken = 0
        self._twice = asyncio.Event()
        wait = Signal.wait

        async def counted(signal: Signal, *arguments: Any) -> None:
            self._taken += 1
            if self._taken == 2:
                self._twice.set()
            await wait(signal, *arguments)

        monkeypatch.setattr(Signal, "wait", counted)
        # It does not look again without a signal.
        monkeypatch.setattr("replaydb.database.engines.signals.RECHECK_SECONDS", 600.0)

    async def settled(self) -> None:
        """Wait until only a change will wake the call: it wakes once after it fell asleep."""
        async with asyncio.timeout(60):
            await self._twice.wait()
