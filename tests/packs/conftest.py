"""Places of both kinds. `place`: ready to be used, in a folder and in a bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from replaydb.packs import Place
from support.s3 import S3Server

STORE = uuid4().hex


def soon(seconds: float = 30.0) -> float:
    """An end in so many seconds."""
    return asyncio.get_running_loop().time() + seconds


@asynccontextmanager
async def opened(url: str, store_uid: str = STORE) -> AsyncIterator[Place]:
    """A place, closed after the block."""
    place = Place.at(url, store_uid)
    try:
        yield place
    finally:
        await place.close()


@pytest.fixture(params=["folder", "bucket"])
def place_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place that nobody has used."""
    if request.param == "folder":
        return tmp_path.as_uri()
    server: S3Server = request.getfixturevalue("s3")
    return server.url(f"tests/{uuid4().hex}")


@pytest.fixture
async def place(place_url: str) -> AsyncIterator[Place]:
    """A place with its marker."""
    async with opened(place_url) as found:
        await found.prepare(soon())
        yield found
