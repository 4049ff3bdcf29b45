"""Child processes of a test, which end with the test."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: The fork server has imported everything, so a child starts in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["support.child_processes"])


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
        """Wait until the process has ended; return its exit code, negative for a signal."""
        await asyncio.to_thread(self._process.join, within)
        code = self._process.exitcode
        assert code is not None, "still running"
        return code


@contextmanager
def workers(*started: Worker) -> Iterator[tuple[Worker, ...]]:
    """Kill the processes at the end of the block."""
    try:
        yield started
    finally:
        for one in started:
            one.kill()


async def kill_all(running: Sequence[Worker]) -> None:
    """Kill the processes and wait until they have ended."""
    for one in running:
        one.kill()
    await asyncio.gather(*(one.ended() for one in running))
