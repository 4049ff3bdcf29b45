"""A relay that delays what a server answers, as a network does, and counts bytes.

It is a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qs, urlsplit, urlunsplit

from benchmarks.processes import Child, children, serve

CHUNK_BYTES = 1 << 18


@asynccontextmanager
async def relayed(url: str) -> AsyncIterator[tuple[str, Relay]]:
    """Run a relay to the server of a URL during a block. Yield the URL of its other end."""
    async with children(__name__, 1, url) as [child]:
        port = await child.ask("start")
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        near = parts._replace(netloc=f"{user}{at}127.0.0.1:{port}", query="")
        yield urlunsplit(near), Relay(child)


class Relay:
    """A running relay."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def delay(self, seconds: float) -> None:
        """Delay every answer from now on."""
        await self._child.ask("delay", seconds)

    async def num_bytes(self) -> tuple[int, int]:
        """Return how many bytes it has read from the clients, and from the server."""
        from_clients, from_server = await self._child.ask("count")
        return from_clients, from_server


class _Forwarding:
    """Forwards connections to a server, and delays what it answers."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._delay = 0.0
        self._num_bytes = [0, 0]

    async def ask(self, what: str, seconds: float = 0.0) -> int | list[int]:
        """Start to listen and return the port, set the delay, or return the numbers of bytes."""
        if what == "delay":
            self._delay = seconds
        if what != "start":
            return self._num_bytes
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        folder = parse_qs(self._parts.query).get("host", [""])[0]
        port = self._parts.port or 5432
        if folder:
            upstream = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{port}")
        else:
            upstream = await asyncio.open_connection(self._parts.hostname or "127.0.0.1", port)
        with suppress(asyncio.CancelledError):  # the relay ends before its clients
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._forward(reader, upstream[1], is_answer=False))
                    both.create_task(self._forward(upstream[0], writer, is_answer=True))
            except* ConnectionError:
                pass  # one side has closed the connection

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            data = b"."
            while data:
                when, data = await waiting.get()
                if when > loop.time():
                    await asyncio.sleep(when - loop.time())
                writer.write(data)
                await writer.drain()
            writer.close()

        async with asyncio.TaskGroup() as delivering:
            delivering.create_task(deliver())
            data = b"."
            while data:
                data = await reader.read(CHUNK_BYTES)
                self._num_bytes[is_answer] += len(data)
                waiting.put_nowait((loop.time() + (self._delay if is_answer else 0.0), data))


async def _serve(url: str) -> None:
    await serve(_Forwarding(url).ask)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
