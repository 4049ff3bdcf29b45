"""The thread of a store: many callers, forks, and closing."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from replaydb import (
    DatabaseUnavailableError,
    InvalidInputError,
    NotSupportedError,
    StoreClosedError,
    blocking,
)
from replaydb.blocking.thread import EventLoopThread
from support.groups import group


def test_many_threads(buffer: blocking.Buffer) -> None:
    def put(i: int) -> list[int]:
        return buffer.put(group(f"g{i}"))

    with ThreadPoolExecutor(16) as pool:
        ids = [one for found in pool.map(put, range(64)) for one in found]
        assert len(set(ids)) == 64
        leased = list(pool.map(lambda _: buffer.lease(4, ttl=60).batch.ids, range(16)))
    assert len({one for found in leased for one in found}) == 64


def test_a_wait_does_not_block_other_threads(buffer: blocking.Buffer) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffer.sample, 1, timeout=30)
        ids = buffer.put(group())
        assert waiting.result(timeout=60).ids == ids


def test_closed(url: str) -> None:
    before = set(threading.enumerate())
    store = blocking.Store.open(url)
    buffer = store.buffer("math")
    store.close()
    store.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(StoreClosedError):
        buffer.count()


def test_a_cancelled_call_raises_store_closed() -> None:
    thread, began = EventLoopThread(), threading.Event()

    async def wait() -> None:
        began.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.run, wait)
        assert began.wait(30)
        thread.close()
        with pytest.raises(StoreClosedError):
            waiting.result(timeout=30)


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DatabaseUnavailableError, match="no thread"):
        blocking.Store.open("sqlite://")


def test_a_store_that_cannot_be_opened_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(InvalidInputError):
        blocking.Store.open("mysql://nowhere/at_all")
    assert set(threading.enumerate()) <= before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_store_cannot_be_used_after_a_fork(
    buffer: blocking.Buffer, store: blocking.Store
) -> None:
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
