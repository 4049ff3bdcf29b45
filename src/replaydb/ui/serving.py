"""A server for the pages, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h11
import uvicorn
from sqlalchemy import URL
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from replaydb.errors import InvalidInputError
from replaydb.ui.app import application

#: Seconds until a request has said what it wants: what it asks for and its headers.
HEAD_SECONDS = 10.0
#: Seconds that answers under way get at the end; a download that nobody reads takes them all.
END_SECONDS = 1


def serve(
    url: str | URL,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    tokenizer: Path | None = None,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve the pages over a store until Ctrl-C.

    Args:
        url: The store, as for `Store.open`; it is opened read-only.
        host: Address to listen on. Any but one of this machine alone needs a token.
        port: 0 takes a free one.
        token: What whoever looks has to say first; at least 16 characters.
        tokenizer: A tokenizer of Hugging Face on this machine, a file or a folder, that decodes the
            tokens of episodes.
        ready: Called with the address of the pages when they can be looked at.

    Raises:
        InvalidInputError: The address cannot be listened on, or not without a token; or there is no
            such tokenizer.
        NotSupportedError: Nothing is installed that reads the tokenizer.
        DatabaseError: There is no such store, or it cannot be read.
    """
    if token is None and host.lower() not in ("localhost", "127.0.0.1", "::1"):
        expected = "localhost, 127.0.0.1 or ::1, or a token (--token): others may reach it"
        raise InvalidInputError("host", expected, host)
    app = application(url, token=token, tokenizer=tokenizer)

    async def run() -> None:
        async with app.router.lifespan_context(app):
            with _listening(host, port) as listener:
                if ready is not None:
                    shown = f"[{host}]" if ":" in host else host
                    ready(f"http://{shown}:{listener.getsockname()[1]}/")
                await _server(app).serve([listener])

    asyncio.run(run())


def _server(app: ASGIApp) -> _Server:
    config = uvicorn.Config(
        _quiet(app),
        access_log=False,  # addresses say what was looked at
        h11_max_incomplete_event_size=32_768,
        http=_Protocol,
        lifespan="off",
        limit_concurrency=256,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=END_SECONDS,
        ws="none",
    )
    return _Server(config)


def _quiet(app: ASGIApp) -> ASGIApp:
    """The same, without the traceback of an answer that is broken off as the server ends."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return answering


class _Protocol(H11Protocol):
    """HTTP with those who say what they want: whoever keeps the others waiting is hung up on."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._limit = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """The head of a request has so long from its first byte."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._in_time()
        elif self._limit is None:
            self._limit = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


class _Server(uvicorn.Server):
    """One that returns when it is told to end, so that the store is closed in peace."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C ends it, and is not raised again afterwards."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        expected = "an address and a port that are free"
        raise InvalidInputError("host, port", expected, f"{host}:{port} ({error})") from error
