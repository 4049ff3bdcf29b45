"""Ctrl-C and other signals: an interrupted call has ended before the exception is raised."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from replaydb import Fifo, blocking
from replaydb.blocking import interrupts
from replaydb.blocking.thread import EventLoopThread
from support.groups import group, groups


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Let SIGINT raise, even if the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def thread() -> Iterator[EventLoopThread]:
    started = EventLoopThread()
    yield started
    started.close()


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def send(number: int = signal.SIGINT) -> None:
    """Send a signal to the thread that waits for the call."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


async def until_cancelled(events: list[str]) -> None:
    """Send an interrupt, and take some time to end after the cancellation."""
    send()
    try:
        await asyncio.sleep(30)
    finally:
        events.append("cancelled")
        send()  # a second one, during the cleanup
        await asyncio.sleep(0)
        events.append("cleaned up")


def test_a_call_is_cancelled_and_awaited(thread: EventLoopThread) -> None:
    events: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        thread.run(lambda: until_cancelled(events))
    assert events == ["cancelled", "cleaned up"]


def test_a_signal_that_does_not_end_the_wait_is_noticed(thread: EventLoopThread) -> None:
    """For example one that arrives just before the thread blocks, or in another thread."""

    ended: list[str] = []

    async def work() -> None:
        signal.raise_signal(signal.SIGINT)  # in the thread of the loop
        await asyncio.sleep(30)
        ended.append("uninterrupted")

    with pytest.raises(KeyboardInterrupt):
        thread.run(work)
    assert not ended


def test_a_shielded_call_is_not_cancelled(thread: EventLoopThread) -> None:
    events: list[str] = []

    async def work() -> None:
        send()
        await asyncio.sleep(0.01)
        events.append("ended")

    with pytest.raises(KeyboardInterrupt):
        thread.run(work, shielded=True)
    assert events == ["ended"]


def test_the_exception_of_any_handler_is_deferred(thread: EventLoopThread) -> None:
    events: list[str] = []

    def raise_timeout(number: int, frame: FrameType | None) -> None:
        events.append("raised")
        raise TimeoutError("of a handler")

    async def work() -> None:
        send(signal.SIGALRM)
        try:
            await asyncio.sleep(30)
        finally:
            events.append("cancelled")

    with handled(signal.SIGALRM, raise_timeout), pytest.raises(TimeoutError, match="of a handler"):
        thread.run(work)
    assert events == ["raised", "cancelled"]


def test_a_handler_that_does_not_raise_cancels_nothing(thread: EventLoopThread) -> None:
    events: list[int] = []
    ran = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        events.append(number)
        signal.signal(number, other)  # the new handler stays
        ran.set()

    def other(number: int, frame: FrameType | None) -> None:
        raise AssertionError

    async def work() -> str:
        send(signal.SIGUSR1)
        await asyncio.to_thread(ran.wait, 30)
        return "result"

    with handled(signal.SIGUSR1, note):
        assert thread.run(work) == "result"
        assert signal.getsignal(signal.SIGUSR1) is other
    assert events == [signal.SIGUSR1]


def test_a_call_that_does_not_end_can_be_left(
    thread: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a further interrupt, if its cancellation takes too long."""
    monkeypatch.setattr(interrupts, "OVERDUE_SECONDS", -1)
    left = threading.Event()

    async def work() -> None:
        try:
            await until_cancelled([])
        finally:
            left.wait(30)

    with pytest.raises(KeyboardInterrupt):
        thread.run(work)
    left.set()


def test_a_call_into_another_loop_is_cancelled_and_awaited(thread: EventLoopThread) -> None:
    events: list[str] = []
    other = EventLoopThread()
    with pytest.raises(KeyboardInterrupt):
        thread.run(lambda: other.run_from(lambda: until_cancelled(events)))
    assert events == ["cancelled", "cleaned up"]
    other.close()


def test_a_waiting_call_is_ended(buffer: blocking.Buffer) -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    rescue = threading.Timer(30, buffer.put, [group()])  # of a call that waits on
    rescue.start()
    with pytest.raises(KeyboardInterrupt):
        buffer.sample(1, timeout=None)
    rescue.cancel()
    assert buffer.count() == 0
    buffer.put(group())
    assert buffer.draws() == []


# Every point of a call. Python runs handlers where functions are entered and where C functions have
# returned (and where loops jump back). A profiler is notified of these.


def interrupted_at(n: int, call: Callable[[], object]) -> str | None:
    """Interrupt a call at its n-th point. Returns the function, or None if it has fewer."""
    count, where = 0, None

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count, where
        if event not in ("call", "c_return"):
            return
        count += 1
        if count == n:
            where = frame.f_code.co_qualname
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return where


def every_point(call: Callable[[], object]) -> Iterator[str]:
    """Interrupt a call once at each of its points."""
    n = 1
    while (where := interrupted_at(n, call)) is not None:
        yield where
        n += 1
    assert n > 30, "the call was not interrupted at all its points"


@pytest.fixture
def _one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handle one signal only: the others would multiply the points."""
    monkeypatch.setattr(interrupts, "_SIGNALS", (signal.SIGINT,))


#: Functions on whose entry an interrupt leaves a lease until its ttl, see docs/training.md.
WINDOWS = {"Lease.__enter__", "_Managed.__exit__"}
#: Exceptions in callbacks of the garbage collector are printed and do not interrupt.
exhaustive = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@exhaustive
@pytest.mark.usefixtures("_one_signal")
def test_a_lease_interrupted_at_any_point(buffer: blocking.Buffer) -> None:
    buffer.update_settings(on_ack="return", max_attempts=10**6)
    buffer.put(groups(2))

    def take() -> None:
        with buffer.lease(1, ttl=600):
            pass

    windows = []
    for where in every_point(take):
        for left in buffer.leases():
            windows.append(where)
            buffer.revoke(left.id)
    assert set(windows) <= WINDOWS


@exhaustive
@pytest.mark.usefixtures("_one_signal")
def test_a_put_interrupted_at_any_point(buffer: blocking.Buffer) -> None:
    fresh = [group("put-0")]
    absent = []
    for number, _ in enumerate(every_point(lambda: buffer.put(fresh))):
        if not buffer.find(uids=fresh[0].group_uid):
            absent.append(fresh[0].group_uid)
        fresh[:] = [group(f"put-{number + 1}")]
    assert absent
    assert buffer.find(uids=absent) == []


@exhaustive
@pytest.mark.usefixtures("_one_signal")
def test_a_batch_that_was_not_returned_is_the_next_one(buffer: blocking.Buffer) -> None:
    """No batch is acked that the caller did not get, and none is skipped."""
    buffer.put(groups(300))
    seen: list[int] = []
    taken: list[list[int]] = [[]]

    def take() -> None:
        taken[0] = loader.__next__()

    with buffer.loader(
        1, Fifo(), lease=True, prefetch=0, ttl=600, collate=lambda batch: batch.ids
    ) as loader:
        for _ in every_point(take):
            seen.extend(taken[0])
            taken[0] = []
        seen.extend(taken[0])
        step = loader.state_dict()["step"]
    assert seen == sorted(seen)
    assert step == len(seen)
    acked = [one.id for one in buffer.find(statuses="archived", limit=None)]
    assert sorted(acked) == seen


@exhaustive
@pytest.mark.usefixtures("_one_signal")
def test_opening_interrupted_at_any_point(url: str) -> None:
    def threads() -> int:
        return sum(one.name == "replaydb" for one in threading.enumerate())

    before = threads()
    opened: list[blocking.Store] = []
    for _ in every_point(lambda: opened.append(blocking.Store.open(url))):
        for one in opened:
            one.close()
        assert threads() == before
        opened.clear()
