"""One place for the packs of one store: below `PREFIX/STORE_UID/`, with a marker that says whose.

An object that is missing means lost data only where the marker is there. Where it is not, the
folder is not mounted or the bucket is another one, and nothing may be concluded.
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
from replaydb.packs.urls import PlaceURL

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Parts begin at multiples of so many bytes, so that arrays in them can be used where they are.
ALIGNMENT: Final = 64

#: Seconds before each time that damaged bytes are read again.
REREADS: Sequence[float] = (0.0, 0.5, 1.0, 2.0)

_MARKER = "replaydb-store"
_NAME = re.compile(r"[0-9a-f]{32}")
_PADDING = bytes(ALIGNMENT)

#: Names of new packs: this, the time in milliseconds, and chance. Older packs have random names, of
#: which one in 16 million sorts after these.
_NEW: Final = "f" * 6
_TIME_DIGITS: Final = 12
_LAST_TIME: Final = 16**_TIME_DIGITS - 1


class Place:
    """Where the packs of a store are.

    Every call is over by its `end`, a time of the event loop. Cancelled or out of time, a write
    may still come to be: an object that nobody knows of.

    Attributes:
        url: The same text for the same place, absolute and without secrets.
    """

    def __init__(self, url: str, objects: Objects, store_uid: str) -> None:
        self.url = url
        self._objects = objects
        self._store_uid = store_uid
        self._marker = f"payloads of the replaydb store {store_uid}\n".encode()
        self._newest = 0  # the time in the newest name that was made or seen here

    @classmethod
    def at(cls, url: str, store_uid: str) -> Place:
        """The place that a URL names; nothing is looked up there yet.

        Args:
            url: A folder, or a bucket and a prefix, without secrets.
            store_uid: 32 hex digits that tell this store from others.

        Raises:
            InvalidURLError: The URL cannot be used.
            NotSupportedError: What talks to object stores is not installed.
        """
        if not _NAME.fullmatch(store_uid):
            raise ValueError(f"{store_uid!r} is no uid of a store")
        parsed = PlaceURL.of(url)
        objects: Objects
        if parsed.scheme == "file":
            objects = Folder(parsed, store_uid)
        else:
            objects = Bucket(parsed, store_uid)
        return cls(str(parsed), objects, store_uid)

    async def prepare(self, end: float) -> None:
        """Make it a place of this store: write the marker, if it is new.

        Raises:
            PayloadsUnavailableError: It cannot be reached, or not used.
            DatabaseReadOnlyError: It cannot be written.
            DatabaseFullError: There is no space.
        """
        if await self._marker_found(end) is None:
            await self._by(end, self._objects.begin())
            await self._by(end, self._objects.put(_MARKER, [self._marker], sync=True))

    async def check(self, end: float) -> None:
        """See that it is the place of this store.

        Raises:
            PayloadsUnavailableError: It cannot be reached, or holds no marker of this store.
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
            name: 32 hex digits that have never been written before, whatever became of that:
                `new_name`.
            parts: What is in it.
            sync: Return when a power cut can no longer undo it.
            end: When the call is over.

        Returns:
            Where each part begins in the pack.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached or used, or the pack was
                not found beside the marker. The pack must not be referred to.
            DatabaseReadOnlyError: It cannot be written.
            DatabaseFullError: There is no space; nothing is left.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a pack")
        offsets: list[int] = []
        pieces: list[Part] = []
        length = 0
        for part in parts:
            if gap := -length % ALIGNMENT:
                pieces.append(_PADDING[:gap])
            offsets.append(length + gap)
            pieces.append(part)
            length += gap + len(part)
        file = _file(name)
        await self._by(end, self._objects.put(file, pieces, sync=sync))
        await self._prove({file: length, _MARKER: len(self._marker)}, end)
        return offsets

    async def read(self, ranges: Sequence[Range], *, end: float) -> list[memoryview | PackDamage]:
        """Read ranges of packs and compare them with their checksums.

        A range whose pack is missing or too short, or whose bytes fail their checksum, is damage of
        its own. A service or a network can answer wrongly once, and an address can lead to another
        service for a while. So damaged ranges are read again over other connections, at once and
        after a pause. Only what two of these reads in a row find is returned as damage.

        Args:
            ranges: What to read.
            end: When the call is over, pauses included.

        Returns:
            The bytes, or what is wrong with them, in the order of the ranges.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or is not that of this
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
            other = Place.at(self.url, self._store_uid)
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
                said = f"repeated reads gave no consistent answer: {reasons}"
                raise PayloadsUnavailableError(self.url, said)
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
            What the read of each found, and the ranges whose damage the last read found as well and
            the sizes of the packs agree with. The marker must be in the answer that has the sizes,
            since a service other than that of this store has no packs either.
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
        """Remove packs, and what killed writes left of them; those that are gone are no error.

        Raises:
            PayloadsUnavailableError: The place cannot be reached, or is not that of this store.
            DatabaseReadOnlyError: It cannot be written.
        """
        await self.check(end)
        await self._by(end, self._objects.remove([name for name in names if _NAME.fullmatch(name)]))

    async def listed(self, *, end: float) -> AsyncIterator[Listed]:
        """Every pack, and what killed writes have left, in no order.

        Raises:
            PayloadsUnavailableError: The place cannot be reached, or is not that of this store.
        """
        await self.check(end)
        pages = self._objects.listed()
        while (page := await self._by(end, anext(pages, None))) is not None:
            for each in page:
                yield each

    async def close(self) -> None:
        """Let go of threads and connections."""
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
            raise PayloadsUnavailableError(self.url, "the marker there is not that of this store")
        return found

    async def _by(self, end: float, work: Awaitable[T]) -> T:
        """Wait for work until `end`, with typed errors.

        They are raised outside of `except`: what a client of an object store says may hold keys,
        and would go along as `__context__`.
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
    """The time in the name of a pack, in milliseconds; 0 for other names."""
    is_new = file.startswith(_NEW) and _NAME.fullmatch(file.removesuffix(".pack"))
    return int(file[len(_NEW) : len(_NEW) + _TIME_DIGITS], 16) if is_new else 0


def _possible(damaged: Range, sizes: Mapping[str, int]) -> str:
    """The kind of damage that a range can have, by the sizes of the packs that exist."""
    stop = damaged.offset + damaged.length
    return "altered" if sizes.get(_file(damaged.pack), -1) >= stop else "absent"


def _file(pack: str) -> str:
    return f"{pack}.pack"


def _can_be(wanted: Range) -> bool:
    """Whether it can be a range of any pack: what a database says may have been altered."""
    fits = wanted.offset >= 0 and wanted.length >= 0 and wanted.offset + wanted.length < 2**62
    return fits and _NAME.fullmatch(wanted.pack) is not None
