"""Worker processes that exchange lines with the test."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Child:
    """A worker process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def receive(self) -> dict[str, Any]:
        """Return the next line that the worker prints; raise its stderr if it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            raise AssertionError((await self._process.stderr.read()).decode())
        facts: dict[str, Any] = json.loads(line)
        return facts

    async def send(self, line: str) -> None:
        """Send a line to the standard input of the worker."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()


@asynccontextmanager
async def child(role: str, *arguments: str) -> AsyncIterator[Child]:
    """Run a worker of `processes.worker` in the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "processes.worker", role, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
