"""Processes of their own, made ready before any of them begins."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import psutil


class Child:
    """A module of this package as a program that serves: see `serve`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    async def ask(self, *arguments: object) -> Any:
        """Let it do its work with these arguments; what came of it."""
        await self.begin(*arguments)
        return json.loads(await self.line())

    async def begin(self, *arguments: object) -> None:
        """The same without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        await self._process.stdin.drain()

    async def line(self) -> str:
        """What it says next."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if not line:
            raise RuntimeError(f"a child has died with status {await self._process.wait()}")
        return line.rstrip("\n")

    async def rest(self) -> list[str]:
        """Whole lines that it has said before it died."""
        assert self._process.stdout is not None
        text = (await self._process.stdout.read()).decode()
        return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]

    def kill(self) -> None:
        """As the system would: without a word."""
        self._process.kill()


@asynccontextmanager
async def children(module: str, count: int, *arguments: object) -> AsyncIterator[list[Child]]:
    """So many processes of a module, for the length of a block; all are ready."""
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *map(str, arguments)),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,  # an interrupt is for the parent, who ends them
            )
            stack.push_async_callback(_end, process)
            started.append(Child(process))
        for child in started:
            assert await child.line() == "ready"
        yield started


async def serve(work: Callable[..., Awaitable[Any]]) -> None:
    """Of a child: do work whenever it is asked for, until nobody can ask any more."""
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await work(*json.loads(line))), flush=True)


def cpu_seconds(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """What each of them, and each of their children, has used so far."""
    used = {}
    for process in processes:
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                used[one.pid] = times.user + times.system
    return used


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()
