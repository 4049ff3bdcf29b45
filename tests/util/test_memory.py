"""Reusable memory blocks."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb.util.memory import LEAST_BYTES, BlockPool
from support.examples import examples

MB = 1 << 20


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


@settings(deadline=None, max_examples=examples(50))
@given(
    st.lists(
        st.one_of(
            st.integers(0, 3 * LEAST_BYTES),  # take a block of this size
            st.integers(-8, -1),  # drop one of the blocks in use
        ),
        max_size=40,
    )
)
def test_memory_in_use_is_not_reused(steps: list[int]) -> None:
    kept = BlockPool(2 * MB)
    in_use: list[tuple[memoryview, int]] = []
    for i, step in enumerate(steps):
        if step < 0:
            if in_use:
                in_use.pop(step % len(in_use))
        else:
            view = kept.take(step)
            assert len(view) == step
            assert not view.readonly
            view[:] = bytes([i]) * step
            in_use.append((view, i))
        assert kept.num_free_bytes <= 2 * MB
        for view, mark in in_use:
            assert bytes(view) == bytes([mark]) * len(view)


def test_free_memory_is_reused() -> None:
    kept = BlockPool()
    first = kept.take(MB)
    address = _address(first)
    assert _address(kept.take(MB)) != address
    del first
    again = kept.take(MB - 1000)
    assert _address(again) == address
    assert _address(kept.take(MB)) != address
    del again
    assert _address(kept.take(LEAST_BYTES)) != address  # the block is much larger


@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole[10:20],
        lambda whole: whole.toreadonly().cast("i"),
        lambda whole: np.frombuffer(whole, np.uint8)[100:200][::2],
        lambda whole: np.ndarray((5,), np.float32, whole[400:], 40).reshape(5, 1),
        lambda whole: _tensor(whole),
    ],
)
def test_a_view_keeps_memory_in_use(view: Callable[[memoryview], Any]) -> None:
    kept = BlockPool()
    in_use = view(kept.take(MB))
    gc.collect()
    assert kept.num_free_bytes == 0
    del in_use
    gc.collect()
    assert kept.num_free_bytes == MB


def _tensor(whole: memoryview) -> Any:
    import torch

    return torch.from_numpy(np.frombuffer(whole, np.int32)[3:])[4:].view(torch.float32)


def test_excess_memory_is_freed_least_recently_used_first() -> None:
    kept = BlockPool(4 * MB)
    blocks = [kept.take(MB) for _ in range(10)]
    addresses = [_address(block) for block in blocks]
    while blocks:
        del blocks[0]
    assert kept.num_free_bytes == 4 * MB
    again = [kept.take(MB) for _ in range(4)]
    assert [_address(block) for block in again] == addresses[:5:-1]


def test_threads_share_memory() -> None:
    kept = BlockPool(8 * MB)

    def work(mark: int) -> None:
        for i in range(200):
            size = LEAST_BYTES + (i * mark * 1009) % MB
            view = kept.take(size)
            np.frombuffer(view, np.uint8).fill(mark)
            other = kept.take(size)
            np.frombuffer(other, np.uint8).fill(0)
            assert (np.frombuffer(view, np.uint8) == mark).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    assert 0 < kept.num_free_bytes <= 8 * MB


def test_a_forked_process_has_its_own_memory() -> None:
    """Even if another thread, which does not exist in the forked process, has the lock."""
    script = """
        import os
        from replaydb.util.memory import BlockPool

        kept = BlockPool()
        view = kept.take(1 << 20)
        view[:] = b"a" * len(view)
        dropped = kept.take(1 << 20)
        del dropped
        assert kept._busy.acquire()
        child = os.fork()
        if child == 0:
            view[:] = b"b" * len(view)
            mine = kept.take(1 << 20)
            mine[:] = b"c" * len(mine)
            del mine
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert bytes(view) == b"a" * len(view)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
