"""The payload store of one store: its packs below `PREFIX/STORE_UID/`, and a marker object.

A missing pack is lost data only if the marker is present. If the marker is missing, the folder may
not be mounted, or the bucket may be a different one, so nothing is reported as lost.

The first line of the marker has the uid of the store. The second one, once packs were written, has
the instance of the database that may write and remove packs. Other instances only read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Final, TypeVar
from uuid import uuid4

from replaydb.errors import PayloadsReadOnlyError, PayloadsUnavailableError
from replaydb.packs.bucket import Bucket
from replaydb.packs.folder import Folder
from replaydb.packs.instance import Instance
from replaydb.packs.protocol import Listed, Objects, PackDamage, Part, Range, State, file_of
from replaydb.packs.urls import PayloadURL

T = TypeVar("T")
#: Reads the instance of the database, by a deadline.
ReadInstance = Callable[[float], Awaitable[Instance]]

logger = logging.getLogger(__name__)

#: Parts begin at multiples of this many bytes, so that arrays in them can be used without a copy.
ALIGNMENT: Final = 64

#: Pauses in seconds before each further read of damaged bytes.
REREADS: Sequence[float] = (0.0, 0.5, 1.0, 2.0)

#: Pause in seconds before a marker that another client replaces is read again.
CLAIM_PAUSE: Final = 0.05

_MARKER = "replaydb-store"
_FIRST_LINE = re.compile(rb"payloads of the replaydb store ([0-9a-f]{1,32})")
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

    def __init__(self, url: str, store_uid: str, read_instance: ReadInstance | None = None) -> None:
        """Set the location, without accessing it.

        Args:
            url: URL of a folder, or of a bucket and a prefix, without secrets.
            store_uid: 32 hex digits that identify the store.
            read_instance: Reads the instance of the database, before packs are written or removed.

        Raises:
            InvalidURLError: The URL cannot be used.
            NotSupportedError: The URL is that of an object store, and obstore is not installed.
        """
        if not _NAME.fullmatch(store_uid):
            raise ValueError(f"store_uid: expected 32 hex digits, got {store_uid!r}")
        parsed = PayloadURL.of(url)
        kind = Folder if parsed.scheme == "file" else Bucket
        self.url = str(parsed)
        self._objects: Objects = kind(parsed, store_uid)
        self._store_uid = store_uid
        self._first_line = f"payloads of the replaydb store {store_uid}\n".encode()
        self._marker = f"{self.url.partition('?')[0]}/{store_uid}/{_MARKER}"  # for errors
        self._read_instance = read_instance
        self._instance: Instance | None = None
        self._claimed: str | None = None  # version of the marker that named this instance
        self._newest = 0  # time in the newest name that this object has made or seen

    async def prepare(self, end: float) -> None:
        """Create the payload store by writing its marker, unless it exists.

        Raises:
            PayloadsUnavailableError: It cannot be reached or used.
            DatabaseReadOnlyError: It cannot be written.
            DatabaseFullError: There is no space.
        """
        if await self._marker_found(end) is None:
            await self._by(end, self._objects.begin())
            await self._by(end, self._objects.put(_MARKER, [self._first_line], sync=True))

    async def restore(self, packs: Collection[str], end: float) -> None:
        """Write the marker again if it is missing or damaged, and packs of the database are there.

        The marker of another store is left as it is.

        Args:
            packs: Names of all packs that the database refers to.
            end: Deadline of the call.

        Raises:
            PayloadsUnavailableError: It cannot be reached or used, or has none of the packs.
            DatabaseReadOnlyError: It cannot be written.
        """
        found = await self._by(end, self._objects.get(_MARKER))
        if found is not None and (self._is_intact(found) or self._is_of_another(found)):
            return
        if packs:
            files = set(map(file_of, packs))
            there = files & (await self._by(end, self._objects.states(sorted(files)))).keys()
            if not there:
                raise PayloadsUnavailableError(
                    self.url,
                    f"expected the {len(files)} packs of this database beside {self._marker}, got "
                    "none of them. Mount the folder, or correct the endpoint or the bucket",
                )
            if missing := len(files) - len(there):
                logger.warning("%s: %d of %d packs are missing", self.url, missing, len(files))
        if found is None:
            await self.prepare(end)
        else:
            await self._by(end, self._objects.replace(_MARKER, found, self._first_line))

    async def check(self, end: float) -> bytes:
        """Check that the marker of this store is present and intact. Returns its content.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or has no intact marker
                of this store.
        """
        if (marker := await self._marker_found(end)) is None:
            raise PayloadsUnavailableError(
                self.url,
                f"the marker {self._marker} is missing. Mount the folder, or correct the endpoint "
                "or the bucket. If the packs were moved, run `replaydb db relocate URL`. If only "
                "the marker was deleted, run `replaydb db adopt-payloads`",
            )
        return marker

    async def claim(self, end: float, *, adopt: bool = False) -> None:
        """Read the instance of the database, and check that it may write and remove packs here.

        It becomes the owner if there is none, or if it is a promoted standby of the owner.

        Args:
            end: Deadline of the call.
            adopt: Whether to become the owner in any case.

        Raises:
            PayloadsReadOnlyError: Another instance owns the packs.
            PayloadsUnavailableError: As for `check`.
            DatabaseReadOnlyError: The database or the payload store cannot be written.
        """
        assert self._read_instance is not None  # noqa: S101 - this object is not only for reading
        self._instance = await self._read_instance(end)
        await self._claim(self._instance, end, adopt=adopt)

    async def _claim(self, instance: Instance, end: float, *, adopt: bool = False) -> None:
        self._claimed = None  # if this fails, the next write claims before it writes anything
        while True:
            # The version is read first: if the marker is replaced meanwhile, it is the old one, and
            # the next proof of a write finds that out.
            found = await self._by(end, self._objects.states([_MARKER]))
            marker = await self.check(end)
            owner = self.owner(marker)
            relation = "promoted" if owner is None else instance.relation(owner)
            if relation == "same":
                self._claimed = found[_MARKER].version if _MARKER in found else None
                return
            if not adopt and (refused := self.refusal(marker, instance)) is not None:
                raise refused
            new = self._first_line + instance.after(owner).encoded()
            if not await self._by(end, self._objects.replace(_MARKER, marker, new)):
                await self._by(end, asyncio.sleep(CLAIM_PAUSE))

    def refusal(self, marker: bytes, instance: Instance) -> PayloadsReadOnlyError | None:
        """Return the error of an instance that may not write and remove packs; None if it may."""
        owner = self.owner(marker)
        if owner is None or instance.relation(owner) != "other":
            return None
        return PayloadsReadOnlyError(self.url, str(owner), str(instance))

    def owner(self, marker: bytes) -> Instance | None:
        """Return the instance in the content of the marker; None if there is none yet."""
        return Instance.decoded(marker.removeprefix(self._first_line))

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
        the marker must be found together after the write, before a row refers to the pack. If the
        marker was replaced since this instance claimed the packs, it must claim them again.

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
            PayloadsReadOnlyError: Another instance owns the packs. No row may refer to this one.
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
        if self._claimed is None:
            await self.claim(end)
        file = file_of(name)
        await self._by(end, self._objects.put(file, chunks, sync=sync))
        if (await self._prove(file, length, end)).version != self._claimed:
            await self.claim(end)
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
            other = PayloadStore(self.url, self._store_uid)
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
        files = [_MARKER, *(file_of(one.pack) for one in again)]
        states = await self._by(end, self._objects.states(files))
        if _MARKER not in states:
            return found, set()
        return found, {one for one, each in again.items() if each.kind == _possible(one, states)}

    async def remove(self, names: Iterable[str], *, end: float) -> None:
        """Remove packs, and the remains of killed writes of them. Packs may already be gone.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or belongs to another
                store.
            PayloadsReadOnlyError: Another instance owns the packs.
            DatabaseReadOnlyError: It cannot be written.
        """
        if self._instance is None:
            await self.claim(end)
        else:  # not read again: the packs may have been chosen on a server that was replaced since
            await self._claim(self._instance, end)
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

    async def _prove(self, file: str, size: int, end: float) -> State:
        """Check that a file of this size is beside the marker. Returns the state of the marker."""
        found = await self._by(end, self._objects.states([file, _MARKER]))
        self._newest = max(self._newest, *map(_time_in, found), 0)
        if file not in found or found[file].size != size or _MARKER not in found:
            raise PayloadsUnavailableError(
                self.url,
                f"the pack just written was not found beside the marker {self._marker}: the "
                "address leads to another service, the folder is not mounted, or the marker was "
                "deleted. If it was, run `replaydb db adopt-payloads`",
            )
        return found[_MARKER]

    async def _marker_found(self, end: float) -> bytes | None:
        found = await self._by(end, self._objects.get(_MARKER))
        if found is None or self._is_intact(found):
            return found
        if self._is_of_another(found):
            reason = f"the marker {self._marker} belongs to another store"
        else:
            reason = (
                f"the marker {self._marker} is damaged. If the packs beside it are those of this "
                "database, run `replaydb db adopt-payloads`"
            )
        raise PayloadsUnavailableError(self.url, reason)

    def _is_intact(self, marker: bytes) -> bool:
        """Whether a marker has the first line of this store, and its owner, if any, is readable."""
        owner = self.owner(marker)
        return marker.startswith(self._first_line) and (owner is None or bool(owner.facts))

    def _is_of_another(self, marker: bytes) -> bool:
        """Whether a marker, even a truncated one, has the uid of another store."""
        found = _FIRST_LINE.match(marker)
        return found is not None and not self._store_uid.encode().startswith(found[1])

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


def _possible(damaged: Range, states: Mapping[str, State]) -> str:
    """Return the kind of damage that a range can have, given the states of existing packs."""
    pack, stop = states.get(file_of(damaged.pack)), damaged.offset + damaged.length
    return "altered" if pack is not None and pack.size >= stop else "absent"


def _can_be(wanted: Range) -> bool:
    """Whether a pack can have this range. Values in the database may have been altered."""
    fits = wanted.offset >= 0 and wanted.length >= 0 and wanted.offset + wanted.length < 2**62
    return fits and _NAME.fullmatch(wanted.pack) is not None
