"""URLs of payload stores: a folder, or a bucket and a prefix. URLs with secrets are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from replaydb.errors import InvalidURLError

EXPECTED: Final = (
    "file:///FOLDER, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX?account=NAME"
)
#: Allowed query parameters: they locate the service, and never hold credentials.
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "file": (),
    "s3": ("endpoint", "region", "virtual_hosted_style"),
    "gs": ("endpoint",),
    "az": ("account", "endpoint"),
}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]")
_SEGMENT = re.compile(r"[A-Za-z0-9._=+-]+")
_WORD = re.compile(r"[A-Za-z0-9._-]+")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._/-]*)?")


@dataclass(frozen=True, slots=True)
class PayloadURL:
    """A parsed URL of a payload store.

    Attributes:
        scheme: One of file, s3, gs, az.
        bucket: Bucket or container; empty for a folder.
        path: Absolute path of the folder, or the prefix in the bucket without outer slashes.
        parameters: Query parameters, all of them in `_PARAMETERS`.
    """

    scheme: str
    bucket: str
    path: str
    parameters: Mapping[str, str]

    def __str__(self) -> str:
        """Return the normalized URL."""
        if self.scheme == "file":
            return Path(self.path).as_uri()
        ending = f"/{self.path}" if self.path else ""
        query = urlencode(sorted(self.parameters.items()), safe=":/[]")
        return f"{self.scheme}://{self.bucket}{ending}{'?' if query else ''}{query}"

    @classmethod
    def of(cls, url: str) -> Self:
        """Parse a URL.

        Raises:
            InvalidURLError: It cannot be used. The error does not repeat it, as it may hold a key.
        """
        parts = None
        if isinstance(url, str) and url.isprintable():
            with suppress(ValueError):
                parts = urlsplit(url)
        if parts is None or parts.scheme not in _PARAMETERS:
            raise _refused(EXPECTED, "something else")
        if "@" in parts.netloc:
            raise _refused("no user or password: credentials come from the environment", "one")
        if parts.fragment or url.endswith("#"):
            raise _refused("no fragment", "a URL with one")
        parameters = _parameters(parts)
        if parts.scheme == "file":
            return cls("file", "", _folder(parts), parameters)
        if not _BUCKET.fullmatch(parts.netloc):
            what = "no bucket" if not parts.netloc else "an invalid bucket name"
            raise _refused(f"{parts.scheme}://BUCKET/PREFIX", what)
        return cls(parts.scheme, parts.netloc, _prefix(parts), parameters)


def _folder(parts: SplitResult) -> str:
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost"):
        raise _refused("file:///FOLDER", "a host: write three slashes instead of two")
    if not path.startswith("/") or path.startswith("//"):
        raise _refused("an absolute path, file:///FOLDER", "another path")
    if ".." in path.split("/") or "\0" in path:
        raise _refused("a path without `..` and NUL characters", "a path with one")
    return str(Path(path))


def _prefix(parts: SplitResult) -> str:
    segments = [each for each in parts.path.split("/") if each]
    for segment in segments:
        if not _SEGMENT.fullmatch(segment) or segment in (".", ".."):
            raise _refused("a prefix of letters, digits and . _ = + - /", "other characters")
    return "/".join(segments)


def _parameters(parts: SplitResult) -> dict[str, str]:
    known = _PARAMETERS[parts.scheme]
    expected = f"only the parameters {', '.join(known)}" if known else "no parameters"
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if (parts.query and not pairs) or len(dict(pairs)) < len(pairs):
        raise _refused("parameters as NAME=VALUE, each at most once", "others")
    for name, value in pairs:
        if name not in known:
            raise _refused(expected, "another one; keys and tokens come from the environment")
        _check_parameter(name, value)
    return dict(pairs)


def _check_parameter(name: str, value: str) -> None:
    expected, fits = {
        "endpoint": ("http://HOST:PORT or https://HOST:PORT", _ENDPOINT.fullmatch(value)),
        "virtual_hosted_style": ("true or false", value in ("true", "false")),
    }.get(name, (f"the name of the {name}", _WORD.fullmatch(value)))
    if not fits:
        raise _refused(f"{name}={expected}", "another value")


def _refused(expected: str, actual: str) -> InvalidURLError:
    return InvalidURLError("payloads", expected, actual)
