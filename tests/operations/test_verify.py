"""`verify` finds and reports problems, and repairs counters, sequences and statuses."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select, text, update

import replaydb as rdb
from operations.conftest import populate
from replaydb import Store
from replaydb.database.tables.schema import (
    buffer,
    episode,
    episode_group,
    lease,
    pack,
    payload,
    task,
    transcript,
)
from replaydb.database.tables.schema import group_tag as tag
from replaydb.operations import VerifyReport, verify
from replaydb.operations.reading import Fetched, every_payload
from support.connections import transaction
from support.damage import damage, pack_file
from support.engines import in_turn, postgresql_nightly
from support.groups import group
from support.invariants import check_invariants, number_of

LEASED = episode_group.c.group_status == "leased"
FREE = episode_group.c.group_status == "completed"
LEASE = select(func.min(lease.c.id)).scalar_subquery()
#: The text of the group `talk`; `SECOND` is the second episode of a group with a tag.
FIRST_TEXT = transcript.c.position == 0
SECOND = (episode.c.group_id == 5) & (episode.c.position == 1)


@pytest.fixture
def populated_outside(url: str, location: Callable[[str], str]) -> str:
    """A store with rows in every table, payloads outside."""
    asyncio.run(populate(url, payloads=location("payloads")))
    return url


@pytest.fixture(params=["populated", "populated_outside"])
def stored(engine_name: str, request: pytest.FixtureRequest) -> str:
    """A store of each engine with rows in every table, payloads inside or outside."""
    url: str = request.getfixturevalue(request.param)
    return url


STORED_IN_TURN = pytest.mark.parametrize(
    ("engine_name", "stored"), in_turn(["populated", "populated_outside"]), indirect=["stored"]
)


async def verified(url: str, *, repair: bool = False) -> VerifyReport:
    async with Store.open(url, read_only=not repair) as store:
        return await verify(store, repair=repair)


async def change(url: str, statement: Any) -> None:
    async with transaction(url) as connection:
        await connection.execute(statement)


async def task_rows(url: str) -> list[Any]:
    async with transaction(url) as connection:
        return list(await connection.execute(select(task).order_by(*task.primary_key)))


async def test_a_sound_store_has_no_problems(stored: str) -> None:
    seen: list[VerifyReport] = []
    async with Store.open(stored, read_only=True) as store:
        report = await verify(store, progress=seen.append)
    assert report == seen[-1]
    assert report.is_sound
    assert report.num_groups == await number_of(stored, episode_group)
    assert report.num_payloads == report.total_payloads == await number_of(stored, payload)
    assert report.num_bytes > 40_000
    assert report.problems == ()


@STORED_IN_TURN
async def test_damaged_payloads(stored: str) -> None:
    await damage(stored, 3)
    report = await verified(stored)
    (problem,) = report.problems
    assert (problem.kind, problem.where) == ("payload", "group 3, part 0")
    assert problem.what.startswith("checksum is ")
    assert (await verified(stored, repair=True)).num_repaired == 0


async def test_a_group_replaced_meanwhile(populated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its payload was read, before its rows are."""

    async def then_replaced(*args: Any) -> AsyncIterator[Fetched]:
        async for fetched in every_payload(*args):
            async with Store.open(populated) as store:
                later = group("m5", rewards=(7.0, 8.0))
                await (await store.buffer("math")).put(later, on_duplicate="replace")
            yield fetched

    monkeypatch.setattr(sys.modules["replaydb.operations.verify"], "every_payload", then_replaced)
    assert (await verified(populated)).is_sound


@postgresql_nightly
async def test_missing_packs(populated_outside: str) -> None:
    async with transaction(populated_outside) as connection:
        packed = await connection.scalars(select(payload.c.pack_id).where(payload.c.group_id == 3))
        (await pack_file(connection, packed.one() or 0)).unlink()
    report = await verified(populated_outside)
    assert report.num_problems == 38  # the groups of one put, without two deleted ones
    assert all("is missing" in one.what for one in report.problems)


@postgresql_nightly
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        (
            update(episode_group).where(episode_group.c.id == 3).values(num_tokens=1),
            "tokens: 1 recorded",
        ),
        (delete(payload).where(payload.c.group_id == 3), r"bytes: \d+ recorded, 0 stored"),
        (
            delete(episode).where(episode.c.group_id == 3, episode.c.position == 1),
            "episodes: 2 recorded",
        ),
        (insert(transcript).values(group_id=3, position=0, text="x"), "texts: False recorded"),
    ],
    ids=["tokens", "payload", "episode", "text"],
)
async def test_groups_that_contradict_their_rows(populated: str, statement: Any, what: str) -> None:
    await change(populated, statement)
    report = await verified(populated)
    assert (report.problems[0].kind, report.problems[0].where) == ("group", "group 3")
    assert all(one.where.startswith("group 3") for one in report.problems)
    assert re.search(what, report.problems[0].what)
    assert not report.is_sound


async def test_rows_without_parents(populated_sqlite_url: str) -> None:
    """PostgreSQL prevents them."""
    async with transaction(populated_sqlite_url, foreign_keys=False) as connection:
        await connection.execute(delete(episode_group).where(episode_group.c.id == 3))
    found = {one.where: one.what for one in (await verified(populated_sqlite_url)).problems}
    assert found["table episode"] == "2 rows refer to missing rows of episode_group"
    assert found["table payload"] == "1 rows refer to missing rows of episode_group"


async def failed_as_damaged(stored: str, buffer: rdb.Buffer) -> dict[int, str]:
    """Let groups of several statuses fail as damaged, then repair their bytes."""
    ids = await buffer.put([group(f"d{i}", version=4) for i in range(4)])
    statuses = dict(zip(ids, ["completed", "aborted", "aborted", "filtered"], strict=True))
    for one, status in statuses.items():
        await buffer.update([one], status=status)
    async with transaction(stored) as connection:
        rows = list(await connection.execute(select(payload).where(payload.c.group_id.in_(ids))))
        files = {await pack_file(connection, row.pack_id) for row in rows if row.pack_id}
    contents = {file: file.read_bytes() for file in files}
    for one in ids:
        await damage(stored, one)
    for status in set(statuses.values()):
        mine = rdb.col.group_uid.startswith("d")
        with pytest.raises(rdb.CorruptPayloadError):
            await buffer.lease(2, statuses=status, where=mine, at_least=1, ttl=60)
    for file, content in contents.items():
        file.write_bytes(content)
    for row in rows:
        if row.data is not None:
            here = payload.c.group_id == row.group_id
            await change(stored, update(payload).where(here).values(data=row.data))
    return statuses


@STORED_IN_TURN
async def test_groups_that_failed_and_are_intact(stored: str) -> None:
    async with Store.open(stored) as store:
        buffer = await store.buffer("math")
        expected = await failed_as_damaged(stored, buffer)
        completed, aborted, again, filtered = expected
        [other] = await buffer.put(group("other"))
        await buffer.update([other], status="failed", reason="scored wrongly")
        await damage(stored, again)
        intact = [completed, aborted, filtered]
        report = await verify(store)
        listed = {one.where: one.what for one in report.problems if one.kind == "failed"}
        assert list(listed) == [f"group {one}" for one in intact]
        for one in intact:
            assert listed[f"group {one}"].endswith(f"is intact now; former status: {expected[one]}")
        assert (await verify(store, repair=True)).num_repaired == 3
        found = {one.id: one for one in await buffer.find(ids=[*expected, other])}
        assert {one: found[one].status for one in found} == {
            **expected,
            again: "failed",
            other: "failed",
        }
        assert found[completed].status_reason is None
        assert (found[again].status_reason or "").startswith("damaged (was aborted): ")
        assert (await buffer.sample(1, where=rdb.col.id == completed)).ids == [completed]
        assert not [one for one in (await verify(store)).problems if one.kind == "failed"]
    await check_invariants(stored)


async def test_counters_are_repaired(populated_outside: str) -> None:
    await change(
        populated_outside, update(task).values(num_available=99, total_weight=1e9, num_leased=7)
    )
    await change(populated_outside, update(pack).values(live_parts=77, live_bytes=1))
    report = await verified(populated_outside)
    listed = {one.where: one.what for one in report.problems}
    assert "num_available is 99, expected" in listed["task 'gsm8k' of buffer 'math'"]
    assert not report.is_sound
    assert report.num_problems == 3 + await number_of(populated_outside, pack)
    repaired = await verified(populated_outside, repair=True)
    assert repaired.num_repaired == repaired.num_problems == report.num_problems
    assert repaired.is_sound
    assert (await verified(populated_outside)).num_problems == 0
    await check_invariants(populated_outside)
    async with Store.open(populated_outside) as store:
        math = await store.buffer("math")
        assert len((await math.sample(4, rdb.Prioritized())).ids) == 4


async def test_a_read_only_store_is_not_repaired(populated: str) -> None:
    await change(populated, update(task).values(num_available=99))
    async with Store.open(populated, read_only=True) as store:
        with pytest.raises(rdb.DatabaseReadOnlyError):
            await verify(store, repair=True)


@postgresql_nightly
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        (update(episode_group).where(LEASED).values(lease_id=None), "leased without a lease"),
        (update(episode_group).where(LEASED).values(leased_from=None), "leased without a lease"),
        (
            update(episode_group).where(FREE).values(lease_id=LEASE),
            "has a lease without being leased",
        ),
        (update(lease).values(buffer_id=2), "leased without a lease"),
        (update(transcript).where(FIRST_TEXT).values(position=77), "has a text of an episode"),
        (update(episode).where(SECOND).values(reward=99.0), "differ from the rows of its episodes"),
        (update(episode).where(SECOND).values(position=7), "differ from the rows of its episodes"),
        (
            update(episode).where(SECOND).values(num_tokens=99),
            "differ from the rows of its episodes",
        ),
    ],
    ids=[
        "lease",
        "before",
        "free",
        "elsewhere",
        "text",
        "reward",
        "position",
        "tokens",
    ],
)
async def test_rows_that_contradict_each_other(populated: str, statement: Any, what: str) -> None:
    await change(populated, statement)
    report = await verified(populated)
    assert any(what in one.what for one in report.problems)
    assert (await verified(populated, repair=True)).num_repaired == 0


async def test_a_damaged_index_is_reported_and_nothing_is_repaired(
    populated_sqlite_url: str,
) -> None:
    """PostgreSQL needs an extension to detect it."""
    before = await task_rows(populated_sqlite_url)
    async with transaction(populated_sqlite_url) as connection:
        await connection.execute(text("PRAGMA writable_schema = 1"))
        await connection.execute(
            text(
                "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master"
                " WHERE name = 'ix_draw_latest') WHERE name = 'ix_episode_group_arrival'"
            )
        )
    report = await verified(populated_sqlite_url, repair=True)
    assert {one.kind for one in report.problems} == {"damage"}
    assert any("ix_episode_group_arrival" in one.what for one in report.problems)
    assert report.num_repaired == 0
    assert report.num_payloads == report.total_payloads
    assert await task_rows(populated_sqlite_url) == before


@pytest.mark.parametrize(
    ("sql", "where", "column"),
    [
        ("UPDATE task SET num_available = 'many'", "table task", "num_available"),
        ("UPDATE episode_group SET weight = 'x' WHERE id = 3", "episode_group, id 3", "weight"),
        ("UPDATE episode_group SET tags = '{' WHERE id = 3", "episode_group, id 3", "tags"),
        ("UPDATE episode SET metadata = '{' WHERE group_id = 3", "episode, group_id 3", "metadata"),
        ("UPDATE buffer SET settings = '{'", "table buffer, id 1", "settings"),
        ("UPDATE episode_group SET created_at = 'x' WHERE id = 3", "group, id 3", "created_at"),
    ],
)
async def test_values_invalid_for_their_column(
    populated_sqlite_url: str, sql: str, where: str, column: str
) -> None:
    """PostgreSQL refuses all of them."""
    await change(populated_sqlite_url, text(sql))
    report = await verified(populated_sqlite_url, repair=True)
    assert report.num_repaired == 0
    listed = [one for one in report.problems if where in one.where]
    assert listed
    assert all(one.kind == "damage" and column in one.what for one in listed)


DERIVED: list[Any] = [
    ("tags", update(tag).where(tag.c.group_id == 5).values(number=9)),
    ("tags", delete(tag)),
    ("tags", update(tag).values(buffer_id=2)),
    ("staleness", update(episode_group).where(FREE).values(staleness=77)),
    ("staleness", update(buffer).values(policy_version=23)),
    ("staleness", update(task).values(max_staleness=99)),
    ("columns", update(episode_group).where(FREE).values(reward_mean=9.0, reward_std=0.25)),
    ("columns", update(episode_group).where(FREE).values(comparable_version=1)),
    (  # the staleness agrees with the wrong version, and so is wrong when that is right
        "columns",
        update(episode_group)
        .where(FREE, episode_group.c.buffer_id == buffer.c.id)
        .values(comparable_version=1, staleness=buffer.c.policy_version - 1),
    ),
    ("columns", update(episode_group).where(FREE).values(min_policy_version=2)),
    ("columns", update(episode_group).where(FREE).values(weight=0.5, reward_max=None)),
]


async def derived_columns(url: str) -> list[tuple[Any, ...]]:
    names = (
        *("id", "group_status", "staleness", "weight", "comparable_version", "reward_mean"),
        *("reward_std", "reward_min", "reward_max", "min_policy_version", "max_policy_version"),
    )
    async with transaction(url) as connection:
        columns = [episode_group.c[name] for name in names]
        rows = await connection.execute(select(*columns).order_by(episode_group.c.id))
        return [tuple(row) for row in rows]


@pytest.mark.parametrize(("engine_name", "kind", "statement"), in_turn(DERIVED))
async def test_indexes_and_staleness_are_rebuilt(populated: str, kind: str, statement: Any) -> None:
    """In spite of lost data of a group, which they are not derived from."""
    await change(populated, update(episode_group).where(LEASED).values(num_tokens=1))
    right = await derived_columns(populated)
    await change(populated, statement)
    report = await verified(populated, repair=True)
    found = [one for one in report.problems if one.kind not in ("group", "counters")]
    assert {one.kind for one in found} == {kind}
    assert all(one.is_repaired for one in found)
    assert {one.kind for one in (await verified(populated)).problems} == {"group", "counters"}
    if kind == "columns":
        assert await derived_columns(populated) == right
    async with Store.open(populated) as store:
        math = await store.buffer("math")
        groups = await math.find()
        for where, meets in (
            (rdb.col.tags["level"] == 2, lambda one: one.tags.get("level") == 2),
            (rdb.col.staleness >= 3, lambda one: one.staleness is not None and one.staleness >= 3),
        ):
            expected = sum(map(meets, groups))
            assert await math.count(where=where) == expected
        assert all(
            one.staleness is None or one.staleness <= 20
            for one in groups
            if one.status in ("completed", "aborted")
        )


async def test_nothing_is_repaired_from_wrong_rows(populated: str) -> None:
    """The correct values of the group are lost, and counters computed from them would be wrong."""
    await change(populated, update(episode_group).where(LEASED).values(num_tokens=1))
    report = await verified(populated, repair=True)
    assert {one.kind for one in report.problems} == {"group", "counters"}
    assert report.num_repaired == 0
