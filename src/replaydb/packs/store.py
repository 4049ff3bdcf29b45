"""The payload store of one store: its packs below `PREFIX/STORE_UID/`, and a marker object.

A missing pack is lost data only if the marker is present. If the marker is missing, the folder may
not be mounted, or the bucket may be a different one, so nothing is reported as lost.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from typing import Final, TypeVar
from uuid import uuid4

from replaydb.errors import PayloadsUnavailableError
from replaydb.packs.bucket import Bucket
from replaydb.packs.folder import Folder
from replaydb.packs.protocol import Listed, Objects, PackDamage, Part, Range
from replaydb.packs.urls import PayloadURL

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Parts begin at multiples of this many bytes, so that arrays in them can be used without a copy.
ALIGNMENT: Final = 64

#: Pauses in seconds before each further read of damaged bytes.
REREADS: Sequence[float] = (0.0, 0.5, 1.0, 2.0)

_MARKER = "replaydb-store"
_NAME = re.compile(r"[0-9a-f]{32}")
_PADDING = bytes(ALIGNMENT)

#: Names of new packs: this prefix, the time in milliseconds, and random digits. Packs of earlier
#: versions have random names, of which one in 16 million sorts after these.
_NEW: Final = "f" * 6
_TIME_DIGITS: Final = 12
_LAST_TIME: Final = 16**_TIME_DIGITS - 1


class PayloadStore:
    """A folder or bucket prefix that holds the packs of one store.

    Every call ends by its deadline `end`, a time of the event loop. A write that is cancelled or
    times out may still take effect later. Its object is then an orphan.

    Attributes:
        url: Normalized URL of the location, absolute and without secrets.
    """

    def __init__(self, url: str, objects: Objects, store_uid: str) -> None:
        self.url = url
        self._objects = objects
        self._store_uid = store_uid
        self._marker = f"payloads of the replaydb store {store_uid}\n".encode()
        self._newest = 0  # time in the newest name that this object has made or seen

    @classmethod
    def at(cls, url: str, store_uid: str) -> PayloadStore:
        """Return the payload store at a URL, without accessing it.

        Args:
            url: URL of a folder, or of a bucket and a prefix, without secrets.
            store_uid: 32 hex digits that identify the store.

        Raises:
            InvalidURLError: The URL cannot be used.
            NotSupportedError: The URL is that of an object store, and obstore is not installed.
        """
        if not _NAME.fullmatch(store_uid):
            raise ValueError(f"store_uid: expected 32 hex digits, got {store_uid!r}")
        parsed = PayloadURL.of(url)
        objects: Objects
        if parsed.scheme == "file":
            objects = Folder(parsed, store_uid)
        else:
            objects = Bucket(parsed, store_uid)
        return cls(str(parsed), objects, store_uid)

    async def prepare(self, end: float) -> None:
        """Create the payload store by writing its marker, unless it exists.

        Raises:
            PayloadsUnavailableError: It cannot be reached or used.
            DatabaseReadOnlyError: It cannot be written.
            DatabaseFullError: There is no space.
        """
        if await self._marker_found(end) is None:
            await self._by(end, self._objects.begin())
            await self._by(end, self._objects.put(_MARKER, [self._marker], sync=True))

    async def check(self, end: float) -> None:
        """Check that the marker of this store is present.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or has no marker of this
                store.
        """
        if await self._marker_found(end) is None:
            raise PayloadsUnavailableError(
                self.url,
                "no packs of this store are there. Mount the folder, or correct the endpoint or "
                "the bucket. If the packs were moved, run `replaydb db relocate URL`",
            )

    def new_name(self) -> str:
        """Return a name for a new pack that sorts after those this process has made or seen.

        The proof of a write lists the names from the pack's own to the marker's, the last of all.
        Ascending names keep that list short, even if the clock of this machine is behind.
        """
        self._newest = min(max(time.time_ns() // 1_000_000, self._newest + 1), _LAST_TIME)
        start = f"{_NEW}{self._newest:0{_TIME_DIGITS}x}"
        return start + uuid4().hex[len(start) :]

    async def write(self, name: str, parts: Sequence[Part], *, sync: bool, end: float) -> list[int]:
        """Write one pack, and prove that it is beside the marker of this store.

        All packs are written by this function. The address of a bucket may lead to another service
        for a while, or with every other request, and a folder may be unmounted. So the pack and
        the marker must be found together after the write, before a row refers to the pack.

        Args:
            name: A name from `new_name` that no write has used before, not even a failed one.
            parts: Content of the pack.
            sync: Return only when the pack survives a power cut.
            end: Deadline of the call.

        Returns:
            Offset of each part in the pack.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached or used, or the pack was
                not found beside the marker. The pack must not be referred to.
            DatabaseReadOnlyError: The payload store cannot be written.
            DatabaseFullError: There is no space; nothing was stored.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: expected 32 hex digits, got {name!r}")
        offsets: list[int] = []
        chunks: list[Part] = []
        length = 0
        for part in parts:
            if gap := -length % ALIGNMENT:
                chunks.append(_PADDING[:gap])
            offsets.append(length + gap)
            chunks.append(part)
            length += gap + len(part)
        file = _file(name)
        await self._by(end, self._objects.put(file, chunks, sync=sync))
        await self._prove({file: length, _MARKER: len(self._marker)}, end)
        return offsets

    async def read(self, ranges: Sequence[Range], *, end: float) -> list[memoryview | PackDamage]:
        """Read ranges of packs and compare them with their checksums.

        A range whose pack is missing or too short, or whose bytes fail their checksum, is damage of
        its own. A service or a network can answer wrongly once, and an address can lead to another
        service for a while. So damaged ranges are read again over other connections, at once and
        after a pause. Only what two of these reads in a row find is returned as damage.

        Args:
            ranges: The ranges to read.
            end: Deadline of the call, pauses included.

        Returns:
            The bytes of each range or its damage, in the order of the ranges.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached or belongs to another
                store, or repeated reads do not agree.
        """
        found: list[memoryview | PackDamage] = [PackDamage("no pack has such bytes")] * len(ranges)
        known = [position for position, wanted in enumerate(ranges) if _can_be(wanted)]
        read = await self._by(end, self._objects.read([ranges[position] for position in known]))
        suspects = []
        for position, each in zip(known, read, strict=True):
            found[position] = each
            if isinstance(each, PackDamage):
                suspects.append(position)
        if suspects:
            again = await self._read_again([ranges[position] for position in suspects], end)
            for position in suspects:
                found[position] = again[ranges[position]]
        return found

    async def _read_again(
        self, ranges: Sequence[Range], end: float
    ) -> dict[Range, memoryview | PackDamage]:
        """Read damaged ranges until each is intact, or damaged for certain.

        Damage is certain if two reads in a row found the same and the sizes of the packs agree with
        it, or if all reads found the same.
        """
        settled: dict[Range, memoryview | PackDamage] = {}
        suspects: dict[Range, list[PackDamage]] = {wanted: [] for wanted in ranges}
        for pause in REREADS:
            await self._by(end, asyncio.sleep(pause))
            other = PayloadStore.at(self.url, self._store_uid)
            try:
                found, confirmed = await other._reread(suspects, end)
            finally:
                await other.close()
            for wanted, each in found.items():
                if isinstance(each, PackDamage) and wanted not in confirmed:
                    suspects[wanted].append(each)
                else:
                    settled[wanted] = each
                    del suspects[wanted]
            if not suspects:
                break
        for wanted, several in suspects.items():
            if len(set(several)) > 1 or several[0].kind == "unclear":
                reasons = "; ".join(sorted({each.reason for each in several}))
                reason = f"repeated reads gave no consistent answer: {reasons}"
                raise PayloadsUnavailableError(self.url, reason)
            settled[wanted] = several[0]
        if intact := sum(not isinstance(each, PackDamage) for each in settled.values()):
            logger.warning(
                "%s: %d of %d parts were damaged in one read and intact in the next",
                *(self.url, intact, len(settled)),
            )
        return settled

    async def _reread(
        self, suspects: Mapping[Range, Sequence[PackDamage]], end: float
    ) -> tuple[dict[Range, memoryview | PackDamage], set[Range]]:
        """Read ranges, each given with the damage that earlier reads found.

        Returns:
            The result of each range, and the ranges whose damage is confirmed: the previous read
            found it as well, and the sizes of the packs agree with it. The sizes count only if the
            same answer has the marker, because another service would have no packs either.
        """
        wanted = list(suspects)
        read = await self._by(end, self._objects.read(wanted))
        found = dict(zip(wanted, read, strict=True))
        damaged = {one: each for one, each in found.items() if isinstance(each, PackDamage)}
        if damaged:
            await self.check(end)
        again = {one: each for one, each in damaged.items() if suspects[one][-1:] == [each]}
        if not again:
            return found, set()
        files = [_MARKER, *(_file(one.pack) for one in again)]
        sizes = await self._by(end, self._objects.sizes(files))
        if sizes.get(_MARKER) != len(self._marker):
            return found, set()
        return found, {one for one, each in again.items() if each.kind == _possible(one, sizes)}

    async def remove(self, names: Iterable[str], *, end: float) -> None:
        """Remove packs, and the remains of killed writes of them. Packs may already be gone.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or belongs to another
                store.
            DatabaseReadOnlyError: It cannot be written.
        """
        await self.check(end)
        await self._by(end, self._objects.remove([name for name in names if _NAME.fullmatch(name)]))

    async def listed(self, *, end: float) -> AsyncIterator[Listed]:
        """Yield all packs, and the remains of killed writes, in no particular order.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or belongs to another
                store.
        """
        await self.check(end)
        pages = self._objects.listed()
        while (page := await self._by(end, anext(pages, None))) is not None:
            for each in page:
                yield each

    async def close(self) -> None:
        """Release threads and connections."""
        self._objects.close()

    async def _prove(self, written: Mapping[str, int], end: float) -> None:
        """Check that files of these sizes are together in one folder or bucket."""
        found = await self._by(end, self._objects.sizes(list(written)))
        self._newest = max(self._newest, *map(_time_in, found), 0)
        if not written.items() <= found.items():
            raise PayloadsUnavailableError(
                self.url,
                "the pack just written was not found beside the marker of this store: the address "
                "leads to another service, or the folder is not mounted",
            )

    async def _marker_found(self, end: float) -> bytes | None:
        found = await self._by(end, self._objects.get(_MARKER))
        if found is not None and found != self._marker:
            raise PayloadsUnavailableError(self.url, "the marker there belongs to another store")
        return found

    async def _by(self, end: float, work: Awaitable[T]) -> T:
        """Wait for work until `end`, with typed errors.

        They are raised outside of `except`. Otherwise the error of the object store client, whose
        text may contain keys, would be attached as `__context__`.
        """
        try:
            async with asyncio.timeout_at(end):
                return await work
        except TimeoutError:
            failure: Exception = PayloadsUnavailableError(self.url, "no answer in time")
        except Exception as error:
            typed = self._objects.typed(error)
            if typed is None:
                raise
            failure = typed
        raise failure


def _time_in(file: str) -> int:
    """Return the time in the name of a pack, in milliseconds; 0 for other names."""
    is_new = file.startswith(_NEW) and _NAME.fullmatch(file.removesuffix(".pack"))
    return int(file[len(_NEW) : len(_NEW) + _TIME_DIGITS], 16) if is_new else 0


def _possible(damaged: Range, sizes: Mapping[str, int]) -> str:
    """Return the kind of damage that a range can have, given the sizes of existing packs."""
    stop = damaged.offset + damaged.length
    return "altered" if sizes.get(_file(damaged.pack), -1) >= stop else "absent"


def _file(pack: str) -> str:
    return f"{pack}.pack"


def _can_be(wanted: Range) -> bool:
    """Whether a pack can have this range. Values in the database may have been altered."""
    fits = wanted.offset >= 0 and wanted.length >= 0 and wanted.offset + wanted.length < 2**62
    return fits and _NAME.fullmatch(wanted.pack) is not None
