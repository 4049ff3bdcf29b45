"""A thread with an event loop, and blocking calls into it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, cast

from replaydb.blocking.interrupts import Interrupts
from replaydb.errors import NotSupportedError, StoreClosedError
from replaydb.util import threads
from replaydb.util.cancellation import T
from replaydb.util.loop_thread import Call, LoopThread, Work

logger = logging.getLogger(__name__)

#: A signal does not end a wait if it arrives just before the thread blocks, or in another thread.
#: Its handler then runs after at most this many seconds.
WAKE_SECONDS = 0.5

#: Maximum time in seconds to close an open store at exit.
EXIT_SECONDS = 5.0


class _Call(Call[T]):
    """Work that a thread waits for."""

    def __init__(self, work: Work[T]) -> None:
        # A bare lock stays consistent wherever a waiter is interrupted, unlike a condition or an
        # event, and a signal handler may make another call while this one waits.
        self._done = threading.Lock()
        self._done.acquire()
        super().__init__(work, self._done.release)

    def wait(self, timeout: float = -1) -> None:
        """Wait until the work has ended."""
        if not self.is_done:
            self._done.acquire(timeout=timeout)

    def wait_through(self, interrupts: Interrupts) -> None:
        """Wait until the work has ended, and defer exceptions that interrupt the wait."""
        while not self.is_done:
            try:
                self.wait(WAKE_SECONDS)
            except BaseException as error:
                interrupts.defer(error)
                if interrupts.are_overdue:
                    raise


class EventLoopThread:
    """The thread and event loop of one store, and the process to which they belong.

    The thread is a daemon, and an open store is closed at exit, so that a script can end without
    closing its store.

    Attributes:
        last: Work to run before the thread ends: when it is closed, or at exit.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._closing = threading.RLock()
        self.last: Work[None] | None = None
        self._left: set[asyncio.Task[None]] = set()  # work that no thread waits for
        self._in_order = asyncio.Lock()
        workers = ThreadPoolExecutor(
            thread_name_prefix="replaydb-worker", initializer=threads.enter
        )
        self._thread = LoopThread("replaydb", workers, left_seconds=0)
        atexit.register(self._at_exit)

    def run(
        self,
        work: Work[T],
        *,
        shielded: bool = False,
        unwanted: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> T:
        """Run `work` in the event loop and wait for its result.

        If a signal handler raises meanwhile, such as on Ctrl-C, the work is cancelled and awaited,
        or never started; then the exception is raised. Nothing continues in the background.

        Args:
            work: Function that returns the coroutine to run.
            shielded: Whether to wait for the end of the work instead of cancelling it. The
                exception is raised then. If this thread must not wait, because it is one of a
                store or collects garbage, the work is only submitted, and its errors are logged.
            unwanted: Releases a result that cannot be returned because of such an exception.

        Raises:
            StoreClosedError: The store was closed.
            NotSupportedError: The store was opened by another process, or this is a thread of a
                store.
        """
        if shielded and not threads.can_wait():
            self._leave(work)
            return cast("T", None)  # what is shielded returns nothing
        if threads.is_of_a_store():
            raise NotSupportedError(
                "a blocking call cannot be made in a thread of a store, where it could wait for "
                "itself: not in a function or iterator that is passed to a call, a logging handler "
                "or a finalizer; make it before the call, and pass its result"
            )
        call: _Call[T] | None = None
        try:
            with Interrupts() as interrupts:
                call = _Call(work)
                if not shielded:
                    interrupts.notify(call.cancel)
                if shielded or not interrupts.are_pending:
                    self._send(call)
                    call.wait_through(interrupts)
                if not interrupts.are_pending:
                    result = call.result()
        except BaseException:
            if unwanted is not None and call is not None and call.has_result:
                made = call.result()
                self.run(lambda: unwanted(made), shielded=True)
            raise
        return result

    async def run_from(self, work: Work[T]) -> T:
        """Run `work` for a caller in another event loop, which may cancel it."""
        self._check_process()
        return await self._thread.run(work())

    def close(self, last: Work[None] | None = None) -> None:
        """Run `last`, by default the attribute, and end the thread.

        Idempotent. Does nothing in a forked process. An interrupt is raised after the thread has
        ended. Does not wait in a thread of a store, or if the garbage collector calls it.
        """
        if os.getpid() != self._process:
            return
        if not threads.can_wait() and self._thread.is_running:
            closing = threading.Thread(target=self.close, args=(last,), name="replaydb-close")
            closing.daemon = True
            closing.start()
            return
        with Interrupts() as interrupts, self._closing:
            last = last or self.last
            try:
                if last is not None and not self._thread.is_closed:
                    call = _Call(partial(self._finish, last))
                    self._send(call)
                    call.wait_through(interrupts)
                    call.result()
            finally:
                atexit.unregister(self._at_exit)
                self._thread.stop()
                self._thread.join()

    def _send(self, call: _Call[Any]) -> None:
        self._check_process()
        self._thread.submit(call)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise NotSupportedError(
                f"this store was opened by process {self._process}, before a fork; open another one"
            )

    def _leave(self, work: Work[Any]) -> None:
        """Submit work that no thread waits for.

        This takes no lock: a thread that holds it may wait for this one.
        """

        async def logged() -> None:
            try:
                async with self._in_order:
                    await work()
            except BaseException:
                logger.exception("the end of a block failed, for which no thread waited")

        def start() -> None:
            task = asyncio.ensure_future(logged())
            self._left.add(task)
            task.add_done_callback(self._left.discard)

        if self._thread.is_closed:
            raise StoreClosedError
        self._thread.call_soon(start)

    async def _finish(self, last: Work[None]) -> None:
        async with self._in_order:  # after the work that was left
            await last()

    def _at_exit(self) -> None:
        if os.getpid() != self._process or not self._thread.is_running:
            return
        if self.last is not None:
            with suppress(Exception):
                call = _Call(partial(self._finish, self.last))
                self._send(call)
                call.wait(EXIT_SECONDS)
        self._thread.stop()
        self._thread.join(EXIT_SECONDS)
