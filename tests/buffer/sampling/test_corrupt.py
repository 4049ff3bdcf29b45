"""Damaged payloads are reported, set to failed, and do not affect intact groups."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import delete, insert, literal_column, select, update

import replaydb as rdb
from replaydb import Buffer, GroupStatus, SamplingPolicy, Store
from replaydb.database.tables.schema import episode_group, payload
from replaydb.domain.settings import Compression
from replaydb.util.memory import LEAST_BYTES
from support.connections import transaction
from support.damage import DAMAGES, change_behind_indexes, damage
from support.engines import postgresql_nightly
from support.groups import group, groups, long_group
from support.tables import group_facts


@postgresql_nightly
@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_any_damage_is_noticed(
    store: Store, url: str, compression: Compression | None
) -> None:
    buffer = await store.buffer("math", compression=compression)
    for how in DAMAGES:
        damaged, sound = ids = await buffer.put([group(f"a {how}"), group(f"b {how}")])
        await damage(url, damaged, DAMAGES[how])
        with pytest.raises(rdb.CorruptPayloadError, match=rf"groups {damaged}: ") as caught:
            await buffer.get(ids)
        assert caught.value.group_ids == (damaged,), how
        assert caught.value.reason
        assert caught.value.batch is not None
        assert caught.value.batch.ids == [sound]
        await buffer.delete([damaged])  # its size is wrong


async def test_the_draw_records_lost_groups(buffer: Buffer, url: str) -> None:
    await buffer.put(groups(4))
    await damage(url, 2)
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.sample(3, rdb.Fifo())
    await damage(url, 3)
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.lease(2, ttl=60)
    leased, sampled = await buffer.draws()
    assert sampled.outcomes == ("sampled", "lost", "sampled")
    assert sampled.outcome_reasons == (None, caught.value.reason, None)
    assert leased.outcomes == ("nacked", "lost")
    assert leased.outcome_reasons[0] == "other groups of the batch were damaged"


async def test_damaged_groups_are_lost_for_a_killed_holder(
    buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put(groups(1))
    await damage(url, 1)
    mark = Buffer._mark_failed

    async def killed(*_: object) -> None:
        pass

    async def later(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Buffer, "_mark_failed", killed)
            patch.setattr(Buffer, "_release_undelivered", killed)
            with pytest.raises(rdb.CorruptPayloadError):
                await buffer.lease(1, ttl=0.001)
        await mark(*arguments)

    monkeypatch.setattr(Buffer, "_mark_failed", later)
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.sample(1)
    assert [record.outcomes for record in await buffer.draws()] == [("lost",), ("lost",)]


@postgresql_nightly
@pytest.mark.parametrize("policy", [rdb.Fifo(), rdb.Uniform(), rdb.Prioritized()], ids=str)
async def test_the_others_of_a_draw_are_still_usable(
    buffer: Buffer, url: str, policy: SamplingPolicy
) -> None:
    given = [group(f"{i}", priority=1.0 + i) for i in range(5)]
    ids = await buffer.put(given)
    await damage(url, ids[1])
    await damage(url, ids[3])
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.sample(5, policy)
    error = caught.value
    assert sorted(error.group_ids) == [ids[1], ids[3]]
    assert error.batch is not None
    assert sorted(error.batch.ids) == [ids[0], ids[2], ids[4]]
    assert len(error.batch) == len(error.batch.probabilities) == len(error.batch.weights) == 3
    for one, chance in zip(error.batch.groups, error.batch.probabilities, strict=True):
        assert one == given[one.id - 1]
        if policy == rdb.Prioritized():
            assert chance == pytest.approx(one.id / 15)


async def test_damaged_groups_become_failed_and_are_not_drawn_again(
    buffer: Buffer, url: str
) -> None:
    ids = await buffer.put([*groups(3, priority=2.0), *groups(2, "code")])
    await damage(url, ids[0])
    await damage(url, ids[3])
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.sample(5)
    for one in (ids[0], ids[3]):
        facts = await group_facts(url, one)
        assert facts["group_status"] == GroupStatus.FAILED
        assert facts["status_reason"]
    assert await buffer.count(statuses="failed") == 2
    for _ in range(5):
        assert set((await buffer.sample(3)).ids) == {ids[1], ids[2], ids[4]}
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(4)
    counters = {one.task_name: one.num_available for one in (await buffer.stats()).tasks}
    assert counters == {"code": 1, "gsm8k": 2}


async def test_a_draw_of_damaged_groups_only(buffer: Buffer, url: str) -> None:
    [group_id] = await buffer.put(group())
    await damage(url, group_id)
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.sample(1, rdb.Prioritized())
    assert caught.value.batch is not None
    assert len(caught.value.batch) == 0
    assert caught.value.batch.weights.shape == (0,)
    with pytest.raises(rdb.NotEnoughGroupsError):
        await buffer.sample(1)


@postgresql_nightly
@pytest.mark.parametrize("part", ["lost", "doubled", "of another group"])
async def test_parts_that_do_not_match_the_group(buffer: Buffer, url: str, part: str) -> None:
    ids = await buffer.put([group("a", rewards=[1, 2]), group("b", rewards=[1, 2, 3])])
    here = payload.c.group_id == ids[0]
    async with transaction(url) as connection:
        rows = await connection.execute(select(payload).order_by(payload.c.group_id))
        first, second = [dict(row) for row in rows.mappings()]
        if part == "doubled":
            await connection.execute(insert(payload), [first | {"part": 1}])
        else:
            await connection.execute(delete(payload).where(here))
        if part == "of another group":
            await connection.execute(insert(payload), [second | {"group_id": ids[0]}])
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.sample(2)
    assert caught.value.group_ids == (ids[0],)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == [ids[1]]
    await buffer.delete(ids[:1])
    assert (await buffer.sample(1)).ids == [ids[1]]


async def test_damage_is_noticed_in_large_groups_too(buffer: Buffer, url: str) -> None:
    """They are decoded in a thread."""
    ids = await buffer.put([long_group(f"{i}", 100_000) for i in range(3)])
    await damage(url, ids[1], DAMAGES["a bit in the middle"])
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.sample(3, rdb.Fifo())
    assert caught.value.batch is not None
    assert caught.value.batch.ids == [ids[0], ids[2]]


@pytest.mark.parametrize(
    ("engine_name", "column", "value"),
    [
        ("sqlite", "tags", "'not json'"),
        ("sqlite", "tags", "CAST(x'7b22ff227d' AS TEXT)"),
        ("sqlite", "tags", "'[1, 2]'"),
        ("postgresql", "tags", "'[1, 2]'"),  # which admits none of the others
        ("sqlite", "created_at", "'no time'"),
        ("sqlite", "created_at", "'2026-13-45 00:00:00.000000'"),
        ("sqlite", "completed_at", "17"),
        ("sqlite", "first_sampled_at", "'2026'"),
        ("sqlite", "times_sampled", "'often'"),
        ("sqlite", "comparable_version", "X'00'"),
    ],
)
async def test_an_invalid_scalar_fails_only_its_group(
    store: Store, url: str, caplog: pytest.LogCaptureFixture, column: str, value: str
) -> None:
    buffer = await store.buffer("math", time_to_live=1000, max_times_sampled=100)
    given = [group(f"{i}", tags={"level": i}) for i in range(4)]
    ids = await buffer.put(given)
    await buffer.sample(4)
    here = episode_group.c.id == ids[1]
    async with transaction(url) as connection:
        changed: dict[str, Any] = {column: literal_column(value)}
        await connection.execute(update(episode_group).where(here).values(changed))
    with pytest.raises(rdb.CorruptPayloadError, match=f"groups {ids[1]}: {column} "):
        await buffer.get(ids)
    with pytest.raises(rdb.CorruptPayloadError) as caught:
        await buffer.sample(4, rdb.Fifo())
    assert caught.value.group_ids == (ids[1],)
    assert caught.value.batch is not None
    assert caught.value.batch.ids == [ids[0], *ids[2:]]
    assert (await buffer.sample(3, rdb.LeastSampled())).groups[0].tags == {"level": 0}
    assert await buffer.count(statuses="failed") == 1
    (logged,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert f"group {ids[1]} failed: {column}" in logged.getMessage()
    await buffer.put(group("1"), on_duplicate="replace")
    await buffer.put(group("more"))
    assert len((await buffer.sample(4)).ids) == 4


async def test_an_invalid_time_does_not_stop_evictions(sqlite_url: str) -> None:
    """On SQLite only: PostgreSQL does not store such a value."""
    async with Store.open(sqlite_url) as opened:
        buffer = await opened.buffer(
            "math", capacity=rdb.Capacity(groups=2), eviction="least_recently_sampled"
        )
        await buffer.put(groups(2))
        await buffer.sample(2)
        async with transaction(sqlite_url) as connection:
            changed: dict[str, Any] = {"last_sampled_at": literal_column("'soon'")}
            here = episode_group.c.id == 2
            await connection.execute(update(episode_group).where(here).values(changed))
        await buffer.put(group("more"))
        assert sorted((await buffer.sample(2)).ids) == [1, 3]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("data", "text"),
        pytest.param("data", "text" * LEAST_BYTES, id="data-long text"),
        ("data", 7),
        ("checksum", "text"),
        ("checksum", 0.5),
        ("part", b"0"),
    ],
)
async def test_a_payload_of_another_kind(sqlite_url: str, column: str, value: object) -> None:
    """One bit of a row decides whether it is bytes or text."""
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        ids = await buffer.put(groups(2))
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
            connection.execute(
                f"UPDATE payload SET {column} = ? WHERE group_id = ?",  # noqa: S608
                (value, ids[0]),
            )
            connection.commit()
        with pytest.raises(rdb.CorruptPayloadError, match=f"{column} can not be read") as caught:
            await buffer.sample(2)
        assert caught.value.batch is not None
        assert caught.value.batch.ids == ids[1:]


@pytest.mark.parametrize("column", ["group_status", "leased_from"])
async def test_an_invalid_status(sqlite_url: str, column: str) -> None:
    """A flipped bit in its text: the CHECK of the table does not detect that."""
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        ids = await buffer.put(groups(3))
        lease = await buffer.lease(1, rdb.Fifo(), ttl=60)
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute(
                f"UPDATE episode_group SET {column} = 'coopleted' WHERE id = ?",  # noqa: S608
                (ids[0],),
            )
            connection.commit()
        with pytest.raises(rdb.CorruptPayloadError, match=f"{column} can not be read") as caught:
            await buffer.get(ids)
        assert caught.value.group_ids == (ids[0],)
        with pytest.raises(rdb.CorruptPayloadError, match=f"{column} can not be read"):
            await buffer.find(uids=["gsm8k-0"])
        if column == "group_status":
            with pytest.raises(rdb.CorruptPayloadError, match="group_status can not be read"):
                await buffer.stats()
        else:
            await lease.nack()
            assert [one.status for one in await buffer.find(ids=ids[:1])] == ["failed"]


async def test_the_replacement_of_a_damaged_group_does_not_fail(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put between the draw that finds the damage and the transaction that sets the status."""
    buffer = await store.buffer("math", max_times_sampled=5)
    ids = await buffer.put([group("a"), group("b"), group("c")])
    for one in ids:
        await damage(url, one)
    mark_failed = Buffer._mark_failed

    async def replaced_first(self: Buffer, *args: Any) -> None:
        await self.put(group("a", rewards=[5.0, 7.0]), on_duplicate="replace")
        await self.delete(ids[2:])
        await mark_failed(self, *args)

    monkeypatch.setattr(Buffer, "_mark_failed", replaced_first)
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.sample(3)
    monkeypatch.undo()
    assert [one.group_uid for one in (await buffer.sample(1)).groups] == ["a"]
    assert await buffer.count(statuses="failed") == 1


async def test_damage_that_its_last_draw_finds(store: Store, url: str) -> None:
    buffer = await store.buffer("math", max_times_sampled=1)
    [group_id] = await buffer.put(group("a"))
    await damage(url, group_id)
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.sample(1)
    assert (await group_facts(url, group_id))["group_status"] == GroupStatus.ARCHIVED
    (draw,) = await buffer.draws()
    assert draw.outcomes == ("lost",)


async def test_a_damaged_group_can_be_replaced(buffer: Buffer, url: str) -> None:
    [group_id] = await buffer.put(group("a"))
    await damage(url, group_id)
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.sample(1)
    assert await buffer.put(group("a"), on_duplicate="replace") == [group_id]
    assert (await buffer.sample(1)).ids == [group_id]


@pytest.mark.parametrize("damage", ["replace(settings, '{', '[')", "CAST(x'ff' AS TEXT)"])
async def test_damaged_settings_are_a_typed_error(sqlite_url: str, damage: str) -> None:
    async with Store.open(sqlite_url, run="a") as store:
        await store.buffer("math")
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as file, file:
            file.execute(f"UPDATE buffer SET settings = {damage}")  # noqa: S608
        with pytest.raises(rdb.DatabaseError, match=r"replay\.db"):
            await store.buffer("math")


async def test_a_row_that_only_indexes_have_is_damage(sqlite_url: str) -> None:
    """The row has the id of another buffer."""
    async with Store.open(sqlite_url, run="a") as store:
        ids = await (await store.buffer("math")).put(groups(3))
    change = f"UPDATE episode_group SET buffer_id = 99 WHERE id = {ids[1]}"  # noqa: S608
    change_behind_indexes(sqlite_url, "episode_group", change)
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        for call in (buffer.find(), buffer.peek(3)):
            with pytest.raises(rdb.CorruptPayloadError) as caught:
                await call
            assert caught.value.group_ids == (ids[1],)
        with pytest.raises(rdb.DatabaseError, match="SQLITE_CORRUPT"):
            await buffer.sample(3)
        assert [one.id for one in await buffer.find([ids[0], ids[2]])] == [ids[0], ids[2]]


@pytest.mark.parametrize(
    ("damage", "call"),
    [
        ("episode_group SET task_name = 'x'", "update_priorities"),
        ("episode_group SET task_name = 'x'", "update"),
        ("draw_group SET outcome = 'x'", "draws"),
    ],
)
async def test_invalid_names_in_tables_are_typed_errors(
    sqlite_url: str, damage: str, call: str
) -> None:
    async with Store.open(sqlite_url, run="a") as store:
        buffer = await store.buffer("math")
        ids = await buffer.put(groups(1))
        await buffer.sample(1)
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as file, file:
            file.execute("PRAGMA ignore_check_constraints = 1")
            file.execute(f"UPDATE {damage}")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "update_priorities": lambda: buffer.update_priorities(ids, [2.0]),
            "update": lambda: buffer.update(ids, status="archived"),
            "draws": buffer.draws,
        }
        with pytest.raises((rdb.DatabaseError, rdb.CorruptPayloadError), match="'x'"):
            await calls[call]()
