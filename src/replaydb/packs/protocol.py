"""What packs are kept in: a folder or a bucket, below one prefix."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from replaydb import codec
from replaydb.errors import ReplayDBError

#: Bytes of one part, in one piece: one dimension of unsigned bytes.
Part = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a pack.

    Attributes:
        pack: Its name.
        offset: The first byte, from 0.
        length: How many.
        checksum: Their checksum, as of `codec.checksum_of`. None: they are not compared with one.
    """

    pack: str
    offset: int
    length: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class PackDamage:
    """In place of bytes that are missing or wrong.

    Two reads that found the same are equal.

    Attributes:
        reason: What was found, for people.
        kind: `absent`: the bytes do not exist. `altered`: they are not those that were written.
            `unclear`: the answer says nothing of them.
    """

    reason: str
    kind: Literal["absent", "altered", "unclear"] = "absent"


@dataclass(frozen=True, slots=True)
class Listed:
    """A pack that is there, or what a killed write left of one.

    Attributes:
        name: Its name.
        num_bytes: Its size.
        modified: When it was written, by the clock of where it is.
    """

    name: str
    num_bytes: int
    modified: datetime


class Objects(Protocol):
    """Files of a folder, or objects below a prefix of a bucket.

    Its own errors are whatever the system or the client raises; `typed` knows them.
    """

    async def begin(self) -> None:
        """Make what has to be there before the first object."""

    async def get(self, file: str) -> bytes | None:
        """A small object; None where there is none."""

    async def put(self, file: str, pieces: Sequence[Part], *, sync: bool) -> None:
        """Write an object that is there whole or not at all.

        Args:
            file: Its name.
            pieces: What is in it, end to end.
            sync: Return when a power cut can no longer undo it.
        """

    async def sizes(self, files: Sequence[str]) -> dict[str, int]:
        """Return the sizes in bytes of files by name, of those that exist in one folder or bucket.

        Separate lookups would not show that the files are together, because an address may lead to
        several services in turn. The answer may include other files.
        """
        ...

    async def read(self, ranges: Sequence[Range]) -> list[memoryview | PackDamage]:
        """Bytes of packs, in this order; damage where they are missing or fail their checksum."""
        ...

    async def remove(self, packs: Sequence[str]) -> None:
        """Remove packs, and what killed writes left of them; some may be gone."""

    def listed(self) -> AsyncIterator[list[Listed]]:
        """Every pack, and what killed writes left, some at a time."""
        ...

    def typed(self, error: Exception) -> ReplayDBError | None:
        """The error as callers get it, without secrets; None where it is not one of these."""

    def close(self) -> None:
        """Let go of threads and connections."""


def missing(pack: str) -> PackDamage:
    """No such object."""
    return PackDamage(f"pack {pack} is missing")


def too_short(wanted: Range, size: int) -> PackDamage:
    """The object, of this many bytes, ends before the range does."""
    stop = wanted.offset + wanted.length
    return PackDamage(f"pack {wanted.pack} ends at byte {size}, before byte {stop}")


def compared(wanted: Range, data: memoryview) -> memoryview | PackDamage:
    """The bytes of a range, if they have its checksum."""
    wrong = None if wanted.checksum is None else codec.mismatch(data, wanted.checksum)
    return data if wrong is None else PackDamage(wrong, "altered")
