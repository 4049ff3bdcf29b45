"""Reusable memory blocks for large payloads.

The first access to a page of new memory takes longer than filling it: 19 MB of payloads are read in
16 ms into new memory, and in 6 ms into memory that has been used before.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from threading import Lock

import numpy as np
from numpy.typing import NDArray

#: Smaller blocks come from malloc, which reuses memory itself.
LEAST_BYTES = 256 << 10
#: Maximum size of unused memory that is kept.
MOST_FREE_BYTES = 256 << 20

# Python's default is shared with forked processes, which could overwrite each other's data.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class BlockPool:
    """Memory blocks that are reused when nothing refers to them any more.

    Any thread may use it. It never waits for its lock, because finalizers that return a block can
    run anywhere and a fork can happen at any time. A call that finds the lock taken allocates new
    memory.

    Attributes:
        num_free_bytes: Size of the unused memory.
    """

    def __init__(self, most_free_bytes: int = MOST_FREE_BYTES) -> None:
        self._most_free_bytes = most_free_bytes
        self._busy = Lock()
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []  # the most recently used is last
        self.num_free_bytes = 0

    def take(self, num_bytes: int) -> memoryview:
        """Return writable memory with arbitrary content. It is in use while any view of it exists.

        Slices, arrays and tensors of it are such views, and views of views count.
        """
        if num_bytes < LEAST_BYTES:
            return np.empty(num_bytes, np.uint8).data
        size = _rounded(num_bytes)
        block = self._used(size) or _new(size)
        # All views refer to this array, because it does not own its memory, so it outlives them.
        array: NDArray[np.uint8] = np.ndarray(num_bytes, np.uint8, block)
        weakref.finalize(array, self._put_back, block).atexit = False
        return array.data

    def _used(self, size: int) -> mmap.mmap | None:
        """Return a free block that is large enough and not much larger, or None."""
        if not self._busy.acquire(blocking=False):
            return None
        try:
            self._collect()
            for i in reversed(range(len(self._free))):
                if size <= len(self._free[i]) <= size + size // 2:
                    self.num_free_bytes -= len(self._free[i])
                    return self._free.pop(i)
            return None
        finally:
            self._busy.release()

    def _put_back(self, block: mmap.mmap) -> None:
        self._returned.append(block)
        if self._busy.acquire(blocking=False):  # otherwise the next call does it
            try:
                self._collect()
            finally:
                self._busy.release()

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._free.append(block)
            self.num_free_bytes += len(block)
        while self.num_free_bytes > self._most_free_bytes:
            self.num_free_bytes -= len(self._free.pop(0))


def _rounded(num_bytes: int) -> int:
    """Round a size up to one that similar sizes share, at most an eighth larger."""
    step = max(mmap.PAGESIZE, 1 << (num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def _new(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


#: Shared by all stores of the process.
take = BlockPool().take
