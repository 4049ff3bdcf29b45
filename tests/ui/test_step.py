"""A step says what was drawn for it, and leads to the others."""

from __future__ import annotations

from collections import Counter

import httpx
import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.ui.views import step as view
from support.engines import both_engines
from support.groups import group, groups
from support.pages import Page, read

GROUPS = "Its groups, in the order of their batches"


async def get(browser: httpx.AsyncClient, status: int = 200, **query: str | int) -> Page:
    answer = await browser.get("/step", params={"buffer": "math", **query})
    assert answer.status_code == status, answer.text
    return read(answer.text)


@both_engines
async def test_what_trained_a_step(
    browser: httpx.AsyncClient, buffer: Buffer, other: Store
) -> None:
    await buffer.put(groups(4, version=0, rewards=[1.0, 0.0], prompt_uid="p"))
    await (await other.buffer("math")).put(group(version=1, rewards=[1.0]))
    await buffer.advance_policy(3)
    await buffer.sample(1, step=3)
    lease = await buffer.lease(5, rdb.Prioritized(), ttl=60, step=7)
    await lease.reject([lease.batch.ids[0]], reason="no <use>")
    await lease.ack(lease.batch.ids[1:])
    await buffer.sample(1, step=9, at_least=0)
    [draw] = await buffer.draws(step=7)
    page = await get(browser, step=7)
    infos = {info.id: info for info in await buffer.find(draw.group_ids)}
    assert page.tables[GROUPS][1:] == [
        [
            f"group {id_}",
            f"draw {draw.id}",
            "gsm8k",
            infos[id_].prompt_uid or "-",
            f"{infos[id_].reward_mean:.4g}",
            infos[id_].run_name,
            str(infos[id_].min_policy_version),
            "-" if draw.staleness[i] is None else str(draw.staleness[i]),
            f"{draw.probabilities[i]:.4g}",
            f"{draw.weights[i]:.4g}",
            "rejected: no <use>" if i == 0 else "acked",
        ]
        for i, id_ in enumerate(draw.group_ids)
    ]
    sources = page.tables["Runs and policy versions of its groups"][1:]
    trained = Counter(infos[id_].run_name for id_ in draw.group_ids[1:])
    assert [row[:4] for row in sources] == [
        row
        for row in (
            ["other", "1", str(trained["other"]), "1"],
            ["test", "0", str(trained["test"]), "0.5"],
        )
        if row[2] != "0"
    ]
    rewards = [infos[id_].reward_mean or 0 for id_ in draw.group_ids[1:]]
    stale = [it for it in draw.staleness[1:] if it is not None]
    others = trained["other"]  # which do not compare
    assert (
        f"Trained on 4 of 5 groups that 1 draw took: mean reward {sum(rewards) / 4:.4g}, "
        f"staleness {sum(stale) / len(stale):.4g} in the mean and {max(stale)} at most"
        + (f" (of {others} unknown). " if others else ". ")
        + "4 acked, 1 rejected."
    ) in " ".join(page.text.split())
    chart = "Staleness when it was drawn" + (f", of {4 - others} of 4 groups" if others else "")
    assert page.tables[chart][1:] == [["3", str(4 - others)]]
    assert page.links["Step 3"] == "./step?buffer=math&step=3&run=test"
    assert "Step 9" not in page.links  # it drew nothing
    assert page.links["p"] == "./prompt?buffer=math&uid=p&task=gsm8k"


@both_engines
async def test_of_one_run_or_one_draw(
    browser: httpx.AsyncClient, buffer: Buffer, other: Store
) -> None:
    await buffer.put(groups(3))
    mine = await buffer.sample(2, step=1)
    theirs = await (await other.buffer("math")).sample(3, step=1)
    await buffer.sample(1, step=4)
    await (await other.buffer("math")).sample(1, step=2)
    page = await get(browser, step=1)  # two updates, which are not added up
    assert GROUPS not in page.tables
    assert page.links["other"] == "./step?buffer=math&step=1&run=other"
    [by_run] = [rows for caption, rows in page.tables.items() if caption.startswith("Step 1 of")]
    assert [row[:3] for row in by_run[1:]] == [["other", "1", "3"], ["test", "1", "2"]]
    assert page.links["Step 2"] == "./step?buffer=math&step=2"
    page = await get(browser, step=1, run="test")
    assert page.links["Step 4"] == "./step?buffer=math&step=4&run=test"
    assert "Step 2" not in page.links
    assert [row[0] for row in page.tables[GROUPS][1:]] == [f"group {id_}" for id_ in mine.ids]
    assert theirs.draw_id is not None
    page = await get(browser, draw=theirs.draw_id)
    assert [row[0] for row in page.tables[GROUPS][1:]] == [f"group {id_}" for id_ in theirs.ids]
    assert page.links["All of step 1"] == "./step?buffer=math&step=1&run=other"
    assert "Nothing is recorded" in (await get(browser, step=1, run="nobody")).text
    assert "Nothing is recorded" in (await get(browser, step=5)).text
    await get(browser, 404, draw=theirs.draw_id + 9)
    for wrong in ({"step": "last"}, {"step": 1, "first": -2}, {}):
        await get(browser, 400, **wrong)


async def test_tasks_of_a_step(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    await buffer.put(groups(3, "math", rewards=[0.5]) + groups(2, "<code>", rewards=[1.0, None]))
    drawn = await buffer.sample(4, rdb.Mix({"<code>": 1, "math": 3}), step=1)
    page = await get(browser, step=1)
    assert [row[:4] for row in page.tables["Tasks of its groups"][1:]] == [
        ["math", "3", "75.0%", "0.5"],
        ["<code>", "1", "25.0%", "1"],
    ]
    await buffer.delete([drawn.ids[0]])
    assert "Tasks of its groups" not in (await get(browser, step=1)).tables  # of one only


@both_engines
async def test_groups_that_are_gone(
    browser: httpx.AsyncClient, buffer: Buffer, other: Store
) -> None:
    ids = await buffer.put([group("kept"), group("deleted"), group("replaced")])
    await buffer.sample(3, rdb.Fifo(), step=1)
    await buffer.delete([ids[1]])
    await buffer.put(group("replaced", rewards=[9.0]), on_duplicate="replace")
    page = await get(browser, step=1)
    said = " ".join(page.text.split())
    assert "mean reward 0.5 of the 1 that is still stored as it was, staleness" in said
    assert "2 are deleted, or have other content since" in said
    rows = page.tables[GROUPS][1:]
    assert [row[:1] + row[2:5] for row in rows] == [
        [f"group {ids[0]}", "gsm8k", "-", "0.5"],
        [f"group {ids[1]}", "deleted", "-", "-"],
        [f"group {ids[2]}", "replaced", "-", "-"],
    ]
    await (await other.buffer("math")).sample(2, rdb.Fifo(), step=1)
    await buffer.delete([ids[0]])
    page = await get(browser, step=1)
    [by_run] = [rows for caption, rows in page.tables.items() if caption.startswith("Step 1 of")]
    assert [row[:4] for row in by_run[1:]] == [
        ["other", "1", "2", "9 (of 1)"],
        ["test", "1", "3", "- (of 0)"],
    ]


async def test_draws_that_a_run_sampled_for_one_step(
    browser: httpx.AsyncClient, buffer: Buffer, other: Store
) -> None:
    """They may share it, or be a lost attempt and the one after it: all count, and it is said."""
    await buffer.put(groups(8, rewards=[1.0]))
    async with buffer.lease(1, rdb.Fifo(), ttl=60, step=1) as lease:
        pass
    drawn = [await buffer.sample(2, rdb.Fifo(), step=1, where=rdb.col.id % 2 == i) for i in (0, 1)]
    page = await get(browser, step=1)
    said = " ".join(page.text.split())
    assert "Trained on up to 5 of 5 groups that 3 draws took" in said
    assert "1 acked, 4 sampled. This run sampled for the step more than once." in said
    [source] = page.tables["Runs and policy versions of its groups"][1:]
    assert source[2] == "5"
    for batch in drawn:
        assert batch.draw_id is not None
        page = await get(browser, draw=batch.draw_id)
        said = " ".join(page.text.split())
        assert "Trained on up to 2 of 2 groups that 1 draw took" in said
        assert page.links["all its draws"] == "./step?buffer=math&step=1&run=test"
    assert lease.batch.draw_id is not None
    said = (await get(browser, draw=lease.batch.draw_id)).text  # of this more is known
    assert "Trained on 1 of 1 groups" in " ".join(said.split())
    await (await other.buffer("math")).sample(1, step=1)
    page = await get(browser, step=1)
    [by_run] = [rows for caption, rows in page.tables.items() if caption.startswith("Step 1 of")]
    assert [row[:3] for row in by_run[1:]] == [["other", "1", "1"], ["test", "3", "up to 5"]]


async def test_many_groups_and_draws_are_pages(
    browser: httpx.AsyncClient, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "ROWS", 2)
    await buffer.put(groups(5))
    for number in (None, 2, 2):
        await buffer.sample(5, rdb.Fifo(), step=number)
    page = await get(browser, step=2)
    seen = [row[0] for row in page.tables[GROUPS][1:]]
    while "Next groups" in page.links:
        page = read((await browser.get(page.links["Next groups"])).text)
        seen += [row[0] for row in page.tables[GROUPS][1:]]
    assert seen == [f"group {i}" for i in (1, 2, 3, 4, 5)] * 2
    page = read((await browser.get("/steps?buffer=math")).text)
    older = read((await browser.get(page.links["Older draws"])).text)
    rows = [row for it in (page, older) for row in it.tables["Draws, the newest first"][1:]]
    assert [(row[0], row[5], row[7]) for row in rows] == [
        *[("step 2", "5", "5 sampled")] * 2,
        ("no step", "5", "5 sampled"),
    ]
    monkeypatch.setattr(view, "MOST_DRAWS", 1)
    assert "There is more than this" in (await get(browser, step=2)).text
