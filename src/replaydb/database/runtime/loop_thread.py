"""A thread with an event loop of its own, in which the transactions of a database run.

A transaction that holds locks must not wait for the caller's event loop, which computes rewards or
tokenizes for many milliseconds at a time. In this thread each answer of the server is processed at
once, so locks are held only as long as the server and the network need.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar, cast
from weakref import finalize

from replaydb.errors import DatabaseUnavailableError, StoreClosedError
from replaydb.util import threads
from replaydb.util.cancellation import run_to_completion

logger = logging.getLogger(__name__)

#: When the thread ends, what still runs may take this long to end by itself. Calls need it to learn
#: the outcome of their commits after their connections were terminated.
LEFT_SECONDS = 10.0
#: Time in which the garbage collector closes the connections of a store that it collects.
COLLECTED_SECONDS = 1.0

T = TypeVar("T")
#: What a coroutine returned or raised.
Outcome = tuple[T | None, BaseException | None]


class LoopThread:
    """A daemon thread with an event loop. It starts with the first call."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread, with the context variables of the caller.

        If the caller is cancelled, the coroutine is cancelled, and has ended when this returns.

        Raises:
            DatabaseUnavailableError: No thread can be started.
            StoreClosedError: The thread ended before the coroutine.
        """
        call = _Call(coroutine)
        try:
            loop = self._send(call.start)
        except BaseException:
            coroutine.close()
            raise
        try:
            await asyncio.wait([call.outcome])
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # the loop has ended, and with it the call
                loop.call_soon_threadsafe(call.cancel)
            await run_to_completion(asyncio.wait([call.outcome]))
            raise
        value, error = call.outcome.result()
        try:
            if isinstance(error, asyncio.CancelledError):  # when the thread ended
                raise StoreClosedError from error
            if error is not None:
                raise error
        finally:
            del call, error  # which would keep this frame alive, and with it what failed
        return cast("T", value)

    def time(self, time: float) -> float:
        """Convert a time of the caller's loop. That of the thread has the usual clock."""
        return time - asyncio.get_running_loop().time() + monotonic()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function in the thread, soon. Does nothing if the thread does not run."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it was closed meanwhile
                self._loop.call_soon_threadsafe(callback)

    async def close(self) -> None:
        """End the thread when all that runs in it has ended. A later call starts another one."""
        with self._starting:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            for _ in range(100):
                if not thread.is_alive():
                    break
                await asyncio.sleep(0.001)  # `asyncio.to_thread` does not work at exit

    def _send(self, callback: Callable[[], object]) -> asyncio.AbstractEventLoop:
        """Call a function in the thread, which is started if necessary. Return its event loop.

        The lock is held, so the thread does not end before it has called the function.
        """
        with self._starting:
            if self._loop is None:
                self._start()
            assert self._loop is not None  # noqa: S101 - it was started
            self._loop.call_soon_threadsafe(callback)
            return self._loop

    def _start(self) -> None:
        loop: asyncio.AbstractEventLoop | None = None
        try:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=_serve, args=(loop,), name="replaydb-database", daemon=True
            )
            thread.start()
        except (OSError, RuntimeError) as error:  # too many files, or too many threads
            if loop is not None:
                loop.close()
            raise DatabaseUnavailableError(f"no thread can be started: {error}") from error
        self._loop, self._thread = loop, thread
        finalize(self, _stop_later, loop).atexit = False  # the thread is a daemon


class _Call(Generic[T]):
    """A coroutine in the thread, and its outcome in the event loop of the caller."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._caller = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Outcome[T]] = self._caller.create_future()
        self._task: asyncio.Task[Outcome[T]] | None = None

    def start(self) -> None:
        """Start the coroutine. Call this in the thread."""
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._answer)

    def cancel(self) -> None:
        """Cancel the coroutine. Call this in the thread, after `start`."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> Outcome[T]:
        try:
            return await self._coroutine, None
        except BaseException as error:  # not raised here: SystemExit would end the thread
            return None, error

    def _answer(self, task: asyncio.Task[Outcome[T]]) -> None:
        if task.cancelled():  # before it began
            self._coroutine.close()
        outcome = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
        with suppress(RuntimeError):  # the event loop of the caller was closed meanwhile
            self._caller.call_soon_threadsafe(self._receive, outcome)

    def _receive(self, outcome: Outcome[T]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    threads.enter()
    asyncio.set_event_loop(loop)
    try:
        _run_until_stopped(loop)
        if left := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(left, timeout=LEFT_SECONDS))
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except BaseException:  # SystemExit of a task, which those that await the task get, too
            logger.exception("the thread of a database continues after an error")
        else:
            return


def _stop_later(loop: asyncio.AbstractEventLoop) -> None:
    """End the thread of a store that was never closed, when its connections were collected."""
    with suppress(RuntimeError):  # it was closed
        loop.call_soon_threadsafe(loop.call_later, COLLECTED_SECONDS, loop.stop)
