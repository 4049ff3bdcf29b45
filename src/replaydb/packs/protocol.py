"""Protocol of the storage of packs: a folder, or a prefix of a bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple, Protocol

from replaydb import codec
from replaydb.errors import ReplayDBError

#: Contiguous bytes of one part: one dimension of unsigned bytes.
Part = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Range:
    """A range of bytes in a pack.

    Attributes:
        pack: Name of the pack.
        offset: Position of the first byte, from 0.
        length: Number of bytes.
        checksum: Checksum of the bytes, as of `codec.checksum_of`. None: they are not checked.
    """

    pack: str
    offset: int
    length: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class PackDamage:
    """The result of a read in place of bytes that are missing or wrong.

    Results of two reads that found the same damage are equal.

    Attributes:
        reason: Description of the damage.
        kind: `absent`: the bytes do not exist. `altered`: they are not those that were written.
            `unclear`: the answer shows neither.
    """

    reason: str
    kind: Literal["absent", "altered", "unclear"] = "absent"


@dataclass(frozen=True, slots=True)
class Listed:
    """An existing pack, or the remains of one whose write was killed.

    Attributes:
        name: Name of the pack.
        num_bytes: Size of the object.
        modified: When it was written, by the clock of the storage.
    """

    name: str
    num_bytes: int
    modified: datetime


#: Bytes of an object that `Objects.get` returns at most.
SMALL: Final = 4096


class State(NamedTuple):
    """State of a file or object.

    Attributes:
        size: Its size in bytes.
        version: Text that changes whenever it is replaced.
    """

    size: int
    version: str


class Objects(Protocol):
    """Files of a folder, or objects below a prefix of a bucket.

    Methods raise the errors of the operating system or of the client library. `typed` converts
    them.
    """

    async def begin(self) -> None:
        """Create what must exist before the first object."""

    async def get(self, file: str) -> bytes | None:
        """Return the first `SMALL` bytes of an object; None if there is none.

        Raises:
            PayloadsUnavailableError: It cannot be read. The reason names it.
        """

    async def put(self, file: str, chunks: Sequence[Part], *, sync: bool) -> None:
        """Write an object atomically.

        Args:
            file: Name of the object.
            chunks: Its content, to be concatenated.
            sync: Return only when the object survives a power cut.
        """

    async def replace(self, file: str, old: bytes, new: bytes) -> bool:
        """Replace a small object if its content is still `old`, as far as the storage can compare.

        Returns:
            False if it was not replaced, because of another client.
        """
        ...

    async def states(self, files: Sequence[str]) -> dict[str, State]:
        """Return the states of files by name, of those that exist in one folder or bucket.

        Separate lookups would not show that the files are together, because an address may lead to
        several services in turn. The answer may include other files.
        """
        ...

    async def read(self, ranges: Sequence[Range]) -> list[memoryview | PackDamage]:
        """Return the bytes of ranges, in order; damage if they are missing or fail a checksum."""
        ...

    async def remove(self, packs: Sequence[str]) -> None:
        """Remove packs, and the remains of killed writes of them. Packs may already be gone."""

    def listed(self) -> AsyncIterator[list[Listed]]:
        """Yield pages of all packs, and of the remains of killed writes."""
        ...

    def typed(self, error: Exception) -> ReplayDBError | None:
        """Return the typed error for callers, without secrets; None for errors of other origin."""

    def close(self) -> None:
        """Release threads and connections."""


def file_of(pack: str) -> str:
    """Return the name of the file or object of a pack."""
    return f"{pack}.pack"


def missing(pack: str) -> PackDamage:
    """Return the damage of a range whose pack does not exist."""
    return PackDamage(f"pack {pack} is missing")


def too_short(wanted: Range, size: int) -> PackDamage:
    """Return the damage of a range that extends past the end of its pack, of this size."""
    stop = wanted.offset + wanted.length
    return PackDamage(f"pack {wanted.pack} ends at byte {size}, before byte {stop}")


def compared(wanted: Range, data: memoryview) -> memoryview | PackDamage:
    """Return the bytes of a range if they have its checksum, else the damage."""
    wrong = None if wanted.checksum is None else codec.mismatch(data, wanted.checksum)
    return data if wrong is None else PackDamage(wrong, "altered")
