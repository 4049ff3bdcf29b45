"""Who may look, at what cost, and what a browser may do with a page."""

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

from replaydb import checks
from replaydb.errors import InvalidInputError
from replaydb.ui.failures import LOGGED, failure
from replaydb.ui.pages import page

logger = logging.getLogger(__name__)

#: Sent with every answer. Scripts and styles are files of ours; nothing is embedded or evaluated.
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

#: Names of this machine for itself: a page of others whose name was made to lead here has another.
LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)

#: Letters of a token at least.
LEAST_TOKEN = 16
#: Bytes of an address at most, and of a form.
MOST_ADDRESS = 8192
#: Seconds until an answer has begun, and until it has ended.
ANSWER_SECONDS = 20.0
DOWNLOAD_SECONDS = 600.0
#: Seconds that a part of an answer may wait for whoever is to read it.
STALLED_SECONDS = 30.0
#: Requests that are worked on at once, and requests that wait.
AT_ONCE = 8
MOST_WAITING = 64
#: Of these, such as may read all groups of a buffer: a core of the database's, not all of them.
SCANS_AT_ONCE = 1
#: Answers that are sent in parts, and seconds that others wait for their turn.
DOWNLOADS_AT_ONCE = 2
BUSY_SECONDS = 10.0


class Door:
    """Whoever looks says the token once; a cookie, from which it cannot be told, says it then.

    A browser shows a cookie to every port of a host, and so to servers of others there: whoever
    runs one can look as long as the token is the same, but not say it.

    Args:
        token: What is to be said.

    Raises:
        InvalidInputError: It is too short.
    """

    def __init__(self, token: str) -> None:
        checks.string("token", token)
        if len(token) < LEAST_TOKEN:
            raise InvalidInputError("token", f"at least {LEAST_TOKEN} characters", len(token))
        self._token = token.encode()
        self._session = hmac.digest(self._token, b"replaydb ui", hashlib.sha256).hex()
        self._cookie = f"replaydb_ui_{self._session[:8]}"
        self._session = self._session[8:]

    async def refusal(self, request: Request) -> Response | None:
        """As of `Guard`."""
        if request.method == "POST":
            return await self._logged_in(request)
        if "token" in request.query_params:
            if not self._is_token(request.query_params["token"]):
                return _login(request, "That is not the token.")
            answer = page(request, "again.html", here=_here(request))
            self._give_session(request, answer)
            return answer
        if self._knows(request) or request.url.path.startswith("/static/"):
            return None
        if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            # Whoever follows a link from elsewhere does not show the cookie: but from here, again.
            return page(request, "again.html", here=_here(request))
        return _login(request, None)

    def _knows(self, request: Request) -> bool:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            raw = token.encode("latin-1").strip()  # headers are read as that, whatever they are
            return hmac.compare_digest(raw, self._token) or self._is_token(token.strip())
        session = request.cookies.get(self._cookie, "")
        return hmac.compare_digest(session.encode(), self._session.encode())

    def _is_token(self, said: str) -> bool:
        return hmac.compare_digest(said.encode(errors="replace"), self._token)

    async def _logged_in(self, request: Request) -> Response:
        """The answer to the form, which is sent to the address that is wanted."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_ADDRESS:
                return failure(request, 413, "A token is shorter than that.")
        (said,) = parse_qs(body.decode("latin-1")).get("token", [""])[:1]
        if not self._is_token(said):
            return _login(request, "That is not the token.")
        answer = RedirectResponse(_here(request), 303)
        self._give_session(request, answer)
        return answer

    def _give_session(self, request: Request, answer: Response) -> None:
        answer.set_cookie(
            self._cookie,
            self._session,
            httponly=True,
            samesite="strict",
            secure=_is_https(request),
        )


class Guard:
    """Lets requests through that may be answered, and sees to it that each ends.

    Args:
        app: What answers.
        door: Where the token is asked for; None: nobody is asked, but only this machine let in.
        is_scan: Whether a request may read all groups of a buffer.
    """

    def __init__(
        self, app: ASGIApp, *, door: Door | None = None, is_scan: Callable[[Request], bool]
    ) -> None:
        self._app = app
        self._door = door
        self._is_scan = is_scan
        self._scans = asyncio.Semaphore(SCANS_AT_ONCE)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._downloads = asyncio.Semaphore(DOWNLOADS_AT_ONCE)
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        answering = _Answering(send, self._downloads)
        try:
            async with AsyncExitStack() as stack, asyncio.timeout(ANSWER_SECONDS) as limit:
                answer = await self._refusal(request)
                if answer is None:
                    stack.callback(answering.let_go)
                    await self._turn(request, answering)
                    answering.ends_by(limit)
                    await self._app(scope, receive, answering.send)
                    return
        except TimeoutError:
            reason = "The store may be away; or ask for less: a narrower filter, or one task."
            answer = failure(request, 504, reason)
        except _BusyError:
            answer = failure(request, 503, "Too many look, or download, at once.", Retry_After="5")
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            answer = failure(request, 500, LOGGED)
        if answering.begun:
            raise ConnectionError("the answer was broken off")
        await answer(scope, receive, _Answering(send, self._downloads).send)

    async def _refusal(self, request: Request) -> Response | None:
        """What is answered instead of what was asked for; None: let it through."""
        if self._door is None and not LOOPBACK.fullmatch(request.headers.get("Host", "")):
            return failure(request, 421, "Without a token only localhost is answered.")
        if request.method not in ("GET", "HEAD") and not (self._door and request.method == "POST"):
            return failure(request, 405, "There is nothing to change here.", Allow="GET, HEAD")
        if len(request.scope["path"]) + len(request.scope["query_string"]) > MOST_ADDRESS:
            return failure(request, 414, f"It may have {MOST_ADDRESS:,} bytes.")
        if _is_embedded(request):
            return failure(request, 403, "Pages of others may link here, and nothing else.")
        return None if self._door is None else await self._door.refusal(request)

    async def _turn(self, request: Request, answering: _Answering) -> None:
        """Wait for one. Those who wait to read all groups keep no others waiting."""
        if self._waiting >= MOST_WAITING:
            raise _BusyError
        self._waiting += 1
        try:
            if self._is_scan(request):
                await answering.hold(self._scans)
            await answering.hold(self._turns)
        finally:
            self._waiting -= 1


class _BusyError(Exception):
    pass


class _Answering:
    """An answer under way: one that comes in parts holds a turn of downloads, not one of pages."""

    def __init__(self, send: Send, downloads: asyncio.Semaphore) -> None:
        self._send = send
        self._downloads = downloads
        self._turns: list[asyncio.Semaphore] = []
        self._limit: asyncio.Timeout | None = None
        self._start: Message | None = None
        self.begun = False

    async def hold(self, turns: asyncio.Semaphore) -> None:
        """Wait for one of these turns."""
        await turns.acquire()
        self._turns.append(turns)

    def ends_by(self, limit: asyncio.Timeout) -> None:
        """It has so much time."""
        self._limit = limit

    def let_go(self) -> None:
        """It needs no turn any more."""
        while self._turns:
            self._turns.pop().release()

    async def send(self, message: Message) -> None:
        """Send a part of it; the headers go with the first."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
            self._start = message
            return
        if self._start is not None:
            await self._begin(self._start, is_whole=not message.get("more_body"))
            self._start = None
        await self._sent(message)

    async def _begin(self, start: Message, *, is_whole: bool) -> None:
        self.let_go()  # whoever is slow to read keeps nobody else waiting
        if self._limit is not None:
            if not is_whole:
                try:
                    async with asyncio.timeout(BUSY_SECONDS):
                        await self.hold(self._downloads)
                except TimeoutError:
                    raise _BusyError from None
            self._limit.reschedule(asyncio.get_running_loop().time() + DOWNLOAD_SECONDS)
        self.begun = True
        await self._sent(start)

    async def _sent(self, message: Message) -> None:
        async with asyncio.timeout(STALLED_SECONDS):
            await self._send(message)


def _is_https(request: Request) -> bool:
    """Whether the browser speaks TLS, to this server or to a proxy in front of it.

    The header is believed from any address: a client that makes it up only keeps its own browser
    from sending the cookie without TLS.
    """
    forwarded = request.headers.get("X-Forwarded-Proto", "").partition(",")[0]
    return "https" in (request.url.scheme, forwarded.strip().lower())


def _login(request: Request, problem: str | None) -> Response:
    answer = page(request, "login.html", status=401, problem=problem)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _here(request: Request) -> str:
    """The address that was asked for, from itself, without the token."""
    query = urlencode([it for it in request.query_params.multi_items() if it[0] != "token"])
    name = request.url.path.rpartition("/")[2]
    return f"./{name}{'?' if query else ''}{query}"


def _is_embedded(request: Request) -> bool:
    """Whether a page from elsewhere wants this as a part of itself."""
    site = request.headers.get("Sec-Fetch-Site", "none")
    return site not in ("none", "same-origin") and (
        request.headers.get("Sec-Fetch-Mode") != "navigate"
    )
