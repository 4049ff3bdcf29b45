"""A prompt says how its attempts went, and since when it is solved."""

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
async def tried(buffer: Buffer, other: Store) -> Buffer:
    """A prompt that gets easier, by version 2 and 3 of one run, and another run's attempt."""
    for version, rewards in ((1, [0.0, 0.5]), (2, [0.0, 1.0]), (2, [0.5, 0.5]), (3, [1.0, 1.0])):
        await buffer.put(group(prompt_uid=UID, version=version, rewards=rewards))
    await buffer.put(group(prompt_uid=UID, task="other", rewards=[9.0]))  # of unknown version
    await buffer.put(group(prompt_uid="another", version=0, rewards=[9.0]))
    theirs = await other.buffer("math")
    await theirs.put(group(prompt_uid=UID, version=1, rewards=[0.25, None]))
    await buffer.sample(2, tasks="gsm8k")
    return buffer


@both_engines
async def test_attempts(browser: httpx.AsyncClient, tried: Buffer) -> None:
    page = await get(browser, task="gsm8k")
    assert page.tables[CHART][1:] == [
        ["test", "1", "1", "2", "0.25", "0", "0.5"],
        ["other", "1", "1", "2", "0.25", "0.25", "0.25"],
        ["test", "2", "2", "4", "0.5", "0", "1"],
        ["test", "3", "1", "2", "1", "1", "1"],
    ]
    said = " ".join(page.text.split())
    assert "First solved (reward 1) by version 2 of test; no lower reward since version 3." in said
    assert page.tables["Since when it is solved, by run, the one that put last first"][1:] == [
        ["other", "-", "-", "1", "0.25"],
        ["test", "2", "3", "3", "1"],
    ]
    [totals] = [it for it in await tried.prompts(tasks="gsm8k") if it.prompt_uid == UID]
    [row] = page.tables["What became of it, by task"][1:]
    assert row[:8] == [
        "gsm8k", str(totals.num_groups), str(totals.num_episodes), f"{totals.reward_mean:.4g}",
        "0", "1", str(totals.times_sampled), str(totals.num_groups_sampled),
    ]  # fmt: skip
    rows = page.tables["Its groups, the newest first"][1:]
    assert [row[2] for row in rows] == ["other", "test", "test", "test", "test"]


@pytest.mark.parametrize(
    ("solved", "said"),
    [
        (0.5, "since version 3. Not by other, which put last."),
        (2.0, "Never solved"),
    ],
)
async def test_since_when_it_is_solved(
    browser: httpx.AsyncClient, tried: Buffer, solved: float, said: str
) -> None:
    assert said in " ".join((await get(browser, solved=solved, task="gsm8k")).text.split())


@both_engines
async def test_what_was_solved_once_is_not_solved_since(
    browser: httpx.AsyncClient, tried: Buffer
) -> None:
    await tried.put(group(prompt_uid=UID, version=4, rewards=[1.0, 0.0]))
    await tried.put(
        group(prompt_uid=UID, version=5, rewards=[None])
    )  # of which no reward is known yet
    said = " ".join((await get(browser, task="gsm8k")).text.split())
    assert "First solved (reward 1) by version 2 of test; not by every episode of version 4" in said
    await tried.put(group(prompt_uid=UID, version=6, rewards=[1.0]))
    said = " ".join((await get(browser, task="gsm8k")).text.split())
    assert "First solved (reward 1) by version 2 of test; no lower reward since version 6" in said


async def test_the_reward_asked_for_is_the_one_there_is(
    browser: httpx.AsyncClient, buffer: Buffer
) -> None:
    """Not one that is rounded up, which nothing has reached."""
    await buffer.put(group(prompt_uid=UID, version=1, rewards=[0.99996, 0.0]))
    page = await get(browser)
    [value] = [it["value"] for it, _ in page.named("input") if it["name"] == "solved"]
    assert value == "0.99996"
    assert "First solved (reward 0.3) by" in (await get(browser, solved=0.1 + 0.2)).text
    assert "First solved (reward 0.99996) by version 1" in (await get(browser, solved=value)).text


async def test_what_it_says(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    await buffer.update_settings(archived_payload="drop")
    ids = await buffer.put(
        [group(prompt_uid=UID, prompt="What is <b>4+4</b>?", version=i) for i in range(2)]
    )
    for newest in reversed(ids):
        [(_, said)] = (await get(browser)).named("pre")
        assert said == "What is <b>4+4</b>?"
        async with buffer.lease(1, ttl=60, where=rdb.col.id == newest):
            pass
    assert (await get(browser)).named("pre") == []


async def test_rewards_that_are_all_the_same_solve_nothing(
    browser: httpx.AsyncClient, buffer: Buffer
) -> None:
    for version in range(3):
        await buffer.put(group(prompt_uid=UID, version=version, rewards=[0.0, 0.0, None]))
    said = " ".join((await get(browser)).text.split())
    assert "Every reward was 0: nothing says whether that solves it." in said
    assert "olved by" not in said
    said = " ".join((await get(browser, solved=0.5)).text.split())
    assert "Never solved: no episode of a known version reached 0.5." in said
    said = " ".join((await get(browser, solved=0)).text.split())
    assert "First solved (reward 0) by version 0 of test; no lower reward since" in said


async def test_an_odd_uid_is_asked_for_as_it_is(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    uid, task = "tab\t\u202e", " t  1\t"
    await buffer.put(group(prompt_uid=uid, task=task, version=1))
    page = await get(browser, uid=uid, task=task)
    hidden = {it["name"]: it["value"] for it, _ in page.named("input") if it["name"] != "solved"}
    assert hidden == {"buffer": "math", "uid": uid, "task": task}


async def test_of_all_tasks(browser: httpx.AsyncClient, tried: Buffer) -> None:
    page = await get(browser)
    assert [row[0] for row in page.tables["What became of it, by task"][1:]] == ["gsm8k", "other"]
    assert "2 tasks have a prompt of this uid" in " ".join(page.text.split())
    assert CHART not in page.tables
    other = await get(browser, task="other", solved=1)
    assert "No episode of a known version has a reward" in " ".join(other.text.split())
    assert "No group of it is stored" in (await get(browser, uid="nobody")).text
    for wrong in ("x", "nan", "1e999"):
        await get(browser, 400, solved=wrong)
    await get(browser, 400, first=-2)
    await get(browser, 400, uid="")


async def test_many_groups_are_pages(
    browser: httpx.AsyncClient, tried: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "ROWS", 2)
    page = await get(browser, task="gsm8k")
    seen = page.tables["Its groups, the newest first"][1:]
    while "Older groups" in page.links:
        page = read((await browser.get(page.links["Older groups"])).text)
        seen += page.tables["Its groups, the newest first"][1:]
    assert len({row[0] for row in seen}) == len(seen) == 5
    monkeypatch.setattr(view, "MOST_GROUPS", 3)
    assert "There are more groups: the newest 3" in (await get(browser, task="gsm8k")).text
