"""A thread with an event loop, and calls into it that wait."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic, TypeVar

from replaydb.errors import NotSupportedError, StoreClosedError

R = TypeVar("R")

#: What is left open when the process ends may take so long to end with it.
EXIT_SECONDS = 5.0


class _Call(Generic[R]):
    """Work in the event loop that another thread waits for, until it leaves."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, R]],
        unwanted: Callable[[R], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._work = work
        self._unwanted = unwanted
        self._task: asyncio.Task[None] | None = None
        self.answer: Future[R] = Future()
        self.ended = threading.Event()

    def start(self) -> None:
        """In the loop, first."""
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: self.ended.set())

    def leave(self) -> None:
        """In the loop, when nobody waits any more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            result = await self._work()
        except BaseException as error:
            if not self.answer.cancelled():
                self.answer.set_exception(error)
            return
        try:
            self.answer.set_result(result)
        except InvalidStateError:  # nobody waits for it any more
            if self._unwanted is not None:
                await self._unwanted(result)


class EventLoopThread:
    """The thread and event loop of one store, and the process they belong to.

    The thread is a daemon, and what is left open is closed at exit: a script that ends without
    closing its store, as one that crashes does, must end.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            stopped = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), stopped))
            await stopped.wait()

        self._thread = threading.Thread(
            target=lambda: asyncio.run(serve()), name="replaydb", daemon=True
        )
        self._thread.start()
        self._loop, self._stopped = started.result()
        self._open = True
        atexit.register(self._at_exit)

    def run(
        self,
        work: Callable[[], Coroutine[Any, Any, R]],
        timeout: float | None = None,
        unwanted: Callable[[R], Coroutine[Any, Any, None]] | None = None,
    ) -> R:
        """Run in the event loop; wait for the result.

        Who is interrupted while waiting (by Ctrl-C) waits for the call to be cancelled, which is
        soon. A result that came nevertheless is given to `unwanted`.

        Raises:
            StoreClosedError: The store was closed.
            NotSupportedError: It was opened by another process.
        """
        if os.getpid() != self._process:
            raise NotSupportedError(
                f"this store was opened by process {self._process}, before a fork; open one here"
            )
        if not self._open:
            raise StoreClosedError
        call = _Call(work, unwanted)
        self._loop.call_soon_threadsafe(call.start)
        try:
            return call.answer.result(timeout)
        except BaseException:
            if call.answer.cancel():
                self._loop.call_soon_threadsafe(call.leave)
                call.ended.wait(EXIT_SECONDS)
            elif unwanted is not None and call.answer.exception() is None:
                result = call.answer.result()
                self.run(lambda: unwanted(result))
            raise

    def close_with(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `last` run at exit, where nobody closes before."""
        self._last = last

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run `last` and end the thread. Idempotent; does nothing in a forked process."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._open:
                return
            try:
                if last is not None:
                    self.run(last)
            finally:
                self._stop()
                self._thread.join()

    def _stop(self) -> None:
        self._open = False
        atexit.unregister(self._at_exit)
        self._loop.call_soon_threadsafe(self._stopped.set)

    def _at_exit(self) -> None:
        if os.getpid() != self._process or not self._open:
            return
        if self._last is not None:
            with suppress(Exception):
                self.run(self._last, EXIT_SECONDS)
        self._stop()
        self._thread.join(EXIT_SECONDS)
