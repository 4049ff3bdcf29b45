"""Step pages: groups of a step, of a draw and of several runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.ui.views import step as view
from support.engines import both_engines
from support.groups import group, groups
from support.pages import Page, read

GROUPS = "Groups, in batch order"


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
    sources = page.tables["Groups by run that put them, and policy version"][1:]
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
    others = trained["other"]  # of another lineage: their staleness is unknown
    assert (
        f"1 draw took 5 groups; 4 were trained on. Mean reward {sum(rewards) / 4:.4g}. "
        f"Staleness: mean {sum(stale) / len(stale):.4g}, maximum {max(stale)}"
        + (f" (unknown for {others}). " if others else ". ")
        + "Outcomes: 4 acked, 1 rejected."
    ) in " ".join(page.text.split())
    chart = "Staleness when drawn" + (f", of {4 - others} of 4 groups" if others else "")
    assert page.tables[chart][1:] == [["3", str(4 - others)]]
    assert page.links["Step 3"] == "./step?buffer=math&step=3&run=test"
    assert "Step 9" not in page.links  # it drew nothing
    assert page.links["p"] == "./prompt?buffer=math&uid=p&task=gsm8k"


@both_engines
async def test_steps_of_several_runs_and_single_draws(
    browser: httpx.AsyncClient, buffer: Buffer, other: Store
) -> None:
    await buffer.put(groups(3))
    mine = await buffer.sample(2, step=1)
    theirs = await (await other.buffer("math")).sample(3, step=1)
    await buffer.sample(1, step=4)
    await (await other.buffer("math")).sample(1, step=2)
    page = await get(browser, step=1)  # two updates, which are not combined
    assert GROUPS not in page.tables
    assert page.links["other"] == "./step?buffer=math&step=1&run=other"
    [by_run] = [rows for caption, rows in page.tables.items() if caption.startswith("Step 1 by")]
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
    assert "No draws recorded" in (await get(browser, step=1, run="unknown")).text
    assert "No draws recorded" in (await get(browser, step=5)).text
    await get(browser, 404, draw=theirs.draw_id + 9)
    for wrong in ({"step": "last"}, {"step": 1, "first": -2}, {}):
        await get(browser, 400, **wrong)


async def test_tasks_of_a_step(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    await buffer.put(groups(3, "math", rewards=[0.5]) + groups(2, "<code>", rewards=[1.0, None]))
    drawn = await buffer.sample(4, rdb.Mix({"<code>": 1, "math": 3}), step=1)
    page = await get(browser, step=1)
    assert [row[:4] for row in page.tables["Groups by task"][1:]] == [
        ["math", "3", "75.0%", "0.5"],
        ["<code>", "1", "25.0%", "1"],
    ]
    await buffer.delete([drawn.ids[0]])
    assert "Groups by task" not in (await get(browser, step=1)).tables  # a single task


async def test_deleted_and_replaced_groups(
    browser: httpx.AsyncClient, buffer: Buffer, other: Store
) -> None:
    """Of groups that were replaced, the page shows what was trained on."""
    facts: dict[str, Any] = {"rewards": [2.0], "prompt_uid": "p", "version": 3}
    uids = ["renewed", "replaced"]
    ids = await buffer.put([group("kept"), group("deleted"), *(group(u, **facts) for u in uids)])
    await buffer.sample(4, rdb.Fifo(), step=1)
    await buffer.delete([ids[1]])
    await buffer.put(group("renewed", "code", rewards=[9.0]), on_duplicate="renew")
    await buffer.put(group("replaced", "code", rewards=[9.0]), on_duplicate="replace")
    page = await get(browser, step=1)
    text = " ".join(page.text.split())
    assert "Mean reward 1.5 (over the 3 whose content is known). Staleness: mean" in text
    assert "1 group was deleted since, or replaced by an earlier version" in text
    rows = page.tables[GROUPS][1:]
    assert [row[:1] + row[2:7] for row in rows] == [
        [f"group {ids[0]}", "gsm8k", "-", "0.5", "test", "-"],
        [f"group {ids[1]}, deleted", "-", "-", "-", "-", "-"],
        [f"group {ids[2]}, replaced", "gsm8k", "p", "2", "test", "3"],
        [f"group {ids[3]}, replaced", "gsm8k", "p", "2", "test", "3"],
    ]
    await (await other.buffer("math")).sample(2, rdb.Fifo(), step=1)
    await buffer.delete([ids[0]])
    page = await get(browser, step=1)
    [by_run] = [rows for caption, rows in page.tables.items() if caption.startswith("Step 1 by")]
    assert [row[:4] for row in by_run[1:]] == [
        ["other", "1", "2", "9 (of 1)"],
        ["test", "1", "4", "2 (of 2)"],
    ]


async def test_draws_that_a_run_sampled_for_one_step(
    browser: httpx.AsyncClient, buffer: Buffer, other: Store
) -> None:
    """They share the step, or repeat a lost attempt: all groups count, and a note explains it."""
    await buffer.put(groups(8, rewards=[1.0]))
    async with buffer.lease(1, rdb.Fifo(), ttl=60, step=1) as lease:
        pass
    drawn = [await buffer.sample(2, rdb.Fifo(), step=1, where=rdb.col.id % 2 == i) for i in (0, 1)]
    page = await get(browser, step=1)
    text = " ".join(page.text.split())
    assert "3 draws took 5 groups; up to 5 were trained on." in text
    assert "1 acked, 4 sampled. This run sampled for the step more than once." in text
    [source] = page.tables["Groups by run that put them, and policy version"][1:]
    assert source[2] == "5"
    for batch in drawn:
        assert batch.draw_id is not None
        page = await get(browser, draw=batch.draw_id)
        text = " ".join(page.text.split())
        assert "1 draw took 2 groups; up to 2 were trained on." in text
        assert page.links["all draws of the step"] == "./step?buffer=math&step=1&run=test"
    assert lease.batch.draw_id is not None
    text = (await get(browser, draw=lease.batch.draw_id)).text  # acked, so not ambiguous
    assert "1 draw took 1 group; 1 was trained on." in " ".join(text.split())
    await (await other.buffer("math")).sample(1, step=1)
    page = await get(browser, step=1)
    [by_run] = [rows for caption, rows in page.tables.items() if caption.startswith("Step 1 by")]
    assert [row[:3] for row in by_run[1:]] == [["other", "1", "1"], ["test", "3", "up to 5"]]


async def test_many_groups_and_draws_are_paginated(
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
    rows = [row for it in (page, older) for row in it.tables["Draws, newest first"][1:]]
    assert [(row[0], row[5], row[7]) for row in rows] == [
        *[("step 2", "5", "5 sampled")] * 2,
        ("no step", "5", "5 sampled"),
    ]
    monkeypatch.setattr(view, "MAX_DRAWS", 1)
    assert "Only the newest draws are summarized." in (await get(browser, step=2)).text
