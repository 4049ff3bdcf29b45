"""In-memory S3 services behind one endpoint that can route each request to any of them."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import cycle
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from support.s3 import BUCKET

_PREFIX = f"/{BUCKET}/"
_KEY = re.compile(rb"<Key>([^<]*)</Key>")
_XML = "Content-Type: application/xml"
_MODIFIED = "Last-Modified: Wed, 21 Oct 2026 07:28:00 GMT"


def _e_tag(data: bytes) -> str:
    return f'"{zlib.crc32(data):08x}"'


def _facts(data: bytes) -> list[str]:
    return [f"ETag: {_e_tag(data)}", _MODIFIED]


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client.

    Attributes:
        kind: `PUT`, `GET`, `HEAD`, `LIST` or `DELETE`.
        key: Key of the object, or the start of a list; empty if several objects are deleted.
    """

    kind: str
    key: str


@dataclass(slots=True)
class Service:
    """A service with its own bucket."""

    objects: dict[str, bytes] = field(default_factory=dict)

    def named(self, ending: str) -> dict[str, bytes]:
        """Return the objects whose keys have this ending."""
        return {key: data for key, data in self.objects.items() if key.endswith(ending)}


#: Status, body and headers of a response.
Answer = tuple[int, bytes, list[str]]
#: Returns a faulty response instead of a correct one.
Fault = Callable[[Answer], Answer]


def not_found(answer: Answer) -> Answer:
    """404, as if the object did not exist."""
    return 404, b"<Error><Code>NoSuchKey</Code></Error>", [_XML]


def short(answer: Answer) -> Answer:
    """206 for the first half of the range, with matching headers."""
    _, body, facts = answer
    half = body[: len(body) // 2]
    start, size = re.findall(r"bytes (\d+)-\d+/(\d+)", facts[-1])[0]
    where = f"Content-Range: bytes {start}-{int(start) + len(half) - 1}/{size}"
    return 206, half, [*facts[:-1], where]


def cut(answer: Answer) -> Answer:
    """206 for the first half of the range, with headers for the full range."""
    status, body, facts = answer
    return status, body[: len(body) // 2], facts


def flipped(answer: Answer) -> Answer:
    """A flipped bit in the last byte."""
    status, body, facts = answer
    return status, body[:-1] + bytes([body[-1] ^ 1]), facts


def page(answer: Answer) -> Answer:
    """200 with HTML, as from a proxy that requires a login."""
    return (
        200,
        b"<html><body>Please log in</body></html>",
        ["Content-Type: text/html", *_facts(b"")],
    )


FAULTS: dict[str, Fault] = {
    "404": not_found,
    "short": short,
    "cut": cut,
    "flipped": flipped,
    "page": page,
}


def times(count: int, fault: Fault) -> Fault:
    """Limit a fault to a number of responses."""
    left = iter(range(count))
    return lambda answer: answer if next(left, None) is None else fault(answer)


class Endpoint:
    """One address of two services.

    Attributes:
        right: The service of the store; it has the marker once a store was opened.
        wrong: Another service, initially empty, with a bucket of the same name.
        route: Chooses the service of a request; initially `right`.
        requests: All requests so far.
        fault: Applied to correct responses with content of packs.
        readers: Number of the connection for each request for content of a pack.
        page: Maximum number of objects in a response to `LIST`.
    """

    def __init__(self) -> None:
        self.right, self.wrong = Service(), Service()
        self.route: Callable[[Request], Service] = lambda request: self.right
        self.requests: list[Request] = []
        self.fault: Fault = lambda answer: answer
        self.readers: list[int] = []
        self.page = 1000
        self._port = 0
        self._connections = 0

    @property
    def url(self) -> str:
        """A payload location at this endpoint."""
        return f"s3://{BUCKET}/tests?endpoint=http://127.0.0.1:{self._port}&region=us-east-1"

    def route_to(self, service: Service) -> None:
        """Route every request to one service."""
        self.route = lambda request: service

    def alternate(self) -> None:
        """Route requests to the two services in turn."""
        turns: Iterator[Service] = cycle((self.right, self.wrong))
        self.route = lambda request: next(turns)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection."""
        self._connections += 1
        connection = self._connections
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().splitlines()
                method, target, _ = first.split(" ")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                status, answer, facts = self._answer(method, target, headers, body)
                if method == "GET" and urlsplit(target).path.endswith(".pack"):
                    self.readers.append(connection)
                    if status == 206:
                        status, answer, facts = self.fault((status, answer, facts))
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(answer)}", *facts, "", ""]
                writer.write("\r\n".join(lines).encode() + (b"" if method == "HEAD" else answer))
        writer.close()

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        """Answer one request."""
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, True).items()}
        key = unquote(parts.path).removeprefix(_PREFIX)
        if "list-type" in query:
            objects = self._routed("LIST", query.get("start-after", ""))
            return 200, self._listing(objects, query), [_XML]
        if "delete" in query:
            objects = self._routed("DELETE", "")
            keys = _KEY.findall(body)
            for each in keys:
                objects.pop(each.decode(), None)
            deleted = b"".join(b"<Deleted><Key>%b</Key></Deleted>" % each for each in keys)
            return 200, b"<DeleteResult>%b</DeleteResult>" % deleted, [_XML]
        objects = self._routed(method, key)
        if method == "PUT":
            expected = headers.get("if-match")
            if expected is not None and (key not in objects or expected != _e_tag(objects[key])):
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", [_XML]
            objects[key] = body
            return 200, b"", _facts(body)
        if key not in objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", [_XML]
        if method == "DELETE":
            del objects[key]
            return 204, b"", []
        data = objects[key]
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", "")):
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            if start >= len(data):
                return 416, b"", []
            where = f"Content-Range: bytes {start}-{stop - 1}/{len(data)}"
            return 206, data[start:stop], [*_facts(data), where]
        return 200, data, _facts(data)

    def _routed(self, kind: str, key: str) -> dict[str, bytes]:
        """Return the objects of the service that gets this request."""
        request = Request(kind, key)
        self.requests.append(request)
        return self.route(request).objects

    def _listing(self, objects: dict[str, bytes], query: dict[str, str]) -> bytes:
        after = query.get("continuation-token", query.get("start-after", ""))
        keys = sorted(key for key in objects if key.startswith(query["prefix"]) and key > after)
        found, more = keys[: self.page], len(keys) > self.page
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}"
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{now}</LastModified>"
            f"<ETag>{_e_tag(objects[key])}</ETag><Size>{len(objects[key])}</Size></Contents>"
            for key in found
        )
        token = f"<NextContinuationToken>{found[-1]}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>{str(more).lower()}"
            f"</IsTruncated>{token}{contents}</ListBucketResult>"
        ).encode()


@asynccontextmanager
async def running_endpoint() -> AsyncIterator[Endpoint]:
    """Run an endpoint on loopback in this event loop for the block."""
    endpoint = Endpoint()
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint._port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
