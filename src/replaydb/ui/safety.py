"""Access control, request limits and security headers of the web UI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replaydb.domain import checks
from replaydb.errors import InvalidInputError
from replaydb.ui.failures import LOGGED, failure
from replaydb.ui.pages import page

logger = logging.getLogger(__name__)

#: Headers of every response. Scripts and styles are own files; nothing is embedded or evaluated.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

#: Allowed hosts without a token. Others are refused as protection against DNS rebinding.
LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)

#: Minimum number of characters of a token.
MIN_TOKEN = 16
#: Maximum number of bytes of a URL and of a form.
MAX_URL_BYTES = 8192
#: Seconds until a response must have begun, and until it must have ended.
RESPONSE_SECONDS = 20.0
DOWNLOAD_SECONDS = 600.0
#: Seconds that sending a chunk may wait for a client that does not read.
STALLED_SECONDS = 30.0
#: Maximum number of requests that are processed concurrently, and of requests that wait.
MAX_CONCURRENT = 8
MAX_WAITING = 64
#: Maximum number of concurrent requests that may read all groups of a buffer. They keep at most one
#: CPU core of the database busy.
MAX_SCANS = 1
#: Maximum number of concurrent streamed responses, and seconds that another one waits for a slot.
MAX_DOWNLOADS = 2
BUSY_SECONDS = 10.0


class TokenAuth:
    """Authentication by a token, which a browser exchanges for a session cookie.

    The cookie is derived from the token and does not reveal it. A browser sends the cookie to every
    port of the host. Another server on the host can therefore use the session until the token is
    changed, but cannot learn the token.

    Args:
        token: The access token.

    Raises:
        InvalidInputError: The token is too short.
    """

    def __init__(self, token: str) -> None:
        checks.string("token", token)
        if len(token) < MIN_TOKEN:
            raise InvalidInputError("token", f"at least {MIN_TOKEN} characters", len(token))
        self._token = token.encode()
        self._session = hmac.digest(self._token, b"replaydb ui", hashlib.sha256).hex()
        self._cookie = f"replaydb_ui_{self._session[:8]}"
        self._session = self._session[8:]

    async def refusal(self, request: Request) -> Response | None:
        """Return the response to a login or a refused request; None: the request may pass."""
        if request.method == "POST":
            return await self._log_in(request)
        if "token" in request.query_params:
            if not self._is_token(request.query_params["token"]):
                return _login(request, "Wrong token.")
            response = page(request, "again.html", here=_here(request))
            self._set_session(request, response)
            return response
        if self._is_authenticated(request) or request.url.path.startswith("/static/"):
            return None
        if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            # A browser omits the strict cookie after a link from another site, but sends it when
            # this page reloads.
            return page(request, "again.html", here=_here(request))
        return _login(request, None)

    def _is_authenticated(self, request: Request) -> bool:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            raw = token.encode("latin-1").strip()  # headers are decoded as Latin-1
            return hmac.compare_digest(raw, self._token) or self._is_token(token.strip())
        session = request.cookies.get(self._cookie, "")
        return hmac.compare_digest(session.encode(), self._session.encode())

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self._token)

    async def _log_in(self, request: Request) -> Response:
        """Answer the login form, which is posted to the requested URL."""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_URL_BYTES:
                return failure(request, 413, f"A form may have at most {MAX_URL_BYTES:,} bytes.")
        (text,) = parse_qs(body.decode("latin-1")).get("token", [""])[:1]
        if not self._is_token(text):
            return _login(request, "Wrong token.")
        response = RedirectResponse(_here(request), 303)
        self._set_session(request, response)
        return response

    def _set_session(self, request: Request, response: Response) -> None:
        response.set_cookie(
            self._cookie,
            self._session,
            httponly=True,
            samesite="strict",
            secure=_is_https(request),
        )


class Guard:
    """ASGI middleware that refuses unauthorized requests and limits time and concurrency.

    Args:
        app: The application.
        auth: Token authentication. None: no token, only loopback hosts are allowed.
        is_scan: Whether a request may read all groups of a buffer.
    """

    def __init__(
        self, app: ASGIApp, *, auth: TokenAuth | None = None, is_scan: Callable[[Request], bool]
    ) -> None:
        self._app = app
        self._auth = auth
        self._is_scan = is_scan
        self._scans = asyncio.Semaphore(MAX_SCANS)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._downloads = asyncio.Semaphore(MAX_DOWNLOADS)
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        sender = _ResponseSender(send, self._downloads)
        try:
            async with AsyncExitStack() as stack, asyncio.timeout(RESPONSE_SECONDS) as limit:
                response = await self._refusal(request)
                if response is None:
                    stack.callback(sender.release)
                    await self._acquire_slots(request, sender)
                    sender.limit = limit
                    await self._app(scope, receive, sender.send)
                    return
        except TimeoutError:
            reason = "The store may be unreachable, or the query too large: use a narrower filter."
            response = failure(request, 504, reason)
        except _BusyError:
            reason = "Too many concurrent requests or downloads. Retry in a few seconds."
            response = failure(request, 503, reason, Retry_After="5")
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            response = failure(request, 500, LOGGED)
        if sender.begun:
            raise ConnectionError("the response was interrupted")
        await response(scope, receive, _ResponseSender(send, self._downloads).send)

    async def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request that is refused; None: the request may pass."""
        if self._auth is None and not LOOPBACK.fullmatch(request.headers.get("Host", "")):
            reason = "Without a token only requests to localhost are answered."
            return failure(request, 421, reason)
        if request.method not in ("GET", "HEAD") and not (self._auth and request.method == "POST"):
            return failure(request, 405, "Only GET and HEAD are allowed.", Allow="GET, HEAD")
        if len(request.scope["path"]) + len(request.scope["query_string"]) > MAX_URL_BYTES:
            return failure(request, 414, f"A URL may have at most {MAX_URL_BYTES:,} bytes.")
        if _is_embedded(request):
            return failure(request, 403, "Other sites may link to these pages, but not embed them.")
        return None if self._auth is None else await self._auth.refusal(request)

    async def _acquire_slots(self, request: Request, sender: _ResponseSender) -> None:
        """Wait for the slots of a request. Waiting scans do not occupy slots of other requests."""
        if self._waiting >= MAX_WAITING:
            raise _BusyError
        self._waiting += 1
        try:
            if self._is_scan(request):
                await sender.acquire(self._scans)
            await sender.acquire(self._slots)
        finally:
            self._waiting -= 1


class _BusyError(Exception):
    pass


class _ResponseSender:
    """Sends one response. A streamed one occupies a slot of downloads instead of one of pages."""

    def __init__(self, send: Send, downloads: asyncio.Semaphore) -> None:
        self._send = send
        self._downloads = downloads
        self._slots: list[asyncio.Semaphore] = []
        self.limit: asyncio.Timeout | None = None  # extended when the response begins
        self._start: Message | None = None
        self.begun = False

    async def acquire(self, slots: asyncio.Semaphore) -> None:
        """Wait for a slot."""
        await slots.acquire()
        self._slots.append(slots)

    def release(self) -> None:
        """Release all slots."""
        while self._slots:
            self._slots.pop().release()

    async def send(self, message: Message) -> None:
        """Send an ASGI message. The start message is sent together with the first body."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
            self._start = message
            return
        if self._start is not None:
            await self._begin(self._start, is_streamed=bool(message.get("more_body")))
            self._start = None
        await self._send_in_time(message)

    async def _begin(self, start: Message, *, is_streamed: bool) -> None:
        self.release()  # a client that reads slowly must not block other requests
        if self.limit is not None:
            if is_streamed:
                try:
                    async with asyncio.timeout(BUSY_SECONDS):
                        await self.acquire(self._downloads)
                except TimeoutError:
                    raise _BusyError from None
            self.limit.reschedule(asyncio.get_running_loop().time() + DOWNLOAD_SECONDS)
        self.begun = True
        await self._send_in_time(start)

    async def _send_in_time(self, message: Message) -> None:
        async with asyncio.timeout(STALLED_SECONDS):
            await self._send(message)


def _is_https(request: Request) -> bool:
    """Whether the browser uses TLS, to this server or to a proxy in front of it.

    The header is trusted from any client: a forged one only prevents that client's own browser from
    sending the cookie without TLS.
    """
    forwarded = request.headers.get("X-Forwarded-Proto", "").partition(",")[0]
    return "https" in (request.url.scheme, forwarded.strip().lower())


def _login(request: Request, problem: str | None) -> Response:
    response = page(request, "login.html", status=401, problem=problem)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _here(request: Request) -> str:
    """Return the requested URL, relative to itself, without the token."""
    query = urlencode([it for it in request.query_params.multi_items() if it[0] != "token"])
    name = request.url.path.rpartition("/")[2]
    return f"./{name}{'?' if query else ''}{query}"


def _is_embedded(request: Request) -> bool:
    """Whether a page of another site requests this as an embedded resource."""
    site = request.headers.get("Sec-Fetch-Site", "none")
    return site not in ("none", "same-origin") and (
        request.headers.get("Sec-Fetch-Mode") != "navigate"
    )
