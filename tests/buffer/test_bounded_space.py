"""A bounded buffer takes bounded space, by the maintenance of ordinary calls alone."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import numpy as np
import pytest

from replaydb import Capacity, Episode, EpisodeGroup, Keep, Store
from replaydb.database import payloads as outside
from support.buckets import Endpoint
from support.cluster import Node, template
from support.engines import in_turn, postgresql_nightly
from support.groups import group

CAPACITY, PUT = 16, 8
TOKENS = 8000

Size = Callable[[Store], Awaitable[int]]
_SIZE = (
    "SELECT sum(pg_total_relation_size(oid)) FROM pg_class "
    "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
)
_PAYLOADS = "SELECT pg_total_relation_size('payload')"
#: Whether autovacuum has to clean the payloads, or a connection may yet report deleted rows.
_UNCLEAN = """
    SELECT n_dead_tup > 50 + 0.2 * greatest(toast.reltuples, 0) OR EXISTS (
        SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND backend_type = 'client backend'
            AND pid <> pg_backend_pid())
    FROM pg_class AS one JOIN pg_class AS toast ON toast.oid = one.reltoastrelid
        JOIN pg_stat_all_tables ON relid = toast.oid
    WHERE one.relname = 'payload'
"""
_VACUUM = "VACUUM payload, episode, episode_group, task, draw, draw_group, pack"


def bytes_in(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where the payloads are: a URL, or None for the database."""
    if request.param == "bucket":
        endpoint: Endpoint = request.getfixturevalue("endpoint")
        return endpoint.url
    return None if request.param == "inside" else (tmp_path / "packs").as_uri()


@pytest.fixture
def size(url: str, place: str | None, request: pytest.FixtureRequest, tmp_path: Path) -> Size:
    """Measure the bytes of the database and of the payloads outside."""

    async def of_database() -> int:
        if url.startswith("sqlite"):
            path = tmp_path / "replay.db"
            with closing(sqlite3.connect(path)) as client:  # else its log grows first, to 16 MB
                client.execute("PRAGMA wal_checkpoint")
            return bytes_in(tmp_path, "replay.db")
        await ask(url, _VACUUM)  # in place of autovacuum, which is off in tests
        return int(await ask(url, _SIZE))

    async def measure(_: Store) -> int:
        packs = bytes_in(tmp_path, "packs/*/*.pack")
        if place is not None and place.startswith("s3:"):
            objects = request.getfixturevalue("endpoint").right.objects
            packs = sum(map(len, objects.values()))
        return await of_database() + packs

    return measure


async def ask(url: str, sql: str) -> Any:
    """Run SQL with a plain database client."""
    client = await asyncpg.connect(url)
    try:
        return await client.fetchval(sql)
    finally:
        await client.close()


@pytest.fixture
def always_tidy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every put remove and compact packs, once the put before has."""
    monkeypatch.setattr(outside, "TIDY_SECONDS", -1.0)


async def nothing(_: Store) -> int:
    return 0


async def tidied(store: Store) -> None:
    """Wait until the last put has removed and compacted packs."""
    if store._payloads._tidying is not None:
        await store._payloads._tidying


async def fill(
    url: str, place: str | None, size: Size, eviction: Any, turns: int
) -> dict[int, int]:
    """Put several times the capacity; return the bytes after each time."""
    chance = np.random.default_rng(1)
    sizes = {}
    options: Any = {} if place is None else {"payloads": place, "payload_grace": 1e-6}
    async with Store.open(url, **options) as store:
        buffer = await store.buffer(
            "bounded",
            capacity=Capacity(groups=CAPACITY),
            eviction=eviction,
            on_evict="delete",
            keep_draws=Keep(count=8),
        )
        for turn in range(1, turns + 1):
            for _ in range(CAPACITY // PUT):
                await buffer.put(
                    [
                        EpisodeGroup(
                            "t",
                            [
                                Episode(
                                    prompt_ids=[1],
                                    response_ids=chance.integers(1000, size=TOKENS),
                                    reward=1.0,
                                )
                            ],
                            priority=chance.random(),
                        )
                        for _ in range(PUT)
                    ]
                )
                await tidied(store)
            await buffer.sample(4)
            sizes[turn] = await size(store)
    return sizes


@pytest.mark.parametrize(
    ("engine_name", "place"),
    [("sqlite", "inside"), ("postgresql", "inside"), *in_turn(["folder", "bucket"])],
    indirect=["place"],
)
@pytest.mark.usefixtures("always_tidy")
async def test_bytes_do_not_grow(url: str, place: str | None, size: Size) -> None:
    sizes = await fill(url, place, size, "oldest", 20)
    assert abs(sizes[20] - sizes[10]) < 0.05 * sizes[10], sizes


@pytest.mark.nightly
def test_autovacuum_suffices() -> None:
    """With the server's defaults, except that it looks for work every second."""

    async def when_clean(node: Node) -> int:
        async with asyncio.timeout(300):
            while await node.ask(_UNCLEAN):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        return int(await node.ask(_PAYLOADS))

    with template() as node:
        node.configure("autovacuum = on\nautovacuum_naptime = 1s")
        node.start()
        sizes = []
        for _ in range(8):
            asyncio.run(fill(node.url(), None, nothing, "oldest", 1))
            sizes.append(asyncio.run(when_clean(node)))
    # The payloads, those deleted since, and deleted rows that are too few to start a vacuum.
    assert max(sizes) < 2.5 * sizes[0], sizes


@postgresql_nightly
@pytest.mark.usefixtures("always_tidy")
async def test_packs_of_few_live_groups_are_compacted(url: str, tmp_path: Path) -> None:
    """Of groups with random priorities, each put leaves a few. Packs are at least half live."""

    async def packs(store: Store) -> int:
        store._payloads.tidy_soon()  # as the next put: removes packs that the last one compacted
        await tidied(store)
        return bytes_in(tmp_path, "packs/*/*.pack")

    place = (tmp_path / "packs").as_uri()
    sizes = await fill(url, place, packs, "lowest_priority", 12)
    live = sizes[1]  # one capacity, of which nothing was evicted
    assert max(sizes.values()) <= 2 * live, sizes


@pytest.mark.parametrize(("chance", "expected"), [(0.0, False), (1.0, True)])
async def test_the_first_put_may_tidy(
    chance: float, expected: bool, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that live shorter than the interval tidy as often as others, on average."""
    monkeypatch.setattr(outside, "TIDY_SECONDS", 1e6)
    monkeypatch.setattr("replaydb.database.payloads.random.random", lambda: chance)
    async with Store.open(sqlite_url, payloads=(tmp_path / "packs").as_uri()) as store:
        buffer = await store.buffer("bounded")
        await buffer.put(group())
        assert (store._payloads._tidying is not None) == expected
