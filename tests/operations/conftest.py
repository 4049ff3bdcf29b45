"""Stores with rows in every table, to be copied and checked."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import replaydb as rdb
from replaydb import Store
from support.groups import GENERATED, conversation, episode, group, groups, long_group
from support.postgres import PostgresServer

#: In seconds: no lease expires and no deadline passes while the tests run.
DAY = 86_400.0


async def populate(url: str, *, payloads: str | None = None) -> None:
    """Fill a store: every status, two buffers, runs with lineage, leases, draws, cursors, tags."""
    async with Store.open(url, run="first", run_metadata={"lr": 1e-6}, payloads=payloads) as store:
        math = await store.buffer(
            "math", seed=7, indexed_tags=["level"], max_staleness=20, capacity=rdb.Capacity(500)
        )
        await math.put(
            [group(f"m{i}", tags={"level": i % 3, "x": 1e16}, version=i % 4) for i in range(40)],
            cursor={"gsm8k": 0.1, "text": {"at": [1, 2.50]}},
        )
        await math.put(groups(5, "code", version=1, priority=3.0))
        texts = episode(0.5, 2, text=GENERATED, metadata={"text": GENERATED})
        talk = rdb.EpisodeGroup("code", [conversation(), texts], group_uid="talk", prompt=GENERATED)
        await math.put([talk, long_group("long", 9000), group("ä\u2028", status="failed")])
        await math.open_group("gsm8k", "open", 3, deadline=DAY)
        await math.add_episode("open", episode(1.0, text="one"), position=1)
        await math.claim(ttl=DAY)
        await math.advance_policy(4)
        await math.sample(8, rdb.Prioritized(), step=1)
        await (await math.lease(3, ttl=DAY, step=2)).ack()
        await math.lease(2, ttl=DAY, step=3)
        await math.delete(uids=["m0", "m39"])
        await math.update(uids="m1", status="archived")
    async with Store.open(url, run="second", lineage="first") as store:
        await (await store.buffer("other")).put(groups(3, "code", version=2))
        math = await store.buffer("math")
        await math.put(group("newest"))  # deleted, but the largest generated id
        await math.delete(uids="newest")


@pytest.fixture
def location(tmp_path: Path) -> Callable[[str], str]:
    """Create folders for payloads by name; return their URLs."""

    def made(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        return folder.as_uri()

    return made


@pytest.fixture(scope="session")
def _populated_file(_migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(shutil.copy(_migrated_file, tmp_path_factory.mktemp("populated") / "replay.db"))
    asyncio.run(populate(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def _populated_database(postgres: PostgresServer, _migrated_template: str) -> str:
    url = postgres.create_database("populated", _migrated_template)
    asyncio.run(populate(url))
    return url


@pytest.fixture
def populated_sqlite_url(_populated_file: Path, tmp_path: Path) -> str:
    """A SQLite file with rows in every table, payloads inside."""
    return f"sqlite:///{shutil.copy(_populated_file, tmp_path / 'populated.db')}"


@pytest.fixture
def populated_postgresql_url(postgres: PostgresServer, _populated_database: str) -> Iterator[str]:
    """A PostgreSQL database with rows in every table, payloads inside."""
    url = postgres.create_database("populated", _populated_database)
    yield url
    postgres.drop_database(url)


@pytest.fixture
def populated(engine_name: str, request: pytest.FixtureRequest) -> str:
    """A store with rows in every table, payloads inside."""
    address: str = request.getfixturevalue(f"populated_{engine_name}_url")
    return address
