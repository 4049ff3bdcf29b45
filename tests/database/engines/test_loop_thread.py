"""The thread in which the transactions of PostgreSQL run."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextvars import ContextVar

import pytest

from replaydb import DatabaseUnavailableError, StoreClosedError
from replaydb.util import loop_thread
from replaydb.util.loop_thread import LoopThread

COLOR: ContextVar[str] = ContextVar("COLOR")


async def test_it_runs_coroutines_in_its_own_loop_with_the_context_of_the_caller() -> None:
    thread = LoopThread()

    async def found() -> tuple[str, int, asyncio.AbstractEventLoop]:
        return COLOR.get(), threading.get_ident(), asyncio.get_running_loop()

    COLOR.set("red")
    color, ident, loop = await thread.run(found())
    assert color == "red"
    assert ident != threading.get_ident()
    assert loop is not asyncio.get_running_loop()
    assert (await thread.run(found()))[1:] == (ident, loop)
    await thread.close()
    assert loop.is_closed()
    with pytest.raises(StoreClosedError):
        await thread.run(found())


async def test_a_cancelled_call_ends_when_its_coroutine_has_ended() -> None:
    thread, begun = LoopThread(), threading.Event()
    ended = []

    async def slow_to_end() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append(True)

    call = asyncio.create_task(thread.run(slow_to_end()))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        call.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended == [True]
    await thread.close()


async def test_a_call_that_is_cancelled_at_once_does_not_hang() -> None:
    thread = LoopThread()
    for _ in range(100):
        call = asyncio.create_task(thread.run(asyncio.sleep(60)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await thread.close()


async def test_what_runs_can_end_after_closing() -> None:
    thread = LoopThread()
    call = asyncio.create_task(thread.run(asyncio.sleep(0.3, "done")))
    await asyncio.sleep(0.05)
    await thread.close()
    assert await call == "done"


async def test_what_does_not_end_after_closing_raises() -> None:
    thread = LoopThread(left_seconds=0.05)
    call = asyncio.create_task(thread.run(asyncio.sleep(60)))
    await asyncio.sleep(0.05)
    await thread.close()
    with pytest.raises(StoreClosedError):
        await call


async def test_an_exit_in_a_task_does_not_end_the_thread() -> None:
    thread = LoopThread()

    async def leave() -> None:
        raise SystemExit(3)

    async def start() -> str:
        task = asyncio.create_task(leave())
        await asyncio.wait([task])
        return repr(task.exception())

    with pytest.raises(SystemExit):
        await thread.run(leave())
    assert await thread.run(start()) == "SystemExit(3)"
    await thread.close()


async def test_a_thread_that_was_never_closed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "COLLECTED_SECONDS", 0.0)
    thread = LoopThread()
    await thread.run(asyncio.sleep(0))
    loop = thread._loop
    del thread
    gc.collect()
    async with asyncio.timeout(60):
        while loop is not None and not loop.is_closed():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)


async def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DatabaseUnavailableError, match="no thread"):
        await LoopThread().run(asyncio.sleep(0))
