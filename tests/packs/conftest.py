"""Payload stores of both kinds. `payload_store` is prepared, in a folder and in a bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from replaydb.packs import Instance, PayloadStore
from replaydb.packs.store import ReadInstance
from support.s3 import S3Server

STORE = uuid4().hex


def soon(seconds: float = 30.0) -> float:
    """Return a deadline in this many seconds."""
    return asyncio.get_running_loop().time() + seconds


async def instance(end: float) -> Instance:
    """Return the instance of the database whose packs they are."""
    return Instance({"inode": 1})


@asynccontextmanager
async def opened(
    url: str, store_uid: str = STORE, read_instance: ReadInstance = instance
) -> AsyncIterator[PayloadStore]:
    """Open a payload store, and close it after the block."""
    payload_store = PayloadStore.at(url, store_uid, read_instance)
    try:
        yield payload_store
    finally:
        await payload_store.close()


@pytest.fixture(params=["folder", "bucket"])
def payload_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an unused payload store."""
    if request.param == "folder":
        return tmp_path.as_uri()
    server: S3Server = request.getfixturevalue("s3")
    return server.url(f"tests/{uuid4().hex}")


@pytest.fixture
async def payload_store(payload_url: str) -> AsyncIterator[PayloadStore]:
    """A payload store with its marker."""
    async with opened(payload_url) as found:
        await found.prepare(soon())
        yield found
