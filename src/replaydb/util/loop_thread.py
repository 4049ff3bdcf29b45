"""A thread with an event loop of its own, and work that other threads run in it.

A transaction that holds locks must not wait for the caller's event loop, which computes rewards or
tokenizes for many milliseconds at a time. In this thread each answer of the server is processed at
once, so locks are held only as long as the server and the network need. Callers without an event
loop use one of the same kind.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, cast
from weakref import finalize

from replaydb.errors import DatabaseUnavailableError, StoreClosedError
from replaydb.util import threads
from replaydb.util.cancellation import T, run_to_completion

logger = logging.getLogger(__name__)

#: When the thread ends, what still runs may take this long to end by itself. Calls need it to learn
#: the outcome of their commits after their connections were terminated.
LEFT_SECONDS = 10.0
#: Time in which the garbage collector closes the connections of a store that it collects.
COLLECTED_SECONDS = 1.0

Work = Callable[[], Coroutine[Any, Any, T]]


class Call(Generic[T]):
    """Work in the event loop of a thread, for another thread.

    Attributes:
        is_done: Whether the work has ended.
        has_result: Whether it has returned.
    """

    def __init__(self, work: Work[T], ended: Callable[[], object]) -> None:
        """Set the work, and a function that is called in the thread when the work has ended."""
        self.is_done = self.has_result = False
        self._work = work
        self._ended = ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submit the work to the loop, with the context variables of this thread."""
        self._loop = loop
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Cancel the work, or prevent it from starting; from any thread or signal handler."""
        self._is_cancelled = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop)

    def result(self) -> T:
        """Return what the work returned, or raise, once, what it raised."""
        error, self._error = self._error, None
        try:
            if isinstance(error, asyncio.CancelledError):  # cancelled with the loop
                raise StoreClosedError from error
            if error is not None:
                raise error
        finally:
            del error  # which would keep this frame alive, and with it what failed
        return cast("T", self._result)

    def _start(self) -> None:
        if self._is_cancelled:
            self._end(asyncio.CancelledError())
            return
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._ensure_end)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self._result = await self._work()
        except BaseException as error:  # the loop continues even after SystemExit
            self._end(error)
        else:
            self.has_result = True
            self._end(None)

    def _ensure_end(self, task: asyncio.Task[None]) -> None:
        if not self.is_done:  # cancelled before its first step
            self._end(asyncio.CancelledError())

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self.is_done = True
        self._ended()


class LoopThread:
    """A daemon thread with an event loop. It starts with the first call."""

    def __init__(
        self,
        name: str = "replaydb-database",
        workers: Executor | None = None,
        left_seconds: float = LEFT_SECONDS,
    ) -> None:
        """Set the name of the thread, the default executor of its loop, and `LEFT_SECONDS`."""
        self._name = name
        self._workers = workers
        self._left_seconds = left_seconds
        # A signal handler may make another call while this thread submits one.
        self._submitting = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread, with the context variables of the caller.

        If the caller is cancelled, the coroutine is cancelled, and has ended when this returns.

        Raises:
            DatabaseUnavailableError: No thread can be started.
            StoreClosedError: The thread ended before the coroutine.
        """
        caller, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            with suppress(RuntimeError):  # the event loop of the caller was closed meanwhile
                caller.call_soon_threadsafe(ended.set)

        call = Call(lambda: coroutine, end)
        try:
            self.submit(call)
        except BaseException:
            coroutine.close()
            raise
        try:
            await ended.wait()
        except asyncio.CancelledError:
            call.cancel()
            await run_to_completion(ended.wait())
            raise
        finally:
            if call.is_done:
                coroutine.close()  # it may never have been started
        return call.result()

    def submit(self, call: Call[Any]) -> None:
        """Begin a call. It starts before the thread ends. Raises errors as `run` does."""
        with self._submitting:
            if self.is_closed:
                raise StoreClosedError
            if self._loop is None:
                self._loop = self._started()
            call.begin(self._loop)

    def time(self, time: float) -> float:
        """Convert a time of the caller's loop. That of the thread has the usual clock."""
        return time - asyncio.get_running_loop().time() + monotonic()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function in the thread, soon. Does nothing if the thread does not run."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it was closed meanwhile
                self._loop.call_soon_threadsafe(callback)

    def stop(self) -> None:
        """Let the thread end when all that runs in it has ended. Idempotent."""
        with self._submitting:
            if not self.is_closed and self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self.is_closed = True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, if it was started."""
        if self._thread is not None:
            self._thread.join(timeout)

    async def close(self) -> None:
        """Let the thread end, and give it a moment for that."""
        self.stop()
        for _ in range(100):
            if not self.is_running:
                break
            await asyncio.sleep(0.001)  # `asyncio.to_thread` does not work at exit

    def _started(self) -> asyncio.AbstractEventLoop:
        """Start the thread and return its event loop."""
        loop: asyncio.AbstractEventLoop | None = None
        try:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=_serve,
                args=(loop, self._workers, self._left_seconds),
                name=self._name,
                daemon=True,
            )
            thread.start()
        except (OSError, RuntimeError) as error:  # too many files, or too many threads
            if loop is not None:
                loop.close()
            raise DatabaseUnavailableError(f"no thread can be started: {error}") from error
        self._thread = thread
        finalize(self, _stop_later, loop).atexit = False  # the thread is a daemon
        return loop


def _serve(loop: asyncio.AbstractEventLoop, workers: Executor | None, left_seconds: float) -> None:
    threads.enter()
    asyncio.set_event_loop(loop)
    if workers is not None:
        loop.set_default_executor(workers)
    try:
        _run_until_stopped(loop)
        if left := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(left, timeout=left_seconds))
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        if workers is not None:
            loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except BaseException:  # SystemExit of a task, which those that await the task get, too
            logger.exception("the thread of a store continues after an error")
        else:
            return


def _stop_later(loop: asyncio.AbstractEventLoop) -> None:
    """End the thread of a store that was never closed, when its connections were collected."""
    with suppress(RuntimeError):  # it was closed
        loop.call_soon_threadsafe(loop.call_later, COLLECTED_SECONDS, loop.stop)
