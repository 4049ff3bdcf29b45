"""Other processes of a test, which end with it."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Children come from a server that has imported everything already: they start in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["support.lives"])


class Worker:
    """A child process."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    async def ended(self, within: float = 300.0) -> int:
        """Wait for its end. Returns the exit code, negative for a signal."""
        await asyncio.to_thread(self._process.join, within)
        code = self._process.exitcode
        assert code is not None, "still running"
        return code


@contextmanager
def workers(*started: Worker) -> Iterator[tuple[Worker, ...]]:
    """None of them outlives the block."""
    try:
        yield started
    finally:
        for one in started:
            one.kill()


async def killed(crew: Sequence[Worker]) -> None:
    """Kill all of them, and wait until they are dead."""
    for one in crew:
        one.kill()
    await asyncio.gather(*(one.ended() for one in crew))
