"""Cache that shares results between concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")

#: Maximum number of cached results.
MAX_ENTRIES = 256
#: Maximum number of seconds to compute a result.
MAX_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Entry:
    task: asyncio.Task[Any]
    started_at: float

    def is_usable(self, max_age: float) -> bool:
        """Whether it is being computed, or is fresh and not an error."""
        if not self.task.done():
            return True
        if self.task.cancelled() or self.task.exception() is not None:
            return False
        return asyncio.get_running_loop().time() - self.started_at <= max_age


class SharedCache:
    """Results by key. Use it within `async with`, which cancels computations at its end."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for entry in self._entries.values():
            entry.task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await entry.task

    async def get(self, key: Hashable, max_age: float, compute: Callable[[], Awaitable[T]]) -> T:
        """Return a result, computed at most once for concurrent callers.

        Args:
            key: The key of the result.
            max_age: Seconds for which a result is reused, counted from the start of its
                computation.
            compute: Computes the result. Errors are not cached.

        Raises:
            TimeoutError: The computation takes longer than `MAX_SECONDS`.
        """
        entry = self._entries.get(key)
        if entry is None or not entry.is_usable(max_age):
            task = asyncio.create_task(_compute(compute))
            entry = _Entry(task, asyncio.get_running_loop().time())
            self._entries[key] = entry
            while len(self._entries) > MAX_ENTRIES:
                self._entries.pop(next(iter(self._entries))).task.cancel()
        # A cancelled caller must not cancel the computation that others wait for.
        result: T = await asyncio.shield(entry.task)
        return result


async def _compute(compute: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(MAX_SECONDS):
        return await compute()
