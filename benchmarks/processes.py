"""Child processes of benchmarks, all started before any of them begins to work."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import psutil


class Child:
    """A child process that runs a module of this package and serves requests: see `serve`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    async def ask(self, *arguments: object) -> Any:
        """Request work with these arguments. Return the result."""
        await self.begin(*arguments)
        return json.loads(await self.line())

    async def begin(self, *arguments: object) -> None:
        """Request work without waiting for the result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        await self._process.stdin.drain()

    async def line(self) -> str:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if not line:
            raise RuntimeError(f"a child process exited with status {await self._process.wait()}")
        return line.rstrip("\n")

    async def rest(self) -> list[str]:
        """Return the complete lines of its output until it exited."""
        assert self._process.stdout is not None
        text = (await self._process.stdout.read()).decode()
        return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


@asynccontextmanager
async def children(module: str, count: int, *arguments: object) -> AsyncIterator[list[Child]]:
    """Run `count` processes of a module during a block, which begins when all are ready."""
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *map(str, arguments)),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,  # only the parent gets an interrupt, and ends the children
            )
            stack.push_async_callback(_end, process)
            started.append(Child(process))
        for child in started:
            assert await child.line() == "ready"
        yield started


async def serve(work: Callable[..., Awaitable[Any]]) -> None:
    """Serve requests in a child process until the input ends."""
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await work(*json.loads(line))), flush=True)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process and its children have used, exited ones included."""
    used = 0.0
    for one in (*process.children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):
            used += sum(one.cpu_times()[:4])  # user, system, and both of its exited children
    return used


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()
