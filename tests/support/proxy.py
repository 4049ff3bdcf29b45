"""Fault-injecting proxy for PostgreSQL: it parses the protocol and fails at chosen messages.

    with running_proxy(postgresql_url) as proxy:
        async with Store.open(proxy.url) as store:
            proxy.rule = cut_commits("answer", every=3)

A rule decides about every message in order. The proxy runs in a thread with its own event loop, so
a test that blocks its event loop does not block the network. All functions are thread-safe.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

Sender = Literal["client", "server"]
Moment = Literal["request", "answer", "flight"]

#: SSLRequest and GSSENCRequest. The proxy declines them, because it must read the messages.
_ENCRYPTION_REQUESTS = {80877103, 80877104}
_WRITES = (b"INSERT", b"UPDATE", b"DELETE", b"MERGE", b"COPY")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Message:
    """A complete protocol message, before it is forwarded."""

    sender: Sender
    kind: bytes
    """Message type: b"Q", b"P", b"B" of a client, b"C", b"D" of a server; b"" for the first one."""
    body: bytes
    wrote: bool
    """Whether the current transaction has inserted, updated or deleted rows so far."""

    @property
    def asks_to_commit(self) -> bool:
        """Whether it is a client's COMMIT, as a query or in a Parse message."""
        if self.sender != "client" or self.kind not in (b"Q", b"P"):
            return False
        sql = self.body if self.kind == b"Q" else self.body.partition(b"\0")[2]
        return sql.lstrip()[:6].upper() == b"COMMIT"

    @property
    def committed(self) -> bool:
        """Whether it is the server's response to a successful COMMIT."""
        return (self.sender, self.kind, self.body) == ("server", b"C", b"COMMIT\0")


@dataclass(frozen=True)
class Fate:
    """Handling of a message: how much of it is forwarded, and what happens then."""

    num_bytes: int | None = None
    """Number of bytes to forward; None: the complete message."""
    then: Literal["continue", "close", "stall", "orphan"] = "continue"
    """"close": close both connections. "stall": stall this direction of the connection until
    `Proxy.heal`. "orphan": close the client's connection; the server still gets the message, but
    nothing after it."""
    delay: float = 0.0
    """Seconds before forwarding."""


PASS = Fate()
CLOSE = Fate(0, "close")
Rule = Callable[[Message], Fate]


def pass_all(message: Message) -> Fate:
    """A good network."""
    return PASS


def delay_all(seconds: float) -> Rule:
    """A slow network: every message is delayed."""
    return lambda message: Fate(delay=seconds)


def on_nth(wanted: Callable[[Message], bool], fate: Fate, *, first: int, every: int | None) -> Rule:
    """Apply a fate to the `first` matching message, counted from 1, and then to each `every`-th."""
    count = 0

    def rule(message: Message) -> Fate:
        nonlocal count
        if not wanted(message):
            return PASS
        count += 1
        late = count - first
        return fate if late == 0 or (every and late > 0 and late % every == 0) else PASS

    return rule


def cut_commits(
    moment: Moment = "answer",
    *,
    first: int = 1,
    every: int | None = None,
    reads: bool = False,
    delay: float = 0.0,
) -> Rule:
    """Close connections around the COMMIT of transactions that wrote something.

    Args:
        moment: "answer": the server has committed, but the client gets no response. "request":
            COMMIT does not reach the server. "flight": the client is disconnected when it sends
            COMMIT, which the server gets `delay` seconds later.
        first: Number of the first COMMIT to interrupt, counted from 1.
        every: Also interrupt each `every`-th COMMIT after the first; None: only the first.
        reads: Include transactions that wrote nothing.
        delay: Delay in seconds, only for "flight".
    """

    def wanted(message: Message) -> bool:
        is_commit = message.committed if moment == "answer" else message.asks_to_commit
        return is_commit and (reads or message.wrote)

    fate = Fate(then="orphan", delay=delay) if moment == "flight" else CLOSE
    return on_nth(wanted, fate, first=first, every=every)


def break_messages(
    then: Literal["close", "stall"],
    sender: Sender,
    kinds: bytes,
    *,
    num_bytes: int = 8,
    at_least: int = 0,
    first: int = 1,
    every: int | None = None,
) -> Rule:
    """Forward `num_bytes` of a message, and then close or stall the connection.

    Args:
        then: What happens to the connection.
        sender: Sender of the messages.
        kinds: Message types, such as b"B" (a client's parameters) or b"DC" (a server's responses).
        num_bytes: Number of bytes that are forwarded, including the five of the message header.
        at_least: Minimum size of the body in bytes, to select payloads.
        first: Number of the first message to interrupt, counted from 1.
        every: Also interrupt each `every`-th message after the first; None: only the first.
    """

    def wanted(message: Message) -> bool:
        fits = message.sender == sender and message.kind and message.kind in kinds
        return bool(fits) and len(message.body) >= at_least

    return on_nth(wanted, Fate(num_bytes, then), first=first, every=every)


class Proxy:
    """A proxy on 127.0.0.1, created by `running_proxy`."""

    url: str
    """URL of the target database through this proxy."""

    def __init__(self, target: str) -> None:
        self.rule: Rule = pass_all
        self.num_accepted = 0
        """Number of accepted connections."""
        self.num_committed = 0
        """Number of commits that wrote, as reported by the server, interrupted or not."""
        self.num_cut = 0
        """Number of messages that were not forwarded completely, or stalled."""
        self._parts = urlsplit(target)
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._stalled: set[Sender] = set()
        self._changed = asyncio.Event()

    def drop(self) -> None:
        """Close all connections on both sides. New ones are accepted."""
        self._call(self._drop())

    def refuse(self) -> None:
        """Stop listening. Existing connections stay open."""
        self._call(self._refuse())

    def stall(self, *senders: Sender) -> None:
        """Stop forwarding messages of these senders (default: both) without closing connections."""
        self._call(self._stall(senders or ("client", "server")))

    def route_to(self, target: str) -> None:
        """Connect new clients to the server of another URL, as after a failover."""
        self._parts = urlsplit(target)

    def heal(self) -> None:
        """Remove the rule, forward stalled messages, and accept new connections."""
        self._call(self._heal())

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._links)

    async def until_cut(self, count: int = 1) -> None:
        """Wait until the rule has interrupted this number of messages."""
        waiting = asyncio.run_coroutine_threadsafe(self._until_cut(count), self._loop)
        await asyncio.wrap_future(waiting)

    def start(self) -> None:
        """Start listening, in a thread."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._call(self._listen())
        name = unquote(self._parts.username or "")
        password = f":{quote(self._parts.password)}" if self._parts.password else ""
        address = f"{quote(name)}{password}@127.0.0.1:{self._port}"
        self.url = f"postgresql://{address}{self._parts.path}"

    def close(self) -> None:
        """Close all connections and stop the thread."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if (server := self._server) is None:
            return
        self._server = None
        for listening in server.sockets:
            self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(0)  # an accepted connection can only join a server that is open
        server.close()

    async def _drop(self) -> None:
        for link in self._links:
            link.task.cancel()

    async def _stall(self, senders: tuple[Sender, ...]) -> None:
        self._stalled.update(senders)

    async def _heal(self) -> None:
        self.rule = pass_all
        self._stalled.clear()
        for link in self._links:
            link.stalled.clear()
        self.note_change()
        await self._listen()

    async def _until_cut(self, count: int) -> None:
        while self.num_cut < count:
            await self._changed.wait()

    async def _close(self) -> None:
        await self._refuse()
        while tasks := asyncio.all_tasks() - {_current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        port = self._parts.port or 5432
        folder = parse_qs(self._parts.query).get("host", [""])[0]
        if folder.startswith("/"):
            return await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{port}")
        return await asyncio.open_connection(self._parts.hostname or "127.0.0.1", port)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        task = self._loop.create_task(self._relay(reader, writer))
        task.add_done_callback(lambda _: writer.transport.abort())  # also if it never began

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            server_reader, server_writer = await self._connect()
            link = _Link(self, _current_task(), writer, server_writer)
            self._links.add(link)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(link.pump("client", reader, server_writer))
                    group.create_task(link.pump("server", server_reader, writer))
            except* (OSError, asyncio.IncompleteReadError, _Cut):
                pass
            finally:
                self._links.discard(link)
                link.abort()

    def note_change(self) -> None:
        """Wake all waiting tasks of the proxy, which then check their conditions again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until_flowing(self, link: _Link, sender: Sender) -> None:
        """Wait until neither the proxy nor the connection is stalled in this direction."""
        while sender in self._stalled or sender in link.stalled:
            await self._changed.wait()


class _Cut(Exception):
    """The rule ended this connection."""


class _Link:
    """A client connection with its connection to the server."""

    def __init__(
        self,
        proxy: Proxy,
        task: asyncio.Task[Any],
        client: asyncio.StreamWriter,
        server: asyncio.StreamWriter,
    ) -> None:
        self.task = task
        self.stalled: set[Sender] = set()
        self._proxy = proxy
        self._client = client
        self._server = server
        self._wrote = False
        self._orphaned = False

    def abort(self) -> None:
        """Close both connections at once."""
        self._client.transport.abort()
        self._server.transport.abort()

    async def pump(
        self, sender: Sender, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward one direction, message by message."""
        if sender == "client":
            first = await self._first_message(reader)
            await self._forward(Message(sender, b"", first[4:], False), first, writer)
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(int.from_bytes(head[1:], "big") - 4)
            message = Message(sender, head[:1], body, self._wrote)
            self._note(message)
            await self._forward(message, head + body, writer)

    async def _first_message(self, reader: asyncio.StreamReader) -> bytes:
        """Read the startup message of a client, after declining encryption."""
        while True:
            head = await reader.readexactly(8)
            if int.from_bytes(head[4:], "big") not in _ENCRYPTION_REQUESTS:
                return head + await reader.readexactly(int.from_bytes(head[:4], "big") - 8)
            self._client.write(b"N")

    def _note(self, message: Message) -> None:
        if message.sender == "server" and message.kind == b"C":
            if message.body.startswith(_WRITES):
                self._wrote = True
            elif message.body in (b"COMMIT\0", b"ROLLBACK\0"):
                self._proxy.num_committed += message.committed and self._wrote
                self._wrote = False

    async def _forward(self, message: Message, data: bytes, writer: asyncio.StreamWriter) -> None:
        await self._proxy.wait_until_flowing(self, message.sender)
        if self._orphaned and message.sender == "server":
            raise _Cut
        fate = self._proxy.rule(message)
        if fate.then == "orphan":
            self._orphaned = True
            self._client.transport.abort()
        if fate.delay:
            await asyncio.sleep(fate.delay)
        writer.write(data[: fate.num_bytes])
        await writer.drain()
        if fate.then != "continue":
            self._proxy.num_cut += 1
            self._proxy.note_change()
        match fate.then:
            case "stall":
                self.stalled.add(message.sender)
                await self._proxy.wait_until_flowing(self, message.sender)
                writer.write(data[fate.num_bytes :])
            case "orphan":
                await asyncio.Event().wait()  # until the server's response raises _Cut
            case "close":
                raise _Cut
            case "continue":
                pass


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@contextmanager
def running_proxy(target: str) -> Iterator[Proxy]:
    """Run a proxy to the PostgreSQL database of this URL for the block."""
    proxy = Proxy(target)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
