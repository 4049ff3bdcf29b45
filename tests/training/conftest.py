"""A store on each engine; after every test its accounts must agree with its groups."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from replaydb import Buffer, Store
from support.ledger import check_books


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """An open store, of the run `test`."""
    async with Store.open(url, run="test") as opened:
        yield opened
    await check_books(url)


@pytest.fixture
async def buffer(store: Store) -> Buffer:
    """An empty buffer with default settings."""
    return await store.buffer("math")
