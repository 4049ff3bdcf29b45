"""Packs as objects in a bucket of S3, Google Cloud Storage or Azure, through obstore.

obstore itself retries requests after lost connections, timeouts and server errors. The texts of its
errors are not passed on, because services include keys in their answers.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from replaydb.errors import InvalidURLError, PayloadsUnavailableError
from replaydb.packs.protocol import (
    SMALL,
    Listed,
    PackDamage,
    Part,
    Range,
    State,
    compared,
    file_of,
    missing,
    too_short,
)
from replaydb.packs.urls import PayloadURL
from replaydb.util import extras

if TYPE_CHECKING:
    from obstore import GetResult, PutMode, UpdateVersion
    from obstore.store import AzureStore, GCSStore, RetryConfig, S3Store

#: Retries also end with the call, which usually has less time.
RETRY: Final[RetryConfig] = {
    "max_retries": 1000,
    "retry_timeout": timedelta(minutes=1),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
#: A service without conditional writes answers them with 501, which obstore retries.
_CONDITIONAL_RETRIES: Final = 3
#: Time limit of one request, its body included: 300 MB at a megabyte a second.
_REQUEST: Final = timedelta(minutes=5)
_CONNECT: Final = timedelta(seconds=5)
_REQUESTS_AT_ONCE: Final = 16
#: Ranges of a pack with a smaller gap between them are fetched in one request, gap included.
_WORTH_A_REQUEST: Final = 256_000
_PAGE: Final = 1000
#: Bytes from which joins and checksums run in a thread, because they would block the event loop.
_LARGE: Final = 1_000_000
_FILE = re.compile(r"([0-9a-f]{32})\.pack")
_STATUS = re.compile(r"status code: (\d{3})")
_NOT_IMPLEMENTED = re.compile(r"status code: 501|<Code>NotImplemented<")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_UNREADABLE = re.compile(r"Got invalid (\w{1,64}) response")
#: obstore's names of the parameters of a URL.
_KEYS: Final = {
    "s3": {
        # This name takes precedence over all others, also over those of the environment.
        "endpoint": "aws_endpoint_url_s3",
        "region": "region",
        "virtual_hosted_style": "virtual_hosted_style_request",
    },
    "gs": {"endpoint": "base_url"},
    "az": {"account": "account_name", "endpoint": "endpoint"},
}
#: Metadata services, which clients on cloud machines ask for credentials if the environment has
#: none.
_METADATA = ("169.254.169.254", "metadata.google.internal")


class Bucket:
    """Objects below `PREFIX/STORE_UID/`."""

    def __init__(self, url: PayloadURL, store_uid: str) -> None:
        self._url = str(url)
        self._parsed, self._prefix = url, f"{url.path}/{store_uid}".lstrip("/")
        self._store = client(url, self._prefix)
        self._slots = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def begin(self) -> None:
        """Do nothing: a prefix is part of the names of objects."""

    async def get(self, file: str) -> bytes | None:
        """Return the first bytes of an object; None if there is none."""
        try:
            return await self._first_bytes(await self._store.get_async(file), file)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            return None

    async def _first_bytes(self, answer: GetResult, file: str) -> bytes:
        if answer.meta["size"] <= SMALL:
            return bytes(await answer.bytes_async())
        return bytes(await self._store.get_range_async(file, start=0, end=SMALL))

    async def put(self, file: str, chunks: Sequence[Part], *, sync: bool) -> None:
        """Write an object with one request, which is answered when the object is durable."""
        # To join many bytes takes longer than to pass the chunks, and blocks other threads.
        content = b"".join(chunks) if sum(map(len, chunks)) < _LARGE else iter(chunks)
        # Not multipart: the parts of an interrupted upload are not listed, but cost money.
        await self._store.put_async(file, content, use_multipart=False)

    async def replace(self, file: str, old: bytes, new: bytes) -> bool:
        """Write an object if it still has the version that was read."""
        from obstore.exceptions import GenericError, PreconditionError

        answer = await self._store.get_async(file)
        if await self._first_bytes(answer, file) != old:
            return False
        version: UpdateVersion = {}
        if (e_tag := answer.meta["e_tag"]) is not None:
            version["e_tag"] = e_tag
        if (number := answer.meta["version"]) is not None:
            version["version"] = number
        mode: PutMode = version or "overwrite"
        once = client(self._parsed, self._prefix, {**RETRY, "max_retries": _CONDITIONAL_RETRIES})
        try:
            await once.put_async(file, new, mode=mode, use_multipart=False)
        except PreconditionError:  # also if a first request succeeded and its answer was lost
            return False
        except GenericError as error:
            if not _NOT_IMPLEMENTED.search(str(error)):
                raise
            await self._store.put_async(file, new, use_multipart=False)
        return True

    async def states(self, files: Sequence[str]) -> dict[str, State]:
        """List the objects from the first of these names on.

        Up to 1000 objects, the page size of the services, come in one answer of one service. Names
        of packs ascend, so the list is short.
        """
        before = min(files)[:-1]  # the list begins after this name
        found: dict[str, State] = {}
        async for page in self._store.list(offset=before, chunk_size=_PAGE):
            for each in page:
                version = each["e_tag"] or each["last_modified"].isoformat()
                found[each["path"]] = State(each["size"], version)
        return found

    async def read(self, ranges: Sequence[Range]) -> list[memoryview | PackDamage]:
        """Fetch ranges. Those that are close together in a pack share a request."""
        found: list[memoryview | PackDamage] = [memoryview(b"")] * len(ranges)

        async def fetch(positions: Sequence[int]) -> None:
            several = [ranges[position] for position in positions]
            start = min(wanted.offset for wanted in several)
            stop = max(wanted.offset + wanted.length for wanted in several)
            async with self._slots:
                answer = await self._fetched(several[0].pack, start, stop)
            if isinstance(answer, PackDamage):
                parts: list[memoryview | PackDamage] = [answer] * len(several)
            elif len(answer[0]) < _LARGE:
                parts = _parts(several, start, *answer)
            else:
                parts = await asyncio.to_thread(_parts, several, start, *answer)
            for position, part in zip(positions, parts, strict=True):
                found[position] = part

        tasks = [asyncio.create_task(fetch(together)) for together in _together(ranges)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return found

    async def _fetched(
        self, pack: str, start: int, stop: int
    ) -> tuple[memoryview, int] | PackDamage:
        """Return bytes of an object, and the position of their end: `stop`, or less at its end."""
        from obstore.exceptions import GenericError

        # Not `get_ranges`: it panics if an object ends before the second of two ranges.
        try:
            path = file_of(pack)
            if start == stop:
                return memoryview(b""), start
            data = await self._store.get_range_async(path, start=start, end=stop)
            return memoryview(data), start + len(data)
        except FileNotFoundError:
            return missing(pack)
        except GenericError:
            # A range that begins past the end of the object has no error type of its own.
            size = (await self._store.head_async(path))["size"]
            if size > start:
                what = f"a request for a range of pack {pack} was not answered with that range"
                return PackDamage(what, "unclear")
            return memoryview(b""), size

    async def remove(self, packs: Sequence[str]) -> None:
        """Delete objects, many in one request if the service supports it."""
        paths = [file_of(pack) for pack in packs]
        try:
            await self._store.delete_async(paths)
        except FileNotFoundError:  # some services report a missing object, but not which one
            for path in paths:
                try:
                    await self._store.delete_async(path)
                except FileNotFoundError:
                    continue

    async def listed(self) -> AsyncIterator[list[Listed]]:
        """Yield pages of the objects."""
        async for page in self._store.list(chunk_size=_PAGE):
            yield [
                Listed(match[1], each["size"], each["last_modified"])
                for each in page
                if (match := _FILE.fullmatch(each["path"]))
            ]

    def typed(self, error: Exception) -> PayloadsUnavailableError | None:
        """Return the typed error, without the text of the original one."""
        from obstore.exceptions import BaseError

        if not isinstance(error, BaseError | OSError | ValueError) and not _is_panic(error):
            return None
        return PayloadsUnavailableError(self._url, reason(error))

    def close(self) -> None:
        """Do nothing: connections end when nothing refers to them."""


def _parts(
    ranges: Sequence[Range], start: int, data: memoryview, end: int
) -> list[memoryview | PackDamage]:
    """Return ranges of a pack, from its bytes from `start` to `end`."""
    parts: list[memoryview | PackDamage] = []
    for wanted in ranges:
        begin = wanted.offset - start
        view = data[begin : begin + wanted.length]
        if len(view) == wanted.length:
            parts.append(compared(wanted, view))
        else:
            parts.append(too_short(wanted, end))
    return parts


def _together(ranges: Sequence[Range]) -> list[list[int]]:
    """Return the positions of the ranges that share a request, for each request."""
    by_pack: defaultdict[str, list[int]] = defaultdict(list)
    for position, wanted in enumerate(ranges):
        by_pack[wanted.pack].append(position)
    requests = []
    for positions in by_pack.values():
        positions.sort(key=lambda position: ranges[position].offset)
        end = None
        for position in positions:
            wanted = ranges[position]
            if end is None or wanted.offset - end > _WORTH_A_REQUEST:
                requests.append([position])
                end = wanted.offset + wanted.length
            else:
                requests[-1].append(position)
                end = max(end, wanted.offset + wanted.length)
    return requests


def reason(error: Exception) -> str:
    """Return why a request failed, with only those parts of the text that cannot be secrets."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if any(address in text for address in _METADATA):
        return "no credentials were found in the environment"
    if status:
        return f"the service answers {status[1]}{f' {code[1]}' if code else ''}"
    if "error sending request" in text:
        return "no connection"
    if request := _UNREADABLE.search(text):
        return f"the answer of the service to a {request[1]} request cannot be parsed"
    if _is_panic(error):
        return "obstore failed on the answer of the service"
    return type(error).__name__


def _is_panic(error: Exception) -> bool:
    """Whether obstore's own code failed, as it does on some invalid answers."""
    return type(error).__module__ == "pyo3_async_runtimes"


def client(
    url: PayloadURL, prefix: str, retries: RetryConfig = RETRY
) -> S3Store | GCSStore | AzureStore:
    """Return a client for a prefix, configured by the URL and, for the rest, by the environment.

    Raises:
        InvalidURLError: The URL and the environment are not enough to configure a client.
        NotSupportedError: obstore is not installed.
    """
    extras.need("obstore", "an object store")

    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, S3Store

    makers: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    client: dict[str, Any] = {"timeout": _REQUEST, "connect_timeout": _CONNECT}
    if "endpoint" in url.parameters:
        client["allow_http"] = url.parameters["endpoint"].startswith("http:")
    try:
        store: S3Store | GCSStore | AzureStore = makers[url.scheme](
            url.bucket,
            prefix=prefix,
            config={_KEYS[url.scheme][name]: value for name, value in url.parameters.items()},
            client_options=client,
            retry_config=retries,
        )
        return store
    except (BaseError, ValueError, OSError):
        needs_account = url.scheme == "az" and "account" not in url.parameters
    raise InvalidURLError(
        "payloads",
        "az://CONTAINER/PREFIX?account=NAME, or AZURE_STORAGE_ACCOUNT_NAME in the environment"
        if needs_account
        else "a URL and environment variables that obstore accepts",
        "values that it does not accept",
    )
