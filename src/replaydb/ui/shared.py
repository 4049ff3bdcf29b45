"""What many look at is read once: an answer is shared as long as it is fresh."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")

#: Answers that are kept.
MOST_KEPT = 256
#: Seconds that finding one may take.
MOST_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Answer:
    task: asyncio.Task[Any]
    asked_at: float

    def is_of_use(self, max_age: float) -> bool:
        """Whether it is fresh, or on its way."""
        if not self.task.done():
            return True
        if self.task.cancelled() or self.task.exception() is not None:
            return False
        return asyncio.get_running_loop().time() - self.asked_at <= max_age


class Shared:
    """Answers by what they are about; within `async with` they can be asked for."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, _Answer] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for answer in self._answers.values():
            answer.task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await answer.task

    async def answer(self, about: Hashable, max_age: float, ask: Callable[[], Awaitable[T]]) -> T:
        """An answer; whoever asks while somebody does waits for the same one.

        Args:
            about: What it is about.
            max_age: Seconds that it is fresh.
            ask: What finds it.

        Raises:
            TimeoutError: It takes too long.
        """
        answer = self._answers.get(about)
        if answer is None or not answer.is_of_use(max_age):
            answer = _Answer(asyncio.create_task(_made(ask)), asyncio.get_running_loop().time())
            self._answers[about] = answer
            while len(self._answers) > MOST_KEPT:
                self._answers.pop(next(iter(self._answers))).task.cancel()
        found: T = await asyncio.shield(answer.task)  # others wait for it, whoever goes away
        return found


async def _made(ask: Callable[[], Awaitable[T]]) -> T:
    async with asyncio.timeout(MOST_SECONDS):
        return await ask()
