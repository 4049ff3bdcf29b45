"""Detection of the moment when a waiting call has gone to sleep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replaydb.database.runtime.signals import Signal


class WaitCounter:
    """Counts how often a waiting call goes to sleep until a signal arrives. For a single call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        self._twice = asyncio.Event()
        wait = Signal.wait

        async def counted(signal: Signal, *arguments: Any) -> None:
            self._count += 1
            if self._count == 2:
                self._twice.set()
            await wait(signal, *arguments)

        monkeypatch.setattr(Signal, "wait", counted)
        # No periodic checks without a signal.
        monkeypatch.setattr("replaydb.database.runtime.signals.RECHECK_SECONDS", 600.0)

    async def until_asleep(self) -> None:
        """Wait until only a change can wake the call, which is after it has slept once."""
        async with asyncio.timeout(60):
            await self._twice.wait()
