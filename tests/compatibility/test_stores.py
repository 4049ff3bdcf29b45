"""Stores of earlier releases, which every later release opens, copies and continues.

Until revision 0011 there is one small file for each revision. Since 0012 there are stores on both
engines with rows of every kind: see `stores.py`. `tests/data/make_revision.py` wrote them.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

import replaydb as rdb
from compatibility.stores import DATA, NAMES, Facts, facts_of, restore
from replaydb.database import migrations
from replaydb.database.runtime import revisions
from replaydb.database.tables.schema import LATE_PART, REVISIONS, own_tables, payload
from replaydb.operations import copy, verify
from support.connections import transaction
from support.groups import group
from support.invariants import check_invariants, number_of
from support.postgres import PostgresServer

FILES = tuple(path.name.removesuffix(".db.gz") for path in sorted(DATA.glob("revision_*.db.gz")))
FOLDERS = tuple(path.name for path in sorted(DATA.glob("revision_*")) if path.is_dir())


def test_every_revision_has_a_file_or_stores() -> None:
    assert (*FILES, *FOLDERS) == tuple(f"revision_{revision}" for revision in REVISIONS)


@pytest.mark.parametrize("name", FILES)
async def test_an_old_file_opens_with_all_its_data(name: str, tmp_path: Path) -> None:
    path = tmp_path / "replay.db"
    path.write_bytes(gzip.decompress((DATA / f"{name}.db.gz").read_bytes()))
    url = f"sqlite:///{path}"
    assert await migrations.current(url) == name.removeprefix("revision_")

    async with rdb.Store.open(url, migrate=True) as store:
        buffer = await store.buffer("math", create=False)
        assert (buffer.policy_version, buffer.settings.max_staleness) == (3, 4)
        groups = await buffer.get([1, 2, 3, 4, 5])
        assert [(group.group_uid, group.task_name) for group in groups] == [
            ("group-0", "gsm8k"),
            ("group-1", "code"),
            ("group-2", "gsm8k"),
            ("group-3", "code"),
            ("group-4", "gsm8k"),
        ]
        assert sum(group.times_sampled for group in groups) == 2
        assert {group.staleness for group in groups} == {1}
        assert groups[3].tags == {"level": "hard"}
        second = groups[3].episodes[1]
        assert second.reward == 1.0
        assert list(second.token_ids) == [10, 11, 12, 3, 1]
        (new_id,) = await buffer.put(
            rdb.EpisodeGroup(
                task_name="gsm8k",
                episodes=[rdb.Episode(prompt_ids=[1], response_ids=[2], reward=0.0)],
            )
        )
        assert new_id == 7  # 6 was deleted, and is not used again
        assert len((await buffer.sample(6, rdb.Uniform())).ids) == 6
    assert await migrations.check(url) == ()


#: In `make test`, the stores of the newest revision.
_OLDER = [pytest.param(folder, marks=pytest.mark.nightly) for folder in FOLDERS[:-1]]


@pytest.fixture(params=[*_OLDER, FOLDERS[-1]])
def folder(request: pytest.FixtureRequest) -> Path:
    """The stores of a revision."""
    return DATA / str(request.param)


#: Tests that run on two of the stores in `make test`.
INSIDE, OUTSIDE = (
    pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name.endswith(layout) else pytest.mark.nightly)
            for name in NAMES
        ],
    )
    for layout in ("inside", "outside")
)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A store of a revision."""
    return str(request.param)


@pytest.fixture
def recorded(folder: Path, name: str) -> Facts:
    """What was read from the store when it was written."""
    facts: Facts = json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))
    return facts


@pytest.fixture
def server(name: str, request: pytest.FixtureRequest) -> PostgresServer | None:
    """The server of the store."""
    return request.getfixturevalue("postgres") if name.startswith("postgresql") else None


@pytest.fixture
def old_url(
    folder: Path, name: str, server: PostgresServer | None, tmp_path: Path
) -> Iterator[str]:
    """The restored store, upgraded."""
    url = restore(folder / name, tmp_path, server)
    assert asyncio.run(migrations.current(url)) == folder.name.removeprefix("revision_")
    asyncio.run(migrations.upgrade(url))
    if name.endswith("outside"):
        asyncio.run(adopt(url, tmp_path / "packs"))
    yield url
    asyncio.run(check_invariants(url, idle_leases=True))
    if server is not None:
        server.drop_database(url)


@pytest.fixture
def other_url(name: str, request: pytest.FixtureRequest) -> str:
    """An empty database on the other engine."""
    other = "sqlite" if name.startswith("postgresql") else "postgresql"
    url: str = request.getfixturevalue(f"empty_{other}_url")
    return url


async def adopt(url: str, packs: Path) -> None:
    """Connect a restored store to its packs, as `docs/deployment.md` describes it."""
    async with rdb.Store.open(url) as store:
        await store.relocate_payloads(packs.as_uri())
        await store.adopt_payloads()


async def test_everything_is_as_it_was_written(old_url: str, recorded: Facts) -> None:
    assert difference(recorded, await facts_of(old_url)) == []
    async with rdb.Store.open(old_url) as store:
        assert (await verify(store)).problems == ()
    assert await migrations.check(old_url) == ()


@OUTSIDE
async def test_it_is_copied_to_the_other_engine(
    old_url: str, recorded: Facts, other_url: str
) -> None:
    assert (await copy(old_url, other_url)).is_finished
    assert difference(recorded, await facts_of(other_url)) == []


@INSIDE
async def test_it_is_downgraded_and_upgraded(old_url: str, recorded: Facts) -> None:
    """Unless clients of the lower revision could not read the payloads."""
    current = await migrations.current(old_url)
    before = REVISIONS[REVISIONS.index(current) - 1]
    async with transaction(old_url) as connection:
        newest = await connection.scalar(select(func.max(payload.c.codec_version)))
        late = select(payload.c.part).where(payload.c.part == LATE_PART)
        has_late = (await connection.execute(late)).first() is not None
    if has_late and before < revisions.LATE_SINCE:
        with pytest.raises(rdb.SchemaError, match="values that were added later"):
            await migrations.downgrade(old_url, before)
    elif newest > revisions.newest_format(before):
        with pytest.raises(rdb.SchemaError, match="payloads of a later format"):
            await migrations.downgrade(old_url, before)
    else:
        await migrations.downgrade(old_url, before)
        await migrations.upgrade(old_url)
        if before < "0014":
            for row in recorded["episodes"]:
                row.pop("longest_row", None)
    assert difference(recorded, await facts_of(old_url)) == []


@OUTSIDE
async def test_it_continues(old_url: str) -> None:
    async with rdb.Store.open(old_url, run="first") as store:
        math = await store.buffer("math", create=False)
        before = await math.stats(totals=False)
        await math.put([group(f"new-{i}", version=6, tags={"level": 0}) for i in range(4)])
        assert await math.add_episode("pending", group().episodes[0]) is rdb.GroupStatus.COMPLETED
        batch = await math.sample(4, where=rdb.col.tags["level"] == 0)
        assert len(batch) == 4
        lease = await math.lease(8, ttl=60, step=7)
        assert (await lease.ack()).settled == tuple(sorted(lease.batch.ids))
        (trainer,) = [
            one for one in await math.leases() if one.owner == "trainer" and one.group_ids
        ]
        resumed = await math.open_lease(trainer.id, ttl=60)
        assert (await resumed.ack()).settled == tuple(sorted(trainer.group_ids))
        await math.advance_policy(7)
        after = await math.stats(totals=False)
        assert sum(task.num_inserted for task in after.tasks) == 4 + sum(
            task.num_inserted for task in before.tasks
        )
        for name in ("limited", "queue", "deleted"):
            buffer = await store.buffer(name, create=False)
            await buffer.put(group(f"new of {name}", "code", version=1, priority=9.0))
            assert (await buffer.sample(1, at_least=1)).ids


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_no_table_is_empty(engine: str, tmp_path: Path, postgres: PostgresServer) -> None:
    """A release that adds a table puts rows into the stores that it writes."""
    empty = set(own_tables()) - ({"commit_proof"} if engine == "sqlite" else set())
    for name in (name for name in NAMES if name.startswith(engine)):
        at = tmp_path / name
        at.mkdir()
        url = restore(DATA / FOLDERS[-1] / name, at, postgres if engine == "postgresql" else None)
        empty -= {table for table in empty if asyncio.run(number_of(url, own_tables()[table]))}
    assert empty == set()


def difference(recorded: Facts, found: Facts) -> list[str]:
    """Return what was recorded and is not found. Later releases may find more."""
    different = []
    for table, rows in recorded.items():
        if not isinstance(rows, list):
            rows, there = [rows], [found[table]]
        else:
            there = found[table]
            if len(rows) != len(there):
                different.append(f"{table}: {len(there)} rows, expected {len(rows)}")
        for row, now in zip(rows, there, strict=False):
            different += [
                f"{table}: {key} is {now.get(key)!r}, expected {value!r}"
                for key, value in row.items()
                if not _has(now.get(key), value)
            ]
    return different


def _has(found: Any, recorded: Any) -> bool:
    """Whether a value is the recorded one. An object may have more keys."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return all(_has(found.get(key), value) for key, value in recorded.items())
    if isinstance(recorded, list) and isinstance(found, list):
        return len(recorded) == len(found) and all(map(_has, found, recorded))
    return found is recorded or bool(found == recorded)  # there is one NaN in JSON
