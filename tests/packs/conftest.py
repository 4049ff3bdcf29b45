"""Payload stores of both kinds. `payload_store` is prepared, in a folder and in a bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import obstore
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


class Behind:
    """Direct access to the files or objects of the payload store."""

    def __init__(self, payload_store: PayloadStore, tmp_path: Path, s3: S3Server | None) -> None:
        prefix = payload_store.url.partition("?")[0].partition("payloads/")[2]
        self._store = s3.store(f"{prefix}/{STORE}") if s3 else None
        self._folder = tmp_path / STORE

    def put(self, file: str, content: bytes) -> None:
        if self._store is None:
            (self._folder / file).write_bytes(content)
        else:
            obstore.put(self._store, file, content, use_multipart=False)

    def get(self, file: str) -> bytes:
        if self._store is None:
            return (self._folder / file).read_bytes()
        return bytes(obstore.get(self._store, file).bytes())

    def delete(self, file: str) -> None:
        if self._store is None:
            (self._folder / file).unlink()
        else:
            obstore.delete(self._store, file)


@asynccontextmanager
async def opened(
    url: str, store_uid: str = STORE, read_instance: ReadInstance = instance
) -> AsyncIterator[PayloadStore]:
    """Open a payload store, and close it after the block."""
    payload_store = PayloadStore(url, store_uid, read_instance)
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


@pytest.fixture
def behind(payload_store: PayloadStore, tmp_path: Path, request: pytest.FixtureRequest) -> Behind:
    """Direct access to the files or objects of `payload_store`."""
    in_bucket = payload_store.url.startswith("s3:")
    return Behind(payload_store, tmp_path, request.getfixturevalue("s3") if in_bucket else None)
