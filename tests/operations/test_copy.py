"""A copy has the same rows and payloads as the store, and draws the same groups afterwards."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import delete, select, text, update

import replaydb as rdb
from operations.conftest import populate
from replaydb import Store
from replaydb.database import copying, migrations
from replaydb.database.engines import backend_for
from replaydb.database.statements.table_ranges import OWN_TABLES, columns, families
from replaydb.database.tables.schema import (
    REVISIONS,
    buffer,
    episode_group,
    metadata,
    pack,
    payload,
    payload_place,
    run,
)
from replaydb.database.tables.views import VIEWS
from replaydb.operations import CopyReport, copy, verify
from support.connections import transaction
from support.damage import damage
from support.engines import postgresql_nightly, sqlite_nightly
from support.groups import group, groups
from support.invariants import check_invariants, group_rows, number_of

Contents = dict[str, list[tuple[object, ...]]]


@pytest.fixture
def target(engine_name: str, request: pytest.FixtureRequest) -> str:
    """A migrated database without rows, of the other engine than `url`."""
    name = "own_postgresql_url" if engine_name == "sqlite" else "sqlite_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
def empty_target(engine_name: str, request: pytest.FixtureRequest) -> str:
    """A database without tables, of the same engine as `url` or the other one."""
    other = "postgresql" if engine_name == "sqlite" else "sqlite"
    name = other if request.param == "other engine" else engine_name
    url: str = request.getfixturevalue(f"empty_{name}_url")
    return url


async def contents(url: str) -> Contents:
    """Return every row of every table, with payload lengths instead of payload locations."""
    found: Contents = {}
    async with transaction(url) as connection:
        for family in families():
            for table in (family.root, *family.children):
                # Not the copied columns: here, JSON is parsed.
                shown = columns(payload) if table is payload else table.columns
                rows = await connection.execute(select(*shown).order_by(*table.primary_key))
                found[table.name] = sorted(map(tuple, rows), key=repr)
    return found


async def payload_bytes(url: str) -> dict[str, list[bytes]]:
    """Return the token bytes of the groups of the buffer `math`, read by the store."""
    async with Store.open(url, read_only=True) as store:
        math = await store.buffer("math", create=False)
        found = await math.find(limit=1000)
        stored = await math.get([one.id for one in found if one.num_bytes])
        return {
            one.group_uid: [each.token_ids.tobytes() for each in one.episodes] for one in stored
        }


def test_every_table_is_copied_or_excluded() -> None:
    views = {view.table.name for view in VIEWS}
    copied = [one for family in families() for one in (family.root, *family.children)]
    assert {one.name for one in [*copied, *OWN_TABLES]} == metadata.tables.keys() - views
    assert len(copied) == len(set(copied))


@pytest.mark.parametrize(
    ("engine_name", "empty_target", "here", "there"),
    [
        ("sqlite", "other engine", "in", "out"),
        ("postgresql", "other engine", "out", "in"),
        ("postgresql", "same engine", "in", "out"),
        pytest.param("postgresql", "other engine", "in", "out", marks=pytest.mark.nightly),
        pytest.param("sqlite", "other engine", "out", "in", marks=pytest.mark.nightly),
        pytest.param("sqlite", "same engine", "in", "out", marks=pytest.mark.nightly),
    ],
    indirect=["empty_target"],
)
async def test_everything_is_the_same(
    url: str, empty_target: str, here: str, there: str, location: Callable[[str], str]
) -> None:
    target = empty_target
    await populate(url, payloads=location("here") if here == "out" else None)
    seen: list[CopyReport] = []
    payloads = location("there") if there == "out" else None
    report = await copy(url, target, payloads=payloads, progress=seen.append)
    assert await contents(target) == await contents(url)
    assert await payload_bytes(target) == await payload_bytes(url)
    assert await number_of(target, pack) == int(there == "out")
    await check_invariants(target)
    assert report == seen[-1]
    assert report.is_finished
    assert report.num_seen == report.num_groups == await number_of(url, episode_group)
    assert report.num_payloads == report.num_checked == await number_of(url, payload)
    later_draws = []
    async with Store.open(url) as old, Store.open(target) as new:
        for store in (old, new):
            math = await store.buffer("math", create=False)
            batch = await math.sample(5, rdb.Prioritized(), step=9)
            more = await math.sample(5)
            ids = await math.put(groups(2, "later"))
            later_draws.append((batch.ids, batch.draw_id, more.ids, more.draw_id, ids))
    assert later_draws[0] == later_draws[1]


@postgresql_nightly
async def test_an_interrupted_copy_resumes(populated: str, target: str) -> None:
    def stop(report: CopyReport) -> None:
        if report.num_payloads:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await copy(populated, target, progress=stop)
    for write in (True, False):
        with pytest.raises(rdb.SchemaError, match="not finished"):
            await Store.open(target, read_only=not write)
    with pytest.raises(rdb.SchemaError, match="not finished"):
        await migrations.upgrade(target)
    report = await copy(populated, target)
    assert report.num_payloads == 0
    assert await contents(target) == await contents(populated)


async def test_changes_since_the_last_copy_are_copied(
    populated: str, target: str, location: Callable[[str], str]
) -> None:
    prepared = await copy(populated, target, payloads=location("there"), finish=False)
    assert not prepared.is_finished
    async with Store.open(populated, run="third") as store:
        math = await store.buffer("math")
        await math.put([group("m5", rewards=[0.0, 0.5, 1.0])], on_duplicate="replace")
        await math.put(group("m6", rewards=[2.0]), on_duplicate="renew")
        await math.delete(where=rdb.col.reward_mean == 0.5, tasks="code")
        await math.update(uids=["m7", "m8"], tags={"level": "x"}, priority=9.0)
        for one in await math.trajectories(uids="open"):
            if one.claim_uid is not None:
                await math.release_claim(one.claim_uid, reason="copied")
        await math.add_episode("open", group().episodes[0], position=0)
        await math.sample(4)
        for lease in await math.leases():
            await math.revoke(lease.id)
        await math.update_settings(indexed_tags=[])
        await store.buffer("third")
    async with transaction(populated) as connection:  # a run is deleted and created again
        second = run.c.name == "second"
        its_groups = episode_group.c.run_id.in_(select(run.c.id).where(second))
        await connection.execute(update(episode_group).where(its_groups).values(run_id=None))
        await connection.execute(delete(run).where(second))
    async with Store.open(populated, run="second"):
        pass
    report = await copy(populated, target)
    assert await contents(target) == await contents(populated)
    assert await payload_bytes(target) == await payload_bytes(populated)
    assert report.num_payloads == 3
    await check_invariants(target)


@sqlite_nightly
async def test_while_others_write(
    populated: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["replaydb.operations.copy"], "PAGE", 5)
    stop = asyncio.Event()

    async def work() -> None:
        async with Store.open(populated, run="busy") as store:
            math, i = await store.buffer("math"), 0
            while not stop.is_set():
                await math.put([group(f"busy-{i}-{j}", tags={"level": j}) for j in range(4)])
                await math.sample(3)
                async with math.lease(2, ttl=60) as lease:
                    await (lease.ack() if i % 2 else lease.nack())
                await math.delete(uids=[f"busy-{i - 2}-0"])
                i += 1
                await asyncio.sleep(0)

    writer = asyncio.create_task(work())
    try:
        report = await copy(populated, target)
    finally:
        stop.set()
        await writer
    await check_invariants(target)  # a consistent state
    assert report.is_finished
    old, new = await group_rows(populated), await group_rows(target)
    first = [{row["group_uid"] for row in some if row["run_id"] == 1} for some in (old, new)]
    assert first[0] == first[1]  # groups that were not changed


@postgresql_nightly
async def test_a_target_in_use_is_refused(populated: str, target: str, tmp_path: Path) -> None:
    async with Store.open(target) as store:
        await store.buffer("mine")
    before = await contents(target)
    with pytest.raises(rdb.InvalidInputError, match="rows in the table buffer") as caught:
        await copy(populated, target)
    assert caught.value.field == "target"
    assert await contents(target) == before
    async with Store.open(target) as store:
        assert len(await store.buffers()) == 1
    missing = f"sqlite:///{tmp_path / 'missing.db'}"
    with pytest.raises(rdb.DatabaseUnavailableError, match="no such file"):
        await copy(missing, target)
    assert not (tmp_path / "missing.db").exists()


@postgresql_nightly
async def test_damaged_payloads_are_named_and_all_other_data_is_copied(
    populated: str, target: str
) -> None:
    async with transaction(populated) as connection:
        await connection.execute(update(payload).values(checksum=7).where(payload.c.group_id == 5))
    with pytest.raises(rdb.CorruptPayloadError, match="checksum") as caught:
        await copy(populated, target)
    assert list(caught.value.group_ids) == [5]
    assert await number_of(target, payload) == await number_of(populated, payload) - 1
    with pytest.raises(rdb.SchemaError):
        await Store.open(target)
    async with Store.open(populated) as store:
        await (await store.buffer("math")).delete(ids=[5])
    await copy(populated, target)
    assert await contents(target) == await contents(populated)


@postgresql_nightly
async def test_a_damaged_group_deleted_during_the_copy(populated: str, target: str) -> None:
    async with transaction(populated) as connection:
        await connection.execute(update(payload).where(payload.c.group_id == 5).values(checksum=1))

    async def delete_it() -> None:
        async with Store.open(populated) as store:
            await (await store.buffer("math")).delete(ids=[5])

    threads: list[Thread] = []

    def delete_meanwhile(report: CopyReport) -> None:
        if report.num_rows and not threads:
            threads.append(Thread(target=lambda: asyncio.run(delete_it())))
            threads[0].start()
            threads[0].join()

    assert (await copy(populated, target, progress=delete_meanwhile)).is_finished
    assert await contents(target) == await contents(populated)


@pytest.mark.parametrize(
    ("engine_name", "layout"),
    [
        ("sqlite", "in"),
        ("postgresql", "out"),
        pytest.param("sqlite", "out", marks=pytest.mark.nightly),
        pytest.param("postgresql", "in", marks=pytest.mark.nightly),
    ],
)
async def test_a_target_that_reads_back_differently_stays_closed(
    populated: str, target: str, layout: str, location: Callable[[str], str]
) -> None:
    """Its rows match, but bytes of a payload were damaged after they were written."""
    payloads = location("there") if layout == "out" else None
    await copy(populated, target, payloads=payloads, finish=False)
    await damage(target, 5)
    seen: list[CopyReport] = []
    with pytest.raises(
        rdb.CorruptPayloadError, match=r"1 of 50 .* when read back.* copy again"
    ) as err:
        await copy(populated, target, progress=seen.append)
    assert list(err.value.group_ids) == [5]
    assert seen[-1].num_checked == 49
    assert not any(one.is_finished for one in seen)
    for read_only in (True, False):
        with pytest.raises(rdb.SchemaError, match="not finished"):
            await Store.open(target, read_only=read_only)
    again = await copy(populated, target)
    assert (again.num_payloads, again.num_checked, again.is_finished) == (1, 50, True)
    assert await payload_bytes(target) == await payload_bytes(populated)
    await check_invariants(target)


async def test_the_grace_period_is_copied(
    url: str, target: str, location: Callable[[str], str]
) -> None:
    await (await Store.open(url, payloads=location("here"), payload_grace=60)).close()
    await copy(url, target, payloads=location("there"))
    async with transaction(target) as connection:
        assert await connection.scalar(select(payload_place.c.grace_seconds)) == 60


@postgresql_nightly
async def test_of_concurrent_copies_the_last_one_continues(populated: str, target: str) -> None:
    async def another() -> None:
        await copy(populated, target)
        async with Store.open(target) as store:
            await (await store.buffer("math")).put(groups(3, "after"))

    others: list[Thread] = []

    def let_another_finish(report: CopyReport) -> None:
        if report.num_payloads and not others:
            others.append(Thread(target=lambda: asyncio.run(another())))
            others[0].start()
            others[0].join()

    with pytest.raises(rdb.SchemaError, match="another copy into it has begun since"):
        await copy(populated, target, progress=let_another_finish)
    assert await number_of(target, episode_group) == await number_of(populated, episode_group) + 3
    with pytest.raises(rdb.SchemaError, match="begun since"):
        await copying.end_copy(backend_for(target), "copying another")


async def test_a_copy_that_begins_during_preparation(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading and marking the revision of the target."""
    backend = backend_for(empty_url)
    prepare = migrations.prepare

    async def begun_before(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(migrations, "prepare", prepare)
        await copying.begin_copy(backend)
        await prepare(*args, **options)

    monkeypatch.setattr(migrations, "prepare", begun_before)
    await copying.end_copy(backend, await copying.begin_copy(backend))


async def test_a_store_opened_on_the_empty_target_cannot_write(populated: str, target: str) -> None:
    async with Store.open(target) as store:
        await copy(populated, target, finish=False)
        for create in (True, False):
            for name in ("mine", "math"):
                with pytest.raises(rdb.SchemaError, match="not finished"):
                    await store.buffer(name, create=create)
        with pytest.raises(rdb.SchemaError, match="not finished"):
            await Store.open(target, run="mine")
        await copy(populated, target)
        assert await contents(target) == await contents(populated)
        assert (await store.buffer("math")).name == "math"


async def test_creating_a_buffer_and_beginning_a_copy_exclude_each_other(target: str) -> None:
    for _ in range(5):
        async with Store.open(target) as store:
            created, begun = await asyncio.gather(
                store.buffer("mine"),
                copying.begin_copy(backend_for(target)),
                return_exceptions=True,
            )
        assert isinstance(created, rdb.SchemaError) != isinstance(begun, rdb.InvalidInputError)
        async with transaction(target) as connection:
            await connection.execute(delete(buffer))
            sql = text("UPDATE replaydb_alembic_version SET version_num = :revision")
            await connection.execute(sql, {"revision": REVISIONS[-1]})


async def test_json_of_another_type_is_another_value(populated: str, target: str) -> None:
    async def change(tags: dict[str, object]) -> None:
        async with Store.open(populated) as store:
            await (await store.buffer("math")).update(uids="m7", tags=tags)

    await change({"level": 1, "x": 1.0, "zero": 0.0})
    await copy(populated, target, finish=False)
    await change({"level": True, "x": 1, "zero": -0.0})
    await copy(populated, target)
    assert repr(await contents(target)) == repr(await contents(populated))


async def test_json_scalars_are_copied_exactly(populated: str, target: str) -> None:
    """SQLite converts numeric text to numbers; values must be read as they were put."""
    given = {
        "one": 1.0, "minus": -0.0, "large": 1e16, "beyond": 2**64 - 1, "third": 1 / 3, "yes": True,
        "text": "shard-3/17", "digits": "12", "hex": "0x10", "empty": "", "list": [1.0, "a"],
    }  # fmt: skip
    async with Store.open(populated) as store:
        await (await store.buffer("math")).put(group("cursors"), cursor=given | {"old": 7})
    async with transaction(populated) as connection:  # as earlier versions stored it on SQLite
        await connection.execute(text("UPDATE cursor SET value = '7' WHERE name = 'old'"))
    assert (await copy(populated, target)).is_finished
    for url in (populated, target):
        async with Store.open(url, read_only=True) as store:
            math = await store.buffer("math", create=False)
            found = {name: await math.cursor(name) for name in [*given, "old"]}
            assert repr(found) == repr(given | {"old": 7})
            assert (await verify(store)).is_sound
