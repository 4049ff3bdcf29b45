"""A bad network: a relay to PostgreSQL that reads the protocol and fails at a chosen message.

    with running_proxy(postgresql_url) as proxy:
        async with Store.open(proxy.url) as store:
            proxy.rule = cut_commits("answer", every=3)

A rule is asked about every message, in the order in which they come, and says what becomes of it.
The relay runs in a thread with a loop of its own, so what a test blocks does not block the network.
Everything here may be called from any thread.
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

#: SSLRequest and GSSENCRequest: what is read here must be plain, so the relay says no.
_ENCRYPTION_REQUESTS = {80877103, 80877104}
_WRITES = (b"INSERT", b"UPDATE", b"DELETE", b"MERGE", b"COPY")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Message:
    """A whole message of the protocol, before it is passed on."""

    sender: Sender
    kind: bytes
    """Its type: b"Q", b"P", b"B" of a client, b"C", b"D" of a server; b"" for the very first."""
    body: bytes
    wrote: bool
    """Whether the transaction in progress has inserted, updated or deleted anything yet."""

    @property
    def asks_to_commit(self) -> bool:
        """A client's COMMIT, however it is sent, if the statement is parsed with it."""
        if self.sender != "client" or self.kind not in (b"Q", b"P"):
            return False
        sql = self.body if self.kind == b"Q" else self.body.partition(b"\0")[2]
        return sql.lstrip()[:6].upper() == b"COMMIT"

    @property
    def committed(self) -> bool:
        """The server's answer that a transaction is committed."""
        return (self.sender, self.kind, self.body) == ("server", b"C", b"COMMIT\0")


@dataclass(frozen=True)
class Fate:
    """What becomes of a message: so many bytes of it are passed on, and then something happens."""

    num_bytes: int | None = None
    """None: all of it."""
    then: Literal["go on", "close", "stall", "orphan"] = "go on"
    """"close" both ends; "stall" this direction of the connection until `Proxy.heal`; "orphan":
    the client's end is closed, while the server hears the message and then nothing more."""
    delay: float = 0.0
    """Seconds before any of it is passed on."""


PASS = Fate()
CLOSE = Fate(0, "close")
Rule = Callable[[Message], Fate]


def pass_all(message: Message) -> Fate:
    """A good network."""
    return PASS


def delay_all(seconds: float) -> Rule:
    """A slow network: every message takes so much longer."""
    return lambda message: Fate(delay=seconds)


def on_nth(wanted: Callable[[Message], bool], fate: Fate, *, first: int, every: int | None) -> Rule:
    """Count the messages that are `wanted` from 1; the `first` and, from it on, `every` so many."""
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
    """Cut the connection around the COMMIT of transactions that wrote something.

    Args:
        moment: "answer": the server has committed, the client never hears of it. "request": COMMIT
            never reaches the server. "flight": the client is cut off as it asks, and the server
            gets its COMMIT `delay` seconds later.
        first: Which COMMIT is the first to be cut, counted from 1.
        every: Cut every so many from there on; None: only that one.
        reads: Count and cut the commits of transactions that wrote nothing, too.
        delay: Only for "flight".
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
    """Pass `num_bytes` of a message on, and then close, or stall.

    Args:
        then: What happens to the connection.
        sender: Whose messages.
        kinds: Their types, such as b"B" (a client's parameters) or b"DC" (a server's answers).
        num_bytes: Bytes that go through, the five of the message's head among them.
        at_least: Only messages with bodies of so many bytes, such as payloads.
        first: Which of them is the first, counted from 1.
        every: And every so many from there on; None: only that one.
    """

    def wanted(message: Message) -> bool:
        fits = message.sender == sender and message.kind and message.kind in kinds
        return bool(fits) and len(message.body) >= at_least

    return on_nth(wanted, Fate(num_bytes, then), first=first, every=every)


class Proxy:
    """A relay on 127.0.0.1; made by `running_proxy`."""

    url: str
    """The database of the given URL, through this relay."""

    def __init__(self, target: str) -> None:
        self.rule: Rule = pass_all
        self.num_accepted = 0
        """Connections that were let in."""
        self.num_committed = 0
        """Commits of transactions that wrote, as answered by the server, cut off or not."""
        self.num_cut = 0
        """Messages that were not passed on whole: cut off, truncated or stalled."""
        self._parts = urlsplit(target)
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._stalled: set[Sender] = set()
        self._changed = asyncio.Event()

    def drop(self) -> None:
        """Close all connections, both ends. New ones may come."""
        self._call(self._drop())

    def refuse(self) -> None:
        """Let no new connections in: nobody listens any more. Those there are stay."""
        self._call(self._refuse())

    def stall(self, *senders: Sender) -> None:
        """Pass on nothing more of these senders (default: of both), and keep everything open."""
        self._call(self._stall(senders or ("client", "server")))

    def lead_to(self, target: str) -> None:
        """Connect whoever comes from now on to the server of another URL, as a failover does."""
        self._parts = urlsplit(target)

    def heal(self) -> None:
        """Good again: no rule, what was stalled flows on, new connections are let in."""
        self._call(self._heal())

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    async def until_cut(self, count: int = 1) -> None:
        """Wait until the rule has cut or stalled so many messages."""
        waiting = asyncio.run_coroutine_threadsafe(self._until_cut(count), self._loop)
        await asyncio.wrap_future(waiting)

    def start(self) -> None:
        """Listen, in a thread."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._call(self._listen())
        name = unquote(self._parts.username or "")
        password = f":{quote(self._parts.password)}" if self._parts.password else ""
        address = f"{quote(name)}{password}@127.0.0.1:{self._port}"
        self.url = f"postgresql://{address}{self._parts.path}"

    def close(self) -> None:
        """End everything."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._relay, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

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
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        port = self._parts.port or 5432
        folder = parse_qs(self._parts.query).get("host", [""])[0]
        if folder.startswith("/"):
            return await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{port}")
        return await asyncio.open_connection(self._parts.hostname or "127.0.0.1", port)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
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
        writer.transport.abort()

    def note_change(self) -> None:
        """Let everything that waits in the relay look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until_flowing(self, link: _Link, sender: Sender) -> None:
        """Until neither the relay nor the connection is stalled in this direction."""
        while sender in self._stalled or sender in link.stalled:
            await self._changed.wait()


class _Cut(Exception):
    """The rule ended this connection."""


class _Link:
    """One client's connection, and the one to the server that was made for it."""

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
        """Close both ends at once."""
        self._client.transport.abort()
        self._server.transport.abort()

    async def pump(
        self, sender: Sender, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on one direction, message by message."""
        if sender == "client":
            first = await self._first_message(reader)
            await self._pass_on(Message(sender, b"", first[4:], False), first, writer)
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(int.from_bytes(head[1:], "big") - 4)
            message = Message(sender, head[:1], body, self._wrote)
            self._note(message)
            await self._pass_on(message, head + body, writer)

    async def _first_message(self, reader: asyncio.StreamReader) -> bytes:
        """What a client opens with; encryption is declined before."""
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

    async def _pass_on(self, message: Message, data: bytes, writer: asyncio.StreamWriter) -> None:
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
        if fate.then != "go on":
            self._proxy.num_cut += 1
            self._proxy.note_change()
        match fate.then:
            case "stall":
                self.stalled.add(message.sender)
                await self._proxy.wait_until_flowing(self, message.sender)
                writer.write(data[fate.num_bytes :])
            case "orphan":
                await asyncio.Event().wait()  # until the server's answer ends this
            case "close":
                raise _Cut
            case "go on":
                pass


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@contextmanager
def running_proxy(target: str) -> Iterator[Proxy]:
    """A relay to the PostgreSQL database of this URL, for as long as the block lasts."""
    proxy = Proxy(target)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
