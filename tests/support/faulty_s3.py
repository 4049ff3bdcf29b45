"""An S3 service in this process that gives wrong answers when told to.

with running_faulty_s3() as service:
    service.fault = once(not_found)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "payloads"
MODIFIED = "Wed, 21 Oct 2026 07:28:00 GMT"


@dataclass(frozen=True)
class Answer:
    """What the service sends."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


#: Replaces the right answer to a GET of a pack.
Fault = Callable[[Answer], Answer]


def not_found(answer: Answer) -> Answer:
    """404, as if there were no such object."""
    return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")


def short(answer: Answer) -> Answer:
    """206 for the first half of the range, with headers to match."""
    body = answer.body[: len(answer.body) // 2]
    span, _, size = answer.headers["Content-Range"].partition("/")
    start = int(span.split()[1].split("-")[0])
    changed = {"Content-Range": f"bytes {start}-{start + len(body) - 1}/{size}"}
    return Answer(206, body, answer.headers | changed)


def flipped(answer: Answer) -> Answer:
    """A bit of the last byte is another one."""
    body = answer.body[:-1] + bytes([answer.body[-1] ^ 1])
    return Answer(answer.status, body, answer.headers)


def page(answer: Answer) -> Answer:
    """200 with HTML, as proxies give to those who are not logged in."""
    body = b"<html><body>Please log in</body></html>"
    return Answer(200, body, {"Content-Type": "text/html", "ETag": '"0"'})


FAULTS: dict[str, Fault] = {"404": not_found, "short": short, "flipped": flipped, "page": page}


def times(count: int, fault: Fault) -> Fault:
    """The fault, for this number of answers."""
    left = iter(range(count))
    return lambda answer: answer if next(left, None) is None else fault(answer)


@dataclass
class FaultyS3:
    """The service.

    Attributes:
        port: Where it listens, on the loopback interface.
        fault: What becomes of answers to GET requests for packs; None: nothing.
        objects: What is stored, by key.
        requests: Number of requests, by method and by kind of object: `pack` or another.
        connections: Connections on which packs were asked for, one entry for each request.
    """

    port: int
    fault: Fault | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    connections: list[object] = field(default_factory=list)

    def url(self, prefix: str) -> str:
        """A payload location in its bucket."""
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.port}&region=us-east-1"

    def answer(self, method: str, target: str, span: str | None, body: bytes) -> Answer:
        """What a sound service answers."""
        parsed = urlsplit(target)
        key = unquote(parsed.path).removeprefix(f"/{BUCKET}").lstrip("/")
        if method == "PUT":
            self.objects[key] = body
            return Answer(200, headers={"ETag": '"0"'})
        if method == "POST":
            for one in ElementTree.fromstring(body).iter():  # noqa: S314 - the client wrote it
                if one.tag.endswith("Key"):
                    self.objects.pop(one.text or "", None)
            return Answer(200, b"<DeleteResult></DeleteResult>")
        if method == "DELETE":
            self.objects.pop(key, None)
            return Answer(204)
        if not key:
            prefix = parse_qs(parsed.query).get("prefix", [""])[0]
            return Answer(200, self._listing(prefix))
        if key not in self.objects:
            return not_found(Answer(200))
        return _content(self.objects[key], span)

    def _listing(self, prefix: str) -> bytes:
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>0</ETag>"
            "<LastModified>2026-10-21T07:28:00.000Z</LastModified></Contents>"
            for key, data in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()
        )


def _content(data: bytes, span: str | None) -> Answer:
    headers = {"ETag": '"0"', "Last-Modified": MODIFIED}
    if span is None:
        return Answer(200, data, headers)
    first, _, last = span.removeprefix("bytes=").partition("-")
    if int(first) >= len(data):
        return Answer(416, b"<Error><Code>InvalidRange</Code></Error>")
    body = data[int(first) : int(last) + 1]
    told = f"bytes {first}-{int(first) + len(body) - 1}/{len(data)}"
    return Answer(206, body, headers | {"Content-Range": told})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: ClassVar[FaultyS3]

    def _serve(self) -> None:
        service = self.service
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_pack = urlsplit(self.path).path.endswith(".pack")
        service.requests[self.command, "pack" if is_pack else "other"] += 1
        answer = service.answer(self.command, self.path, self.headers.get("Range"), body)
        if is_pack and self.command in ("GET", "HEAD"):
            service.connections.append(self.connection)
            if service.fault is not None and answer.status < 300 and self.command == "GET":
                answer = service.fault(answer)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def running_faulty_s3() -> Iterator[FaultyS3]:
    """A service that ends with the block."""

    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Handler.service = service = FaultyS3(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
