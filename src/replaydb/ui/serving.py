"""A server for the pages, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from sqlalchemy import URL

from replaydb.errors import InvalidInputError
from replaydb.ui.app import application


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
    if token is None and not _is_loopback(host):
        expected = "127.0.0.1 or ::1, or a token (--token), as others can reach that address"
        raise InvalidInputError("host", expected, host)
    app = application(url, token=token, tokenizer=tokenizer)
    config = uvicorn.Config(
        app,
        access_log=False,  # addresses say what was looked at
        h11_max_incomplete_event_size=32_768,
        http="h11",
        lifespan="off",
        limit_concurrency=256,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=5,
        ws="none",
    )

    async def run() -> None:
        async with app.router.lifespan_context(app):
            with _listening(host, port) as listener:
                if ready is not None:
                    shown = f"[{host}]" if ":" in host else host
                    ready(f"http://{shown}:{listener.getsockname()[1]}/")
                await _Server(config).serve([listener])

    asyncio.run(run())


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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        expected = "an address and a port that are free"
        raise InvalidInputError("host, port", expected, f"{host}:{port} ({error})") from error
