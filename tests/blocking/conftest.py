"""A blocking store and its buffer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replaydb import blocking


@pytest.fixture
def store(url: str) -> Iterator[blocking.Store]:
    with blocking.Store.open(url, run="test") as opened:
        yield opened


@pytest.fixture
def buffer(store: blocking.Store) -> blocking.Buffer:
    return store.buffer("math")
