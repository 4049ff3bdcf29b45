"""`replaydb buffers`: tables and JSON, mistyped and untrusted names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import replaydb as rdb
from support.command import run
from support.engines import both_engines


@pytest.fixture
def filled_url(url: str) -> str:
    """Two buffers, one of them with two groups."""

    async def fill() -> None:
        async with rdb.Store.open(url) as store:
            await store.buffer("[red]empty")
            buffer = await store.buffer("math", max_staleness={"gsm8k": 4})
            episode = rdb.Episode(prompt_ids=[1, 2], response_ids=[3], reward=0.5)
            await buffer.put(
                [rdb.EpisodeGroup(task_name="gsm8k", episodes=[episode] * 2) for _ in range(2)]
            )

    asyncio.run(fill())
    return url


@both_engines
def test_list(filled_url: str) -> None:
    lines = run("buffers", "list", url=filled_url).output.splitlines()
    assert [line.split()[:2] for line in lines if line.split()[1:2] in (["0"], ["2"])] == [
        ["[red]empty", "0"],
        ["math", "2"],
    ]
    listed = json.loads(run("buffers", "list", "--json", url=filled_url).output)
    assert [(info["name"], info["num_groups"]) for info in listed] == [
        ("[red]empty", 0),
        ("math", 2),
    ]
    assert listed[1]["settings"]["max_staleness"] == {"gsm8k": 4}


@both_engines
def test_show(filled_url: str) -> None:
    shown = run("buffers", "show", "math", url=filled_url).output
    assert "math: 2 groups" in shown
    assert ["gsm8k", "completed", "2", "12"] in [line.split()[:4] for line in shown.splitlines()]
    facts = json.loads(run("buffers", "show", "math", "--json", url=filled_url).output)
    assert facts["totals"][0]["num_tokens"] == 12
    assert facts["totals"][0]["reward_mean"] == 0.5
    assert facts["tasks"][0]["num_inserted"] == 2


def test_no_such_buffer(filled_url: str) -> None:
    outcome = run("buffers", "show", "chess", url=filled_url)
    assert outcome.exit_code == 1
    assert (
        outcome.stderr
        == "error: there is no buffer named 'chess'; there are: '[red]empty', 'math'\n"
    )


def test_an_error_for_a_mistyped_file_lists_existing_ones(sqlite_url: str) -> None:
    right = Path(sqlite_url.removeprefix("sqlite:///"))
    (right.parent / "notes.txt").write_text("no database")
    wrong = right.with_name("repaly.db")
    outcome = run("buffers", "list", url=f"sqlite:///{wrong}")
    assert outcome.exit_code == 1
    assert outcome.stderr == (f"error: {wrong}: there is no such file; its folder has replay.db\n")
    assert not wrong.exists()


#: Colours, a cleared screen, a title, a link, other control characters, text from right to left.
HOSTILE = "\x1b[31m\x1b[2J\x1b]0;x\x07\x9b1m\r\n\t\x7f\u2028\u202e[red]:smile:数学"
SHOWN = r"\x1b[31m\x1b[2J\x1b]0;x\x07\x9b1m\r\n\t\x7f\u2028\u202e" + "[red]:smile:数学"


def test_untrusted_names_are_escaped(url: str) -> None:
    async def fill() -> None:
        async with rdb.Store.open(url) as store:
            buffer = await store.buffer(HOSTILE, max_staleness={HOSTILE: 4})
            episode = rdb.Episode(prompt_ids=[1, 2], response_ids=[3], reward=0.5)
            await buffer.put(rdb.EpisodeGroup(HOSTILE, [episode], status="failed"))

    asyncio.run(fill())
    results = [
        run("buffers", "list", url=url),
        run("buffers", "list", "--json", url=url),
        run("buffers", "show", HOSTILE, url=url),
        run("buffers", "show", HOSTILE, "--json", url=url),
        run("buffers", "show", HOSTILE + "2", url=url),
    ]
    for result in results:
        assert all(one.isprintable() for one in result.output.replace("\n", "")), result.output
    assert SHOWN in results[0].stdout
    assert json.loads(results[1].stdout)[0]["name"] == HOSTILE
    assert results[2].stdout.count(SHOWN) == 3  # the buffer, and its task in both tables
    assert json.loads(results[3].stdout)["name"] == HOSTILE
    assert results[4].exit_code == 1
