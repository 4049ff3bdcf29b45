"""A downgrade and a new upgrade lose only what `docs/migrations.md` lists."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

import replaydb as rdb
from operations.conftest import populate
from replaydb import Buffer, Store, analysis
from replaydb.database import migrations
from replaydb.database.repository import aging
from replaydb.database.tables.schema import FORMATS, REVISIONS, group_tag
from replaydb.operations import rewrite_payloads, verify
from support.groups import episode, group
from support.invariants import check_invariants, number_of
from support.postgres import PostgresServer

#: Results that differ after a downgrade below a revision and a new upgrade.
LOST = {
    "0014": {"table episodes"},  # longest_row
    "0010": {"stats", "metrics"},  # the counters of replacements
    "0008": {"table policies"},
    "0003": {"draws", "table draws", "metrics", "run_stats", "times_replaced"},
}
FILTERS = {
    "tag": rdb.col.tags["level"] == 1,
    "range of a tag": rdb.col.tags["level"].between(1, 2),
    "two tags": (rdb.col.tags["level"] == 1) & (rdb.col.tags["kind"] == "hard"),
    "prompt": rdb.col.prompt_uid == "p1",
    "fresh": rdb.col.staleness <= 2,
    "stale": rdb.col.staleness >= 2,
    "stalest": rdb.col.staleness.between(3, 5),
}
STRATEGIES = (
    rdb.Fifo(), rdb.Lifo(), rdb.StalestFirst(), rdb.FreshestFirst(), rdb.TopPriority(),
    rdb.LeastSampled(), rdb.Uniform(), rdb.Prioritized(),
)  # fmt: skip
ORDERS = (
    rdb.col.priority, rdb.col.comparable_version, rdb.col.times_sampled, rdb.col.staleness,
    rdb.col.reward_mean, rdb.col.min_policy_version.desc(),
)  # fmt: skip
TABLES = ("groups", "episodes", "draws", "prompts", "policies", "runs", "tokens")


async def populate_more(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a store, also with groups of another lineage, and with an advance that is unfinished."""
    await populate(url)
    async with Store.open(url, run="fork", lineage="fork") as store:
        math = await store.buffer("math", indexed_tags=["level", "kind"])
        await math.put([
            group(f"fork-{i}", version=i, prompt_uid=f"p{i % 3}", tags={"level": 1, "kind": "hard"})
            for i in range(6)
        ])  # fmt: skip
        await math.put(group("fork-0", version=2), on_duplicate="replace")
        await store.buffer("other", seed=5)
    await populate_stale(url, monkeypatch)


async def populate_stale(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a buffer with an index of tags, and begin an advance after which groups must expire."""
    async with Store.open(url, run="first") as store:
        stale = await store.buffer("stale", seed=3, max_staleness=3, indexed_tags=["level"])
        await stale.put([group(f"s{i}", version=i, tags={"level": i % 3}) for i in range(9)])
        with monkeypatch.context() as patch:
            patch.setattr(aging, "step", lambda *_: None)
            patch.setattr(Buffer, "_follow_policy", _nothing)
            await stale.advance_policy(8)


async def _nothing(*_: Any) -> None:
    pass


async def reads_of(url: str) -> dict[str, Any]:
    """Return the results of all calls that read, by name."""
    async with Store.open(url, read_only=True) as store:
        runs = await store.runs()
        found: dict[str, Any] = {"buffers": await store.buffers(), "runs": runs}
        for run in runs:
            found[f"run_stats of {run.name}"] = await store.run_stats(run.name)
        for name in await store.buffer_names():
            buffer = await store.buffer(name, create=False)
            async for call, result in _reads(buffer):
                found[f"{call} of {name}"] = result
    for table in TABLES:
        rows = getattr(analysis, table)(url).to_table().to_pylist()
        found[f"table {table}"] = [{**row, "times_replaced": None} for row in rows]
    return {call: repr(result) for call, result in found.items()}


async def _reads(buffer: Buffer) -> AsyncIterator[tuple[str, Any]]:
    infos = await buffer.find()
    ids = [one.id for one in infos if one.num_bytes]
    yield "find", [replace(one, times_replaced=0) for one in infos]
    yield "times_replaced", [one.times_replaced for one in infos]
    for order in ORDERS:
        yield f"find by {order}", [one.id for one in await buffer.find(order_by=order)]
    for name, where in FILTERS.items():
        yield f"count {name}", await buffer.count(where=where)
        yield f"find {name}", [one.id for one in await buffer.find(where=where, limit=50)]
        batch = await buffer.peek(3, rdb.Fifo(), where=where, at_least=0)
        yield f"peek {name}", batch.ids
    yield "get", [(one, one.staleness) for one in await buffer.get(ids)]
    yield "texts", await buffer.texts(ids)
    yield "stats", await buffer.stats()
    yield "prompts", await buffer.prompts()
    yield "leases", await buffer.leases(expired=True)
    yield "cursors", [await buffer.cursor(name) for name in ("gsm8k", "text")]
    yield "steps", await buffer.steps()
    yield "draws", await buffer.draws()
    metrics = await buffer.metrics()
    yield "metrics", {name: value for name, value in metrics.items() if "/age_" not in name}
    yield "admission", await buffer.admission(8, max_staleness=4, n=8, timeout=0)


async def draws_of(url: str) -> dict[tuple[str, str], Any]:
    """Draw from all buffers in many ways. Return what was drawn."""
    found: dict[tuple[str, str], Any] = {}
    async with Store.open(url, run="drawing") as store:
        for name in await store.buffer_names():
            buffer = await store.buffer(name, create=False)
            for strategy in STRATEGIES:
                batch = await buffer.sample(4, strategy, at_least=0)
                found[name, str(strategy)] = (batch.ids, batch.probabilities.tolist())
            for filtering, where in FILTERS.items():
                batch = await buffer.sample(2, where=where, at_least=0)
                found[name, filtering] = (batch.ids, batch.staleness)
            found[name, "deleted"] = await buffer.delete(where=rdb.col.tags["level"] == 2)
            found[name, "left"] = [(one.id, one.status) for one in await buffer.find()]
            stats = await buffer.stats()
            found[name, "stats"] = [replace(task, num_replaced=0) for task in stats.tasks]
    return found


def copied(url: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """Return the URL of a copy of a database that has no connections."""
    if "sqlite" in url:
        return f"sqlite:///{shutil.copy(make_url(url).database or '', folder / 'copy.db')}"
    server: PostgresServer = request.getfixturevalue("postgres")
    copy = server.create_database("copy", url)
    request.addfinalizer(lambda: server.drop_database(copy))
    return copy


@pytest.mark.nightly
@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_a_downgrade_and_an_upgrade_lose_what_is_documented(
    own_url: str,
    revision: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if revision < FORMATS[2]:  # to which no payload of format 2 can be taken
        asyncio.run(migrations.write_format(own_url, 1))
    asyncio.run(populate_more(own_url, monkeypatch))
    original = copied(own_url, request, tmp_path)
    asyncio.run(check(own_url, original, revision))


async def check(url: str, original: str, revision: str) -> None:
    """Compare a store that is downgraded and upgraded with a copy of it."""
    await migrations.downgrade(url, revision)
    await migrations.upgrade(url)
    before, after = await reads_of(original), await reads_of(url)
    lost = frozenset[str]().union(*(names for since, names in LOST.items() if revision < since))
    different = {call for call, result in before.items() if result != after[call]}
    assert {call.partition(" of ")[0] for call in different} == lost
    assert await draws_of(original) == await draws_of(url)
    async with Store.open(url) as store:
        assert (await verify(store)).problems == ()


async def test_filters_and_draws_after_a_downgrade_and_an_upgrade(
    own_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short form of the test above."""
    await migrations.write_format(own_url, 1)
    await populate_stale(own_url, monkeypatch)
    await migrations.downgrade(own_url, "0004")
    await migrations.upgrade(own_url)
    async with Store.open(own_url) as store:
        buffer = await store.buffer("stale", create=False)
        counts = {name: await buffer.count(where=where) for name, where in FILTERS.items()}
        assert counts == {
            "tag": 3, "range of a tag": 6, "two tags": 0, "prompt": 0, "fresh": 3, "stale": 7,
            "stalest": 3,
        }  # fmt: skip
        assert (await buffer.sample(9, rdb.Fifo(), at_least=1)).ids == [6, 7, 8, 9]
        await store.buffer("stale", indexed_tags=["level"])
        assert await number_of(own_url, group_tag) == 9
    await check_invariants(own_url)


async def test_groups_that_wait_for_values_prevent_a_downgrade(own_url: str) -> None:
    async with Store.open(own_url) as store:
        buffer = await store.buffer("x", requires="reward")
        await buffer.put(group("put", rewards=[None]))
        for uid in ("waits", "open"):
            await buffer.open_group("gsm8k", uid, 2, min_episodes=1)
            await buffer.add_episode(uid, episode(None), position=0)
        await buffer.fail_episode("waits", 1, "no sandbox")
    with pytest.raises(rdb.SchemaError, match="2 groups wait for values"):
        await migrations.downgrade(own_url, "0015")
    async with Store.open(own_url) as store:
        buffer = await store.buffer("x", create=False)
        await buffer.update(uids="put", status="failed")
        await buffer.annotate(rdb.Annotation("waits", 0, reward=1.0))
        await rewrite_payloads(store)
    await migrations.downgrade(own_url, "0015")
    await migrations.upgrade(own_url)
    async with Store.open(own_url) as store:
        buffer = await store.buffer("x", create=False)
        rows = await buffer.trajectories()
        assert [(row.group_uid, row.position, row.missing) for row in rows] == [
            ("open", 1, "episode")
        ]
        assert await buffer.add_episode("open", episode(None), position=1) == "completed"
        assert (await verify(store)).problems == ()
    await check_invariants(own_url)
