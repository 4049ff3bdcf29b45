"""Memory that is kept."""

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

from replaydb.memory import LEAST_BYTES, KeptMemory

MB = 1 << 20


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 3 * LEAST_BYTES),  # take so much
            st.integers(-8, -1),  # drop one of those that are held
        ),
        max_size=40,
    )
)
def test_nobody_writes_over_what_is_held(steps: list[int]) -> None:
    kept = KeptMemory(2 * MB)
    held: list[tuple[memoryview, int]] = []
    for i, step in enumerate(steps):
        if step < 0:
            if held:
                held.pop(step % len(held))
        else:
            view = kept.take(step)
            assert len(view) == step
            assert not view.readonly
            view[:] = bytes([i]) * step
            held.append((view, i))
        assert kept.num_free_bytes <= 2 * MB
        for view, mark in held:
            assert bytes(view) == bytes([mark]) * len(view)


def test_what_was_used_is_used_again() -> None:
    kept = KeptMemory()
    first = kept.take(MB)
    address = _address(first)
    assert _address(kept.take(MB)) != address
    del first
    again = kept.take(MB - 1000)
    assert _address(again) == address
    assert _address(kept.take(MB)) != address
    del again
    assert _address(kept.take(LEAST_BYTES)) != address  # that would be a waste


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
def test_a_view_holds_it(view: Callable[[memoryview], Any]) -> None:
    kept = KeptMemory()
    held = view(kept.take(MB))
    gc.collect()
    assert kept.num_free_bytes == 0
    del held
    gc.collect()
    assert kept.num_free_bytes == MB


def _tensor(whole: memoryview) -> Any:
    import torch

    return torch.from_numpy(np.frombuffer(whole, np.int32)[3:])[4:].view(torch.float32)


def test_what_is_too_much_goes_the_longest_unused_first() -> None:
    kept = KeptMemory(4 * MB)
    pieces = [kept.take(MB) for _ in range(10)]
    addresses = [_address(piece) for piece in pieces]
    while pieces:
        del pieces[0]
    assert kept.num_free_bytes == 4 * MB
    again = [kept.take(MB) for _ in range(4)]
    assert [_address(piece) for piece in again] == addresses[:5:-1]


def test_threads_share_it() -> None:
    kept = KeptMemory(8 * MB)

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


def test_a_fork_has_its_own() -> None:
    """Also while another thread is in it, which the fork does not have."""
    script = """
        import os
        from replaydb.memory import KeptMemory

        kept = KeptMemory()
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
