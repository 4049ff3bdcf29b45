"""Prompt page: attempts by run and version, and the version that solves the prompt."""

from __future__ import annotations

import httpx
import pytest

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.ui.views import prompt as view
from support.engines import both_engines
from support.groups import group
from support.pages import Page, read

CHART = "Reward by policy version"
UID = "gsm8k/1 <7>"


async def get(browser: httpx.AsyncClient, status: int = 200, **query: str | float) -> Page:
    answer = await browser.get("/prompt", params={"buffer": "math", "uid": UID, **query})
    assert answer.status_code == status, answer.text
    return read(answer.text)


@pytest.fixture
async def attempted(buffer: Buffer, other: Store) -> Buffer:
    """A prompt with rising rewards over the versions of one run, and an attempt of another run."""
    for version, rewards in ((1, [0.0, 0.5]), (2, [0.0, 1.0]), (2, [0.5, 0.5]), (3, [1.0, 1.0])):
        await buffer.put(group(prompt_uid=UID, version=version, rewards=rewards))
    await buffer.put(group(prompt_uid=UID, task="other", rewards=[9.0]))  # of unknown version
    await buffer.put(group(prompt_uid="another", version=0, rewards=[9.0]))
    theirs = await other.buffer("math")
    await theirs.put(group(prompt_uid=UID, version=1, rewards=[0.25, None]))
    await buffer.sample(2, tasks="gsm8k")
    return buffer


@both_engines
async def test_attempts(browser: httpx.AsyncClient, attempted: Buffer) -> None:
    page = await get(browser, task="gsm8k")
    assert page.tables[CHART][1:] == [
        ["test", "1", "1", "2", "0.25", "0", "0.5"],
        ["other", "1", "1", "2", "0.25", "0.25", "0.25"],
        ["test", "2", "2", "4", "0.5", "0", "1"],
        ["test", "3", "1", "2", "1", "1", "1"],
    ]
    text = " ".join(page.text.split())
    assert (
        "First solved (reward at least 1) by an episode of version 2 of test. "
        "Solved by every episode since version 3."
    ) in text
    assert page.tables["Progress by run, most recent first"][1:] == [
        ["other", "-", "-", "1", "0.25"],
        ["test", "2", "3", "3", "1"],
    ]
    [totals] = [it for it in await attempted.prompts(tasks="gsm8k") if it.prompt_uid == UID]
    [row] = page.tables["Outcomes by task"][1:]
    assert row[:8] == [
        "gsm8k", str(totals.num_groups), str(totals.num_episodes), f"{totals.reward_mean:.4g}",
        "0", "1", str(totals.times_sampled), str(totals.num_groups_sampled),
    ]  # fmt: skip
    rows = page.tables["Groups, newest first"][1:]
    assert [row[2] for row in rows] == ["other", "test", "test", "test", "test"]


@pytest.mark.parametrize(
    ("solved", "expected"),
    [
        (0.5, "since version 3. The most recent run, other, has not solved it."),
        (2.0, "Never solved"),
    ],
)
async def test_the_version_since_which_it_is_solved(
    browser: httpx.AsyncClient, attempted: Buffer, solved: float, expected: str
) -> None:
    assert expected in " ".join((await get(browser, solved=solved, task="gsm8k")).text.split())


@both_engines
async def test_a_prompt_with_a_lower_reward_since_is_not_solved(
    browser: httpx.AsyncClient, attempted: Buffer
) -> None:
    await attempted.put(group(prompt_uid=UID, version=4, rewards=[1.0, 0.0]))
    await attempted.put(
        group(prompt_uid=UID, version=5, rewards=[None])
    )  # of which no reward is known yet
    text = " ".join((await get(browser, task="gsm8k")).text.split())
    assert (
        "First solved (reward at least 1) by an episode of version 2 of test. "
        "In its newest version, 4, not every episode solves it."
    ) in text
    await attempted.put(group(prompt_uid=UID, version=6, rewards=[1.0]))
    text = " ".join((await get(browser, task="gsm8k")).text.split())
    assert (
        "First solved (reward at least 1) by an episode of version 2 of test. "
        "Solved by every episode since version 6"
    ) in text


async def test_the_displayed_reward_is_exact(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    """A rounded one could be higher than every reward."""
    await buffer.put(group(prompt_uid=UID, version=1, rewards=[0.99996, 0.0]))
    page = await get(browser)
    [value] = [it["value"] for it, _ in page.named("input") if it["name"] == "solved"]
    assert value == "0.99996"
    assert "First solved (reward at least 0.3) by" in (await get(browser, solved=0.1 + 0.2)).text
    text = (await get(browser, solved=value)).text
    assert "First solved (reward at least 0.99996) by an episode of version 1" in text


async def test_the_prompt_is_that_of_the_newest_stored_payload(
    browser: httpx.AsyncClient, buffer: Buffer
) -> None:
    await buffer.update_settings(archived_payload="drop")
    ids = await buffer.put(
        [group(prompt_uid=UID, prompt="What is <b>4+4</b>?", version=i) for i in range(2)]
    )
    for newest in reversed(ids):
        [(_, text)] = (await get(browser)).named("pre")
        assert text == "What is <b>4+4</b>?"
        async with buffer.lease(1, ttl=60, where=rdb.col.id == newest):
            pass
    assert (await get(browser)).named("pre") == []


async def test_equal_rewards_do_not_count_as_solved(
    browser: httpx.AsyncClient, buffer: Buffer
) -> None:
    for version in range(3):
        await buffer.put(group(prompt_uid=UID, version=version, rewards=[0.0, 0.0, None]))
    text = " ".join((await get(browser)).text.split())
    assert "Every reward is 0, so it is unknown whether that counts as solved." in text
    assert "olved by" not in text
    assert "First solved" not in text
    text = " ".join((await get(browser, solved=0.5)).text.split())
    assert "Never solved: no episode of a known version reached 0.5." in text
    text = " ".join((await get(browser, solved=0)).text.split())
    assert (
        "First solved (reward at least 0) by an episode of version 0 of test. "
        "Solved by every episode since"
    ) in text


async def test_an_odd_uid_is_passed_unchanged(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    uid, task = "tab\t\u202e", " t  1\t"
    await buffer.put(group(prompt_uid=uid, task=task, version=1))
    page = await get(browser, uid=uid, task=task)
    hidden = {it["name"]: it["value"] for it, _ in page.named("input") if it["name"] != "solved"}
    assert hidden == {"buffer": "math", "uid": uid, "task": task}


async def test_a_uid_in_several_tasks(browser: httpx.AsyncClient, attempted: Buffer) -> None:
    page = await get(browser)
    assert [row[0] for row in page.tables["Outcomes by task"][1:]] == ["gsm8k", "other"]
    assert "2 tasks have a prompt with this uid" in " ".join(page.text.split())
    assert CHART not in page.tables
    other = await get(browser, task="other", solved=1)
    assert "No episode of a known version has a reward" in " ".join(other.text.split())
    assert "No group of this prompt is stored" in (await get(browser, uid="unknown")).text
    for wrong in ("x", "nan", "1e999"):
        await get(browser, 400, solved=wrong)
    await get(browser, 400, first=-2)
    await get(browser, 400, uid="")


async def test_many_groups_are_paginated(
    browser: httpx.AsyncClient, attempted: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "ROWS", 2)
    page = await get(browser, task="gsm8k")
    seen = page.tables["Groups, newest first"][1:]
    while "Older groups" in page.links:
        page = read((await browser.get(page.links["Older groups"])).text)
        seen += page.tables["Groups, newest first"][1:]
    assert len({row[0] for row in seen}) == len(seen) == 5
    monkeypatch.setattr(view, "MAX_GROUPS", 3)
    assert "Only the newest 3 groups are summarized." in (await get(browser, task="gsm8k")).text
