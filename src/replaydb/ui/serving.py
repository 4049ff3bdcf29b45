"""HTTP server of the web UI."""

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

#: Seconds to receive the request line and headers of a request.
HEAD_SECONDS = 10.0
#: Seconds that pending responses get to complete when the server stops.
SHUTDOWN_SECONDS = 1


def serve(
    url: str | URL,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    tokenizer: Path | None = None,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve the web UI of a store until SIGINT (Ctrl-C) or SIGTERM.

    Args:
        url: URL of the store, as for `Store.open`. It is opened read-only.
        host: Address to listen on. An address other than loopback requires a token.
        port: TCP port; 0 selects a free one.
        token: Access token that clients must send; at least 16 characters. None: no authentication.
        tokenizer: Path of a local Hugging Face tokenizer, a file or a folder, to decode the tokens
            of episodes. None: token ids are shown.
        ready: Called with the URL of the web UI once the server accepts connections.

    Raises:
        InvalidInputError: The server cannot listen on the address, the address requires a token,
            the token is too short, or there is no such tokenizer.
        NotSupportedError: No installed package can read the tokenizer.
        DatabaseError: There is no such store, or it cannot be read.
    """
    if token is None and host.lower() not in ("localhost", "127.0.0.1", "::1"):
        expected = "localhost, 127.0.0.1 or ::1, or a token (--token) for other addresses"
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
        access_log=False,  # URLs reveal what a user viewed
        h11_max_incomplete_event_size=32_768,
        http=_Protocol,
        lifespan="off",
        limit_concurrency=256,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        ws="none",
    )
    return _Server(config)


def _quiet(app: ASGIApp) -> ASGIApp:
    """Suppress the tracebacks of responses that are cancelled when the server stops."""

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return quiet


class _Protocol(H11Protocol):
    """HTTP protocol that closes connections whose request line and headers take too long."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._limit = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        """Start the timeout at the first byte of a request, and stop it after the headers."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timeout()
        elif self._limit is None:
            self._limit = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._stop_timeout()
        super().connection_lost(exc)

    def _stop_timeout(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


class _Server(uvicorn.Server):
    """Server that returns after SIGINT or SIGTERM, so that the store is closed in order."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT and SIGTERM, without raising the signals again afterwards."""
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
        expected = "an address of this machine and a free port"
        raise InvalidInputError("host, port", expected, f"{host}:{port} ({error})") from error
