"""Fixtures for a PostgreSQL server with passwords and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from replaydb.database import migrations
from support.network_postgres import (
    Certificates,
    Door,
    PasswordServer,
    open_door,
    password_server,
)


@pytest.fixture(scope="session")
def server() -> Iterator[PasswordServer]:
    """A PostgreSQL server that requires passwords. Its database `replay` has the tables."""
    with password_server() as started:
        asyncio.run(migrations.upgrade(started.local_url))
        yield started


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.made_in(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def network(server: PasswordServer, certificates: Certificates) -> AsyncIterator[Door]:
    """That server on 127.0.0.1, with TLS."""
    async with open_door(server, certificates) as door:
        yield door
