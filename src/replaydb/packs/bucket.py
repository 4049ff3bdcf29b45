"""Packs as objects of a bucket: S3, Google Cloud Storage, Azure, through obstore.

obstore itself repeats what failed of a lost connection, a timeout or an error of the server. What
it says of errors is not passed on, as servers put keys in their answers.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from replaydb import extras
from replaydb.errors import InvalidURLError, PayloadsUnavailableError
from replaydb.packs.protocol import (
    Listed,
    PackDamage,
    Part,
    Range,
    compared,
    missing,
    too_short,
)
from replaydb.packs.urls import PlaceURL

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, RetryConfig, S3Store

#: Until the end of the call at most, which is most often sooner.
RETRY: Final[RetryConfig] = {
    "max_retries": 1000,
    "retry_timeout": timedelta(minutes=1),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
#: One request, its body included: 300 MB at a megabyte a second.
_REQUEST: Final = timedelta(minutes=5)
_CONNECT: Final = timedelta(seconds=5)
_REQUESTS_AT_ONCE: Final = 16
#: Bytes that are fetched for nothing rather than asking twice.
_WORTH_A_REQUEST: Final = 256_000
_PAGE: Final = 1000
#: Joining more than this, or its checksum, stops the event loop for more than a moment.
_LARGE: Final = 1_000_000
_FILE = re.compile(r"([0-9a-f]{32})\.pack")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_UNREADABLE = re.compile(r"Got invalid (\w{1,64}) response")
#: What obstore calls the parameters of a URL.
_KEYS: Final = {
    "s3": {
        # The name that comes before all others, also before those of the environment.
        "endpoint": "aws_endpoint_url_s3",
        "region": "region",
        "virtual_hosted_style": "virtual_hosted_style_request",
    },
    "gs": {"endpoint": "base_url"},
    "az": {"account": "account_name", "endpoint": "endpoint"},
}
#: Where machines of clouds ask for credentials, when there are none in the environment.
_METADATA = ("169.254.169.254", "metadata.google.internal")


class Bucket:
    """Objects below `PREFIX/STORE_UID/`."""

    def __init__(self, url: PlaceURL, store_uid: str) -> None:
        self._url = str(url)
        self._store = client(url, f"{url.path}/{store_uid}".lstrip("/"))
        self._turns = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def begin(self) -> None:
        """Nothing has to be made: prefixes are names only."""

    async def get(self, file: str) -> bytes | None:
        """A small object; None where there is none."""
        import obstore

        try:
            answer = await obstore.get_async(self._store, file)
            return bytes(await answer.bytes_async())
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            return None

    async def put(self, file: str, pieces: Sequence[Part], *, sync: bool) -> None:
        """One request, which is answered when the object is kept."""
        import obstore

        if sum(map(len, pieces)) < _LARGE:
            content = b"".join(pieces)
        else:
            content = await asyncio.to_thread(b"".join, pieces)
        # In one request: what is left of several that were broken off is hidden and paid for.
        await obstore.put_async(self._store, file, content, use_multipart=False)

    async def sizes(self, files: Sequence[str]) -> dict[str, int]:
        """List the objects from the first of these names on.

        Up to 1000 objects, the page size of the services, come in one answer of one service. Names
        of packs ascend, so the list is short.
        """
        import obstore

        before = min(files)[:-1]  # the list has what comes after this
        found: dict[str, int] = {}
        async for page in obstore.list(self._store, offset=before, chunk_size=_PAGE):
            found.update((each["path"], each["size"]) for each in page)
        return found

    async def read(self, ranges: Sequence[Range]) -> list[memoryview | PackDamage]:
        """Fetch ranges; those that are near each other in a pack come together."""
        found: list[memoryview | PackDamage] = [memoryview(b"")] * len(ranges)

        async def fetch(positions: Sequence[int]) -> None:
            several = [ranges[position] for position in positions]
            start = min(wanted.offset for wanted in several)
            stop = max(wanted.offset + wanted.length for wanted in several)
            async with self._turns:
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
        """Bytes of an object, and where they end: before `stop` if the object does."""
        import obstore
        from obstore.exceptions import GenericError

        # Not `get_ranges`: it panics where an object ends before the second of two ranges.
        try:
            path = f"{pack}.pack"
            if start == stop:
                return memoryview(b""), start
            data = await obstore.get_range_async(self._store, path, start=start, end=stop)
            return memoryview(data), start + len(data)
        except FileNotFoundError:
            return missing(pack)
        except GenericError:
            # A range that begins after the end is an error like any other.
            size = (await obstore.head_async(self._store, path))["size"]
            if size > start:
                what = f"a request for a range of pack {pack} got an answer of another kind"
                return PackDamage(what, "unclear")
            return memoryview(b""), size

    async def remove(self, packs: Sequence[str]) -> None:
        """Delete objects, many in one request where the service can."""
        import obstore

        paths = [f"{pack}.pack" for pack in packs]
        try:
            await obstore.delete_async(self._store, paths)
        except FileNotFoundError:  # some services tell, and then nobody knows of which
            for path in paths:
                try:
                    await obstore.delete_async(self._store, path)
                except FileNotFoundError:
                    continue

    async def listed(self) -> AsyncIterator[list[Listed]]:
        """The objects, a page at a time."""
        import obstore

        async for page in obstore.list(self._store, chunk_size=_PAGE):
            yield [
                Listed(match[1], each["size"], each["last_modified"])
                for each in page
                if (match := _FILE.fullmatch(each["path"]))
            ]

    def typed(self, error: Exception) -> PayloadsUnavailableError | None:
        """What happened in words of our own."""
        from obstore.exceptions import BaseError

        if not isinstance(error, BaseError | OSError | ValueError) and not _is_panic(error):
            return None
        return PayloadsUnavailableError(self._url, reason(error))

    def close(self) -> None:
        """Connections end when nobody has them any more."""


def _parts(
    ranges: Sequence[Range], start: int, data: memoryview, end: int
) -> list[memoryview | PackDamage]:
    """Ranges of a pack, from its bytes from `start` to `end`."""
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
    """Positions of the ranges that are fetched in one request each."""
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
    """Why a request failed: only what cannot be a secret is taken from the text."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if any(address in text for address in _METADATA):
        return "no credentials were found in the environment"
    if status:
        return f"the service answers {status[1]}{f' {code[1]}' if code else ''}"
    if "error sending request" in text:
        return "no connection"
    if request := _UNREADABLE.search(text):
        return f"the service answered a {request[1]} request with something that cannot be read"
    if _is_panic(error):
        return "the service answered with something that obstore cannot handle"
    return type(error).__name__


def _is_panic(error: Exception) -> bool:
    """Whether obstore's own code failed, as on answers that no service should give."""
    return type(error).__module__ == "pyo3_async_runtimes"


def client(url: PlaceURL, prefix: str) -> S3Store | GCSStore | AzureStore:
    """The client of a prefix; all but what the URL says comes from the environment.

    Raises:
        InvalidURLError: The URL and the environment do not do.
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
            retry_config=RETRY,
        )
        return store
    except (BaseError, ValueError, OSError):
        needs_account = url.scheme == "az" and "account" not in url.parameters
    raise InvalidURLError(
        "payloads",
        "az://CONTAINER/PREFIX?account=NAME, or AZURE_STORAGE_ACCOUNT_NAME in the environment"
        if needs_account
        else "a URL and an environment that obstore can be configured with",
        "others",
    )
