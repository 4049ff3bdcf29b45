"""Deferral of exceptions raised by signal handlers while a blocking call is in progress."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

#: Signals that programs handle in Python, with handlers that may raise. SIGCHLD is one of them:
#: the handler of torch raises when a data worker dies.
_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD),
)

#: After this many seconds of deferral, the next interrupt is raised at once.
OVERDUE_SECONDS = 10.0


class Interrupts:
    """Exceptions of signal handlers, such as `KeyboardInterrupt`, deferred to the end of a block.

    Python runs signal handlers in the main thread, between any two bytecode instructions. An
    exception raised there can therefore interrupt a call at any point, even during its cleanup.
    Inside this block the handlers still run immediately, but what they raise is recorded and
    raised only at the end of the block. In other threads, which run no handlers, the block does
    nothing.

        with Interrupts() as interrupts:
            interrupts.notify(call.cancel)
            call.wait()
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._deferred: BaseException | None = None
        self._since = 0.0
        self._listener: Callable[[], object] | None = None
        # One bound method, because the handler that is installed is compared by identity.
        self._installed = self._handle

    @property
    def are_pending(self) -> bool:
        """Whether an exception has been deferred."""
        return self._deferred is not None

    @property
    def are_overdue(self) -> bool:
        """Whether the first exception has been deferred for too long."""
        return self.are_pending and time.monotonic() - self._since > OVERDUE_SECONDS

    def notify(self, listener: Callable[[], object]) -> None:
        """Call `listener` with every exception that is deferred from now on."""
        self._listener = listener

    def defer(self, error: BaseException) -> None:
        """Record an exception, to be raised at the end of the block."""
        if self._deferred is None:
            self._since = time.monotonic()
        elif error is not self._deferred and error.__context__ is None:
            error.__context__ = self._deferred
        self._deferred = error
        if self._listener is not None:
            self._listener()

    def __enter__(self) -> Self:
        try:
            if threading.current_thread() is threading.main_thread():
                for number in _SIGNALS:
                    self._replace(number)
        except BaseException as error:  # raised by a handler that is not replaced yet
            self.defer(error)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        while self._handlers:
            try:
                number, handler = next(iter(self._handlers.items()))
                if signal.getsignal(number) is self._installed:  # a handler may have set another
                    signal.signal(number, handler)
                del self._handlers[number]
            except BaseException as raised:  # raised by a handler that is already restored
                self.defer(raised)
        deferred, self._deferred = self._deferred, None
        try:
            if deferred is not None and deferred is not error:
                raise deferred
        finally:
            del deferred  # otherwise the exception and this frame refer to each other

    def _replace(self, number: int) -> None:
        handler = signal.getsignal(number)
        if callable(handler):
            self._handlers[number] = handler
            signal.signal(number, self._installed)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if self.are_overdue:
                raise
            self.defer(error)
