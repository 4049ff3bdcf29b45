"""The thread of a store: any number of callers, Ctrl-C, forks, and its end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from replaydb import InvalidInputError, NotSupportedError, StoreClosedError, blocking
from replaydb.blocking import thread
from support.groups import group


def test_many_threads(buffer: blocking.Buffer) -> None:
    def put(i: int) -> list[int]:
        return buffer.put(group(f"g{i}"))

    with ThreadPoolExecutor(16) as pool:
        ids = [one for found in pool.map(put, range(64)) for one in found]
        assert len(set(ids)) == 64
        leased = list(pool.map(lambda _: buffer.lease(4, ttl=60).batch.ids, range(16)))
    assert len({one for found in leased for one in found}) == 64


def test_a_wait_does_not_hold_up_other_threads(buffer: blocking.Buffer) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffer.sample, 1, timeout=30)
        ids = buffer.put(group())
        assert waiting.result(timeout=10).ids == ids


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """It raises, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_call_that_waits(buffer: blocking.Buffer) -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    rescue = threading.Timer(30, buffer.put, [group()])  # of a call that waits on
    rescue.start()
    with pytest.raises(KeyboardInterrupt):
        buffer.sample(1, timeout=None)
    rescue.cancel()
    assert buffer.count() == 0
    buffer.put(group())
    assert buffer.draws() == []


@pytest.mark.parametrize("early", [True, False], ids=["while it waits", "with the answer"])
def test_ctrl_c_leaves_no_lease_behind(
    buffer: blocking.Buffer, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    buffer.put([group("a"), group("b")])

    class Interrupted(Future[Any]):
        was_asked = False

        def result(self, timeout: float | None = None) -> Any:
            if self.was_asked:
                return super().result(timeout)
            self.was_asked = True
            monkeypatch.undo()  # the next call is waited for in peace
            if not early:
                super().result(30)
            raise KeyboardInterrupt

    monkeypatch.setattr(thread, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.lease(2, ttl=600)
    assert buffer.leases() == []
    assert buffer.count(statuses="completed") == 2


def test_closed(url: str) -> None:
    before = set(threading.enumerate())
    store = blocking.Store.open(url)
    buffer = store.buffer("math")
    store.close()
    store.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(StoreClosedError):
        buffer.count()


def test_a_store_that_cannot_be_opened_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(InvalidInputError):
        blocking.Store.open("mysql://nowhere/at_all")
    assert set(threading.enumerate()) <= before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_told_to_open_its_own(buffer: blocking.Buffer, store: blocking.Store) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            buffer.count()
        except NotSupportedError as error:
            store.close()
            code = 0 if f"process {os.getppid()}" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert buffer.count() == 0
