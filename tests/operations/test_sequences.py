"""Every table of a copy accepts rows, and a sequence that is behind is found and fixed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from sqlalchemy import text

import replaydb as rdb
from operations.conftest import populate
from replaydb import OnDuplicate, Store
from replaydb.database.engines import backend_for
from replaydb.operations import copy, delete_buffer, delete_run, examine, verify
from support.command import run
from support.connections import transaction
from support.engines import postgresql_nightly
from support.groups import group, groups
from support.invariants import check_invariants
from support.sequences import largest_ids, next_ids, rewind

#: More than the attempts of a transaction, so that retries cannot hide a wrong sequence.
VERSIONS = 16
#: Tables in which SQLite continues after the largest id, so that ids of deleted rows recur.
UNCOUNTED = {"policy_change"}


async def populate_long(url: str, payloads: str) -> None:
    """Fill every table with ids with many rows, and delete the last ones."""
    await populate(url, payloads=payloads)
    async with Store.open(url, run="last", lineage="first") as store:
        math = await store.buffer("math")
        for version in range(5, VERSIONS + 1):
            await math.advance_policy(version)
        for i in range(4):
            last = await store.buffer(f"last-{i}")
            await last.put(groups(2, f"task-{i}"))
            await last.advance_policy(1)
            await last.sample(1)
            await (await last.lease(1, ttl=60)).ack()
    async with Store.open(url) as store:
        for i in range(1, 4):
            await delete_buffer(store, f"last-{i}")
        await delete_run(store, "last")
    async with transaction(url) as connection:
        await connection.execute(text("DELETE FROM pack WHERE live_parts = 0"))


async def train(url: str, *, version: int) -> list[object]:
    """Insert into every table by the public API. Return the ids."""
    async with Store.open(url, run=f"run-{version}", lineage="first") as store:
        math = await store.buffer("math")
        ids = await math.put(groups(6, f"new-{version}"), cursor={"data": version})
        await math.advance_policy(version)
        batch = await math.sample(3, rdb.Prioritized(), step=version)
        await math.update_priorities(batch.ids, [1.5] * 3)
        lease = await math.lease(2, ttl=600, tasks=f"new-{version}")
        await lease.ack()
        await math.open_group("gsm8k", f"open-{version}", 2)
        other = await store.buffer(f"other-{version}")
        await other.put(groups(1, "more"))
        await other.advance_policy(1)
        assert await math.cursor("data") == version
        return [*ids, *batch.ids, batch.draw_id, lease.id, *lease.batch.ids]


@pytest.fixture(params=["same engine", "there and back"])
def targets(engine_name: str, request: pytest.FixtureRequest) -> list[str]:
    """Databases without tables; each is the target of a copy of the one before."""
    other = "postgresql" if engine_name == "sqlite" else "sqlite"
    engines = {
        "same engine": [engine_name],
        "there and back": [other, engine_name],
    }
    return [request.getfixturevalue(f"empty_{name}_url") for name in engines[request.param]]


@pytest.mark.parametrize(
    ("engine_name", "targets"),
    [
        ("sqlite", "there and back"),
        ("postgresql", "same engine"),
        pytest.param("sqlite", "same engine", marks=pytest.mark.nightly),
        pytest.param("postgresql", "there and back", marks=pytest.mark.nightly),
    ],
    indirect=["targets"],
)
async def test_every_table_of_a_copy_accepts_rows(
    url: str, targets: list[str], location: Callable[[str], str]
) -> None:
    await populate_long(url, location("here"))
    stores = [url, *targets]
    for i, (source, target) in enumerate(pairwise(stores)):
        await copy(source, target, payloads=location(f"there-{i}"))
    given = await largest_ids(url)
    assert given["policy_change"] > 12
    seen = []
    for each in stores:
        seen.append(await train(each, version=VERSIONS + 1))
        await check_invariants(each)
        async with Store.open(each) as store:
            assert (await verify(store)).is_sound
    assert all(one == seen[0] for one in seen)  # ids of deleted rows were not generated again
    expected = await next_ids(url)
    for target in targets:
        largest, found = await largest_ids(target), await next_ids(target)
        assert all(found[name] > last for name, last in largest.items())
        same = expected.keys() - UNCOUNTED - {"pack"}
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}


async def test_a_copy_whose_sequences_stay_behind_stays_closed(
    populated: str, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    administration = type(backend_for(empty_url).administration)
    with monkeypatch.context() as patched:
        patched.setattr(administration, "advance_sequences", lambda *_: None)
        with pytest.raises(rdb.DatabaseError, match=r"of table \w+ the sequence has generated"):
            await copy(populated, empty_url)
    with pytest.raises(rdb.SchemaError, match="not finished"):
        await Store.open(empty_url)
    assert (await copy(populated, empty_url)).is_finished


async def test_sequences_that_are_behind_are_found_and_fixed(
    populated: str, engine_name: str
) -> None:
    """As after a copy by an earlier version."""
    async with Store.open(populated, run="first") as store:
        math = await store.buffer("math")
        for version in range(5, VERSIONS + 1):
            await math.advance_policy(version)
    await rewind(populated, engine_name)
    largest = await largest_ids(populated)
    expected = {f"table {name}" for name, last in largest.items() if last > 1}
    if engine_name == "sqlite":
        expected -= {f"table {name}" for name in UNCOUNTED}
    else:
        async with Store.open(populated, run="first") as store:
            math = await store.buffer("math")
            for call, table in (
                (lambda: math.advance_policy(VERSIONS + 1), "policy_change"),
                (lambda: math.put(groups(1, "x")), "episode_group"),
            ):
                with pytest.raises(rdb.DatabaseError, match=rf"{table}.*verify --repair"):
                    await call()
    [found] = [one for one in await examine(populated) if one.subject == "sequences"]
    assert (found.level, found.fix) == ("bad", "replaydb verify --repair")
    async with Store.open(populated) as store:
        report = await verify(store)
        assert {one.where for one in report.problems} == expected
        assert {one.kind for one in report.problems} == {"sequence"}
        assert not report.is_sound
        repaired = await verify(store, repair=True)
        assert repaired.num_repaired == repaired.num_problems == len(expected)
        assert repaired.is_sound
        assert (await verify(store)).num_problems == 0
    [found] = [one for one in await examine(populated) if one.subject == "sequences"]
    assert found.level == "good"
    await train(populated, version=VERSIONS + 1)


async def test_sequences_are_fixed_whatever_else_is_wrong(populated: str, engine_name: str) -> None:
    """They depend on ids only."""
    await rewind(populated, engine_name)
    async with transaction(populated) as connection:
        await connection.execute(text("UPDATE episode_group SET num_tokens = 1 WHERE id = 3"))
    async with Store.open(populated) as store:
        report = await verify(store, repair=True)
    fixed = {one.kind: one.is_repaired for one in report.problems}
    assert fixed == {"group": False, "sequence": True}


async def test_a_counter_of_sqlite_that_was_lowered_refuses_no_put(
    populated_sqlite_url: str,
) -> None:
    largest = await largest_ids(populated_sqlite_url)
    async with transaction(populated_sqlite_url) as connection:
        await connection.execute(text("DELETE FROM sqlite_sequence"))
    async with Store.open(populated_sqlite_url) as store:
        ids = await (await store.buffer("math")).put(groups(3, "new"))
    assert min(ids) == largest["episode_group"] + 1


@pytest.mark.parametrize("on_duplicate", ["ignore", "renew"])
async def test_a_put_that_gets_the_id_of_a_stored_group_stores_nothing(
    postgresql_url: str, on_duplicate: OnDuplicate
) -> None:
    """Although the group that would get it is stored already, and the other id is new."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math")
        [taken] = await buffer.put(group("a"))
        for uids in (["a", "b"], ["a"]):
            async with transaction(postgresql_url) as connection:
                sql = text("SELECT setval('episode_group_id_seq', :next, false)")
                await connection.execute(sql, {"next": taken})
            put = buffer.put([group(uid) for uid in uids], on_duplicate=on_duplicate)
            if uids == ["a"] and on_duplicate == "ignore":  # no id is used
                assert await put == [taken]
                continue
            with pytest.raises(rdb.DatabaseError, match="of table episode_group is behind"):
                await put
            assert [one.group_uid for one in await buffer.find()] == ["a"]
    await check_invariants(postgresql_url)


@pytest.mark.parametrize("why", ["evicted", "archived content"])
async def test_a_replaced_group_that_gets_the_id_of_a_stored_one(
    postgresql_url: str, why: str
) -> None:
    """It needs a new id, because the new content would be removed with the old."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math", keep_archived=rdb.Keep(count=9))
        await buffer.put(groups(2))
        if why == "evicted":
            await buffer.update_settings(capacity=rdb.Capacity(groups=1))
            await buffer.put(group("last"))
        before = await buffer.find()
        async with transaction(postgresql_url) as connection:
            await connection.execute(text("SELECT setval('episode_group_id_seq', 1, false)"))
        new = group("gsm8k-0", status="completed" if why == "evicted" else "archived")
        with pytest.raises(rdb.DatabaseError, match="of table episode_group is behind"):
            await buffer.put(new, on_duplicate="replace")
        assert await buffer.find() == before
    await check_invariants(postgresql_url)


async def test_a_sequence_that_was_set_by_hand(
    populated_postgresql_url: str, empty_postgresql_url: str
) -> None:
    """`is_called` is false: its value is the next id, not the last one."""
    largest = await largest_ids(populated_postgresql_url)
    async with transaction(populated_postgresql_url) as connection:
        for name, last in largest.items():
            sql = text(f"SELECT setval('{name}_id_seq', :next, false)")
            await connection.execute(sql, {"next": last + 1})
    async with Store.open(populated_postgresql_url) as store:
        assert (await verify(store)).is_sound
    await copy(populated_postgresql_url, empty_postgresql_url)
    for url in (populated_postgresql_url, empty_postgresql_url):
        async with Store.open(url) as store:
            [group_id] = await (await store.buffer("math")).put(groups(1, "new"))
        assert group_id == largest["episode_group"] + 1


@postgresql_nightly
def test_the_commands_find_and_fix_it(populated: str, engine_name: str) -> None:
    asyncio.run(rewind(populated, engine_name))
    assert "replaydb verify --repair" in run("doctor", url=populated).output
    found = run("verify", url=populated)
    assert found.exit_code == 1
    assert "table episode_group" in found.output
    assert run("verify", "--repair", url=populated).exit_code == 0
    assert run("verify", url=populated).exit_code == 0
