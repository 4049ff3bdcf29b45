"""Cache of ranges of packs. Packs never change, so cached ranges stay valid."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from replaydb.packs.protocol import Range

#: Default size of the cache of payloads in an object store.
BUCKET_BYTES: Final = 256_000_000
#: Ranges of more bytes in total are copied in a thread.
_LARGE: Final = 1_000_000


class RangeCache:
    """Cache of the most recently used ranges, by location and checksum.

    Attributes:
        max_bytes: Maximum size. A range larger than this is not cached.
        num_bytes: Current size.
        hits: Ranges that were found.
        misses: Ranges that were not found.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.hits = self.misses = 0
        self._found: OrderedDict[Range, bytes] = OrderedDict()

    def get(self, wanted: Range) -> memoryview | None:
        """Return the bytes of a range, or None."""
        data = self._found.get(wanted)
        if data is None:
            self.misses += 1
            return None
        self.hits += 1
        self._found.move_to_end(wanted)
        return memoryview(data)

    def metrics(self) -> dict[str, float]:
        """Return the numbers for `Buffer.metrics`."""
        return {
            "cache/hits": self.hits,
            "cache/misses": self.misses,
            "cache/bytes": self.num_bytes,
        }

    async def add(self, read: Mapping[Range, memoryview]) -> None:
        """Add copies of ranges. Their memory may be part of a larger answer, or be reused."""
        fitting = {one: data for one, data in read.items() if len(data) <= self.max_bytes}
        if sum(map(len, fitting.values())) > _LARGE:
            copies = await asyncio.to_thread(_copied, fitting)
        else:
            copies = _copied(fitting)
        for one, data in copies.items():
            if one not in self._found:
                self._found[one] = data
                self.num_bytes += len(data)
        while self.num_bytes > self.max_bytes:
            _, oldest = self._found.popitem(last=False)
            self.num_bytes -= len(oldest)


def _copied(read: Mapping[Range, memoryview]) -> dict[Range, bytes]:
    return {one: bytes(data) for one, data in read.items()}
