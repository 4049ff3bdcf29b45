"""Run pages: groups and draws of a run, and comparison of two runs."""

from __future__ import annotations

import json

import httpx
import pytest

import replaydb as rdb
from replaydb import Buffer, InvalidInputError, Store
from replaydb.database.repository import run_totals
from replaydb.ui.views import runs as view
from support.engines import both_engines
from support.groups import group, groups
from support.pages import Page, read

NAME = "run <b>"


async def get(browser: httpx.AsyncClient, address: str, status: int = 200, **query: str) -> Page:
    answer = await browser.get(address, params=query)
    assert answer.status_code == status, answer.text
    return read(answer.text)


@pytest.fixture
async def two_runs(buffer: Buffer, url: str) -> None:
    """Two runs that alternately put groups into one buffer, and draw."""
    async with Store.open(url, run=NAME, run_metadata={"lr": 0.1, "same": 1}) as store:
        theirs = await store.buffer("math")
        for version in range(3):
            await buffer.put(
                groups(2, version=version, rewards=[float(version)], task=f"t{version}")
            )
            await theirs.put(group(version=version, rewards=[0.5], task="t0"))
        await theirs.advance_policy(2)
        await theirs.sample(3, step=1, runs=NAME)
        lease = await theirs.lease(2, rdb.Fifo(), ttl=60, step=4, runs=NAME)
        await lease.ack()
        lease = await theirs.lease(1, rdb.Fifo(), ttl=60, step=4, runs=NAME)
        await lease.nack()
    await buffer.sample(1, step=7, runs="test")  # of a lineage that the buffer does not follow


@both_engines
async def test_statistics_of_a_run(store: Store, two_runs: None) -> None:
    mine, theirs = await store.run_stats("test"), await store.run_stats(NAME)
    assert (mine.share, mine.draw_share) == (1.0, 1.0)
    put = mine.versions
    assert [(it.task_name, it.policy_version, it.num_groups, it.reward_mean) for it in put] == [
        (f"t{i}", i, 2, float(i)) for i in range(3)
    ]
    assert [(it.num_episodes, it.num_tokens) for it in mine.versions] == [(2, 10)] * 3
    assert (theirs.num_draws, theirs.first_step, theirs.last_step) == (3, 1, 4)
    assert theirs.drawn == {
        **{(stale, rdb.DrawOutcome.SAMPLED): 1 for stale in (0, 1, 2)},
        (2, rdb.DrawOutcome.ACKED): 1,
        (1, rdb.DrawOutcome.ACKED): 1,
        (0, rdb.DrawOutcome.NACKED): 1,
    }
    assert theirs.first_draw_at is not None
    assert theirs.first_put_at is not None
    with pytest.raises(InvalidInputError, match="run: expected a run of the store"):
        await store.run_stats("unknown")


@both_engines
async def test_a_large_run_is_sampled_over_its_own_duration(
    store: Store, buffer: Buffer, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ended long ago is sampled as densely as the newest one."""
    monkeypatch.setattr(run_totals, "BLOCK", 4)
    theirs = await other.buffer("math")
    await theirs.put([group(f"a{i}", version=i) for i in range(40)])
    await buffer.put([group(f"b{i}", version=i) for i in range(200)])
    early = await store.run_stats("other", limit=40)
    assert early.share > 0.5
    seen = [it.policy_version for it in early.versions]
    assert len(seen) >= 20
    assert (min(seen), max(seen)) == (0, 39)  # type: ignore[type-var]
    late = await store.run_stats("test", limit=40)
    assert 0.1 < late.share < 0.3
    assert abs(sum(it.num_groups for it in late.versions) / late.share - 200) < 40
    nothing = await store.run_stats("test", limit=1)
    assert len(nothing.versions) <= 1


@both_engines
async def test_a_run(browser: httpx.AsyncClient, buffer: Buffer, two_runs: None) -> None:
    page = await get(browser, "/run", name="test")
    text = " ".join(page.text.split())
    assert "6 of its groups are still stored." in text
    assert "stored, with mean reward" not in text  # a mean over tasks would depend on their sizes
    assert "It made 1 draw, for steps 7 to 7." in text
    for i in range(3):
        assert page.tables[f"Mean reward by policy version: t{i}"][1:] == [[str(i), str(i)]]
    assert [row[0:3] for row in page.tables["Stored groups of this run, by task"][1:]] == [
        [f"t{i}", "math", "2"] for i in range(3)
    ]
    theirs = await get(browser, "/run", name=NAME)
    text = " ".join(theirs.text.split())
    assert "Staleness: mean 1.2, maximum 2" in text
    assert "3 of its groups are still stored, with mean reward 0.5." in text
    chart = next(text for _, text in theirs.named("script") if '"bar"' in text)
    [bars] = json.loads(chart)["data"]  # not a line, which would interpolate
    assert (bars["type"], bars["x"], bars["y"]) == ("bar", [0, 1, 2], [1, 2, 2])
    await buffer.sample(1, step=8, runs=NAME)
    page = await get(browser, "/run", name="test")
    text = " ".join(page.text.split())
    assert "Staleness: mean 0, maximum 0, unknown for 50.0% of the groups trained on" in text
    assert "Staleness of trained groups, if known" in page.tables
    page = await get(browser, "/runs", a="test", b=NAME)
    rows = {row[0]: row[1:] for row in page.tables["Both runs"]}
    assert rows["unknown staleness"] == ["50.0%", "0.0%"]
    await get(browser, "/run", 404, name="unknown")
    await get(browser, "/run", 400)
    await get(browser, "/runs", 404, a="test", b="unknown")


async def test_comparison_of_two_runs(
    browser: httpx.AsyncClient, two_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = await get(browser, "/runs", a="test", b=NAME)
    rows = {row[0]: row[1:] for row in page.tables["Both runs"]}
    assert rows["groups still stored"] == ["6", "3"]
    assert "mean reward" not in rows  # the runs have several tasks
    assert (rows["steps"], rows["mean staleness"][1]) == (["7 to 7", "1 to 4"], "1.2")
    assert page.tables["Metadata that differ"] == [
        ["name", "test", NAME], ["lr", "-", "0.1"], ["same", "-", "1"],
    ]  # fmt: skip
    assert page.tables["Stored groups of both runs, by task"][1:] == [
        ["t0", "math", "2", "0", "3", "0.5"],
        ["t1", "math", "2", "1", "-", "-"],
        ["t2", "math", "2", "2", "-", "-"],
    ]
    charts = [it for it in page.tables if it.startswith("Mean reward by policy version: ")]
    assert [it[-2:] for it in charts] == ["t0", "t1", "t2"]
    assert page.tables[charts[0]][1:] == [["0", "0", "0.5"], ["1", "-", "0.5"], ["2", "-", "0.5"]]
    monkeypatch.setattr(view, "MAX_TASKS", 1)  # tasks of both runs come first
    page = await get(browser, "/runs", a="test", b=NAME)
    assert [it for it in page.tables if it.startswith("Mean reward")] == charts[:1]
    assert "The charts show the rewards of 1 of 3 tasks" in page.text
    same = await get(browser, "/runs", a=NAME, b=NAME)
    rows = {row[0]: row[1:] for row in same.tables["Both runs"]}
    assert rows["mean reward"] == ["0.5", "0.5"]


async def test_the_list_of_runs(browser: httpx.AsyncClient, two_runs: None, url: str) -> None:
    page = await get(browser, "/runs")
    assert [row[0] for row in page.tables["Runs, newest first"][1:]] == [NAME, "test"]
    assert page.links[NAME] == "./run?name=run+%3Cb%3E"
    odd = " two  of\t\u202e"  # displayed with escapes, but sent unchanged
    async with Store.open(url, run=odd) as store:
        await store.buffer("math")
    page = await get(browser, "/runs")
    assert [it["value"] for it, _ in page.named("option")] == [odd, NAME, "test"] * 2
