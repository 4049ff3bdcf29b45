"""Tensors are made in memory that has been used before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _used_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "replaydb.batch.layouts.take", lambda size: memoryview(bytearray([165]) * size)
        )
        yield
