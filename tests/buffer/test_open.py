"""Opening stores, runs and buffers by name."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, text

import replaydb as rdb
from replaydb import Buffer, Store
from support.groups import group, groups
from support.invariants import check_invariants
from support.other_process import other_process


async def test_reopening_sees_everything(url: str) -> None:
    put = [group("a", tags={"level": "hard"}), group("b", "code", version=3)]
    async with Store.open(url, run="one") as store:
        buffer = await store.buffer("math", max_staleness=9)
        ids = await buffer.put(put)
        await buffer.advance_policy(5)
        await buffer.sample(1, rdb.Fifo())
    async with Store.open(url) as store:
        buffer = await store.buffer("math", create=False)
        assert buffer.policy_version == 5
        assert buffer.settings.max_staleness == 9
        found = await buffer.get(ids)
        assert found == put
        assert [one.times_sampled for one in found] == [1, 0]
        assert [one.staleness for one in found] == [None, 2]
    await check_invariants(url)


@pytest.mark.parametrize("as_object", [False, True])
async def test_urls_with_and_without_a_driver(url: str, as_object: bool) -> None:
    driver = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    parsed = make_url(url)
    named = parsed.set(drivername=driver[parsed.get_backend_name()])
    async with Store.open(named if as_object else str(url)) as store:
        assert await store.buffers() == []


async def test_two_stores_on_one_database_see_each_other_at_once(store: Store, url: str) -> None:
    here = await store.buffer("math")
    async with Store.open(url, run="other") as second:
        there = await second.buffer("math", create=False)
        for i in range(20):
            one, other = (here, there) if i % 2 else (there, here)
            [put] = await one.put(group(f"g{i}"))
            assert (await other.get([put]))[0].group_uid == f"g{i}"
            assert await other.count() == i + 1
        assert len(await there.sample(20)) == 20
    names = {run.id: run.name for run in await store.runs()}
    runs = [names[one.run_id or 0] for one in await here.get(range(1, 21))]
    assert runs == ["other", "test"] * 10


async def test_another_process_sees_a_group_as_soon_as_it_is_put(buffer: Buffer, url: str) -> None:
    async with other_process("get", url, "math", "1", "2") as other:
        await buffer.put(groups(2))
        assert await other.act() == ["gsm8k-0", "gsm8k-1"]


async def test_a_new_file_gets_its_tables_and_a_new_database_needs_migrate(
    empty_url: str, engine_name: str
) -> None:
    if engine_name == "postgresql":
        with pytest.raises(rdb.SchemaOutOfDateError, match="replaydb db upgrade"):
            await Store.open(empty_url)
    async with Store.open(empty_url, migrate=None if engine_name == "sqlite" else True) as store:
        await (await store.buffer("math")).put(group())


def test_tables_are_not_created_with_migrate_false(empty_url: str) -> None:
    if empty_url.startswith("sqlite"):
        Path(empty_url.removeprefix("sqlite:///")).touch()
    with pytest.raises(rdb.SchemaOutOfDateError):
        asyncio.run(Store.open(empty_url, migrate=False))


async def test_full_durability(sqlite_url: str, postgresql_url: str) -> None:
    for address in (sqlite_url, postgresql_url):
        async with Store.open(address, durability="full") as store:
            await (await store.buffer("math")).put(group())
            assert len(await (await store.buffer("math")).sample(1)) == 1


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("full", 2)])
async def test_durability_is_sqlites_synchronous(
    sqlite_url: str, durability: Any, level: int
) -> None:
    async with Store.open(sqlite_url, durability=durability) as store:
        found = await store._database.write(
            lambda session: session.core.scalar(text("PRAGMA synchronous"))
        )
    assert found == level


@pytest.mark.parametrize(("field", "wrong"), [("durability", "none"), ("run", "a\0b")])
def test_invalid_arguments_are_refused_before_anything_is_opened(field: str, wrong: Any) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        Store.open("sqlite:///never.db", **{field: wrong})
    assert caught.value.field == field
    assert not os.path.exists("never.db")


async def test_a_run_named_twice_is_one_run(url: str) -> None:
    before = datetime.now(UTC)
    for metadata in ({"lr": 1e-6}, {"lr": 2e-6}):
        async with Store.open(url, run="qwen", run_metadata=metadata) as store:
            await (await store.buffer("math")).put(group())
            [run] = await store.runs()
    assert (run.name, run.metadata) == ("qwen", {"lr": 1e-6})
    assert timedelta(0) <= run.started_at - before < timedelta(minutes=1)
    assert run.started_at.utcoffset() == timedelta(0)


async def test_runs_started_at_the_same_time_are_one_run(url: str) -> None:
    stores = await asyncio.gather(*(Store.open(url, run="same") for _ in range(8)))
    assert [run.name for run in await stores[0].runs()] == ["same"]
    for store in stores:
        await store.close()


async def test_a_run_without_a_name_gets_one_when_it_writes(url: str) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        assert await store.runs() == []
        [first] = await buffer.put(group())
        await buffer.put(group())
        [run] = await store.runs()
        assert re.fullmatch(r"run-\d{8}T\d{6}Z-[0-9a-f]{8}", run.name)
        assert (await buffer.get([first]))[0].run_id == run.id
    async with Store.open(url) as store:
        await (await store.buffer("math")).put(group())
        assert len(await store.runs()) == 2


async def test_buffers_are_listed_by_name(store: Store) -> None:
    before = datetime.now(UTC)
    for name in ("math", "code", "Ω / 数学"):
        await store.buffer(name, max_staleness=3)
    await (await store.buffer("code")).put([group(), group(status="failed")])
    await (await store.buffer("code")).advance_policy(4)
    found = {one.name: one for one in await store.buffers()}
    assert list(found)[:2] == ["code", "math"]
    assert set(found) == {"code", "math", "Ω / 数学"}
    code = found["code"]
    assert (code.num_groups, code.policy_version, code.settings.max_staleness) == (2, 4, 3)
    assert timedelta(0) <= code.created_at - before < timedelta(minutes=1)
    assert found["math"].num_groups == 0


async def test_create_false_raises_for_an_unknown_buffer(store: Store) -> None:
    with pytest.raises(rdb.UnknownBufferError, match="math") as caught:
        await store.buffer("math", create=False)
    assert caught.value.name == "math"
    assert isinstance(caught.value, LookupError)
    assert await store.buffers() == []


async def test_a_buffer_made_by_many_at_once_is_one(store: Store, url: str) -> None:
    async with Store.open(url) as second:
        made = await asyncio.gather(*(one.buffer("math") for one in (store, second) * 8))
    assert len({buffer.id for buffer in made}) == 1
    assert [one.name for one in await store.buffers()] == ["math"]


async def test_buffers_do_not_share_groups(store: Store) -> None:
    math, code = await store.buffer("math"), await store.buffer("code")
    [first], [second] = await math.put(group("same")), await code.put(group("same"))
    assert first != second
    with pytest.raises(rdb.UnknownGroupError):
        await math.get([second])
    assert await math.delete([second]) == 0
    assert await math.update_priorities([second], [2.0]) == 0
    assert await math.delete(statuses="completed") == 1
    assert await code.count() == 1
    assert (await code.sample(1)).ids == [second]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_store_cannot_be_used_after_a_fork(store: Store, buffer: Buffer) -> None:
    await buffer.put(group())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            buffer.cursor("data").send(None)
        except rdb.NotSupportedError as error:
            named = f"process {os.getppid()}" in str(error)
            with pytest.raises(StopIteration):  # it has nothing to wait for
                store.close().send(None)
            code = 0 if named else 2
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]  # noqa: ASYNC222 - the child exits at once
    assert os.waitstatus_to_exitcode(status) == 0
    assert await buffer.count() == 1


class _LateLoop(asyncio.SelectorEventLoop):
    """An event loop with another clock than the usual one."""

    def time(self) -> float:
        return super().time() - 1000


def test_an_event_loop_may_have_any_clock(url: str) -> None:
    async def use() -> int:
        async with Store.open(url) as store:
            buffer = await store.buffer("math")
            await buffer.put(group(), timeout=20)
            return len(await buffer.sample(1, timeout=20))

    with asyncio.Runner(loop_factory=_LateLoop) as runner:
        assert runner.run(use()) == 1
