"""`replaydb groups`: tables and JSON."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest

import replaydb as rdb
from support.command import json_of, rows_of, run
from support.engines import both_engines


@both_engines
def test_filters_and_sort_order(filled_url: str) -> None:
    for options, expected in {
        "": [5, 4, 3, 2, 1, 0],
        "--task odd": [5, 3, 1],
        "--task odd --task even --ascending": [0, 1, 2, 3, 4, 5],
        "--status failed --status leased": [5, 3],
        "--run second": [5],
        "--sort priority --limit 2": [0, 1],
        "--sort reward_mean --ascending --task even": [0, 2, 4],
    }.items():
        listed = json_of("groups", "list", "math", *options.split(), url=filled_url)
        assert [one["group_uid"] for one in listed] == [f"uid-{i}" for i in expected], options


FILTERS = {
    "reward_mean > 1.5 and task_name == 'even'": [4, 2],
    'tags["level"] == "hard" or group_status == "failed"': [3, 1, 0],
    "prompt_uid is not None and 0.5 < col.reward_mean <= 2.5": [2, 1],
    "prompt_uid == 'p1'": [3, 2],
    "1.5 <= reward_mean <= 3.5": [3, 2, 1],
    'tags["level"] == "hard" and tags["n"] == 1': [1],
    'tags["ok"] == True': [3],
    'tags["nothing"] is None': [5, 4, 3, 2, 1, 0],
}


@both_engines
def test_expressions_select_groups(filled_url: str) -> None:
    for where, expected in FILTERS.items():
        listed = json_of("groups", "list", "math", "--where", where, url=filled_url)
        assert [one["group_uid"] for one in listed] == [f"uid-{i}" for i in expected], where
        both = ("--where", where, "--task", "even")
        listed = json_of("groups", "list", "math", *both, url=filled_url)
        uids = [f"uid-{i}" for i in expected if i % 2 == 0]
        assert [one["group_uid"] for one in listed] == uids, where
        ids = {
            one["id"] for one in json_of("groups", "list", "math", "--where", where, url=filled_url)
        }
        episodes = json_of("episodes", "list", "math", "--where", where, url=filled_url)
        assert {one["group_id"] for one in episodes} <= ids, where
    assert episodes


@pytest.mark.parametrize(
    "words",
    ["groups list math", "groups delete math", "episodes list math", "export x", "prune"],
)
def test_invalid_expressions_are_usage_errors(sqlite_url: str, words: str) -> None:
    days = ("--groups-days", 0) if words == "prune" else ()
    for where, message in {
        "reward_maen > 1": "did you mean reward_mean?, got 'reward_maen' at character 1",
        "reward_mean > id.x": "at character",
        "": "invalid syntax",
        "id == 1 or " * 300 + "id == 1": "expected at most 2000 characters, got 3307",
    }.items():
        outcome = run(*words.split(), *days, "--where", where, url=sqlite_url)
        assert (outcome.exit_code, outcome.stdout) == (2, ""), where
        shown = " ".join(outcome.stderr.replace("│", " ").split())
        assert "--where" in shown
        assert message in shown


def test_pages(filled_url: str) -> None:
    listed = [one["id"] for one in json_of("groups", "list", "math", url=filled_url)]
    order = ("--sort", "reward_mean", "--limit", "4")
    *table, more = rows_of(run("groups", "list", "math", *order, url=filled_url))
    assert table[0][:3] == ["group", "task", "status"]
    assert [int(row[0]) for row in table[1:]] == listed[:4]
    assert table[1][1:5] == ["odd", "leased", "p2", "2"]
    assert more == f"more rows: --after {listed[3]}".split()
    *table, last = rows_of(run("groups", "list", "math", *order, *more[2:], url=filled_url))
    assert [int(row[0]) for row in [*table[1:], last]] == listed[4:]


def test_the_sort_column_is_shown(filled_url: str) -> None:
    table = rows_of(run("groups", "list", "math", "--sort", "num_bytes", url=filled_url))
    assert table[0][-1] == "num_bytes"
    assert int(table[1][-1]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sort reward_maen", "did you mean 'reward_mean'?"),
        ("--status done", "'done' is not one of"),
        ("--limit 0", "--limit"),
        ("--limit 99999999999999999999", "--limit"),
        ("--sort tags", "'tags' is not numeric or a time"),
        ("--sort task_name", "'task_name' is not numeric or a time"),
    ],
)
def test_mistyped_options_are_usage_errors(sqlite_url: str, options: str, message: str) -> None:
    outcome = run("groups", "list", "math", *options.split(), url=sqlite_url)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert message in outcome.stderr


def test_unknown_names_are_errors(filled_url: str) -> None:
    for options, message in (
        ("--after 99", "no such groups in this buffer: 99"),
        (
            "--task odd --task nope",
            "task: expected a task of this buffer (existing: 'even', 'odd')",
        ),
        ("--run nope", "run: expected a run of this store (last runs: 'second', 'first')"),
    ):
        outcome = run("groups", "list", "math", *options.split(), url=filled_url)
        assert (outcome.exit_code, outcome.stdout) == (1, "")
        assert message in outcome.stderr


def test_a_group_is_shown(filled_url: str) -> None:
    shown = json_of("groups", "show", "math", "uid-0", url=filled_url)
    group_id = shown["group"]["id"]
    assert shown["group"]["tags"] == {"level": "hard", "n": 0, "ok": False}
    assert [one["reward"] for one in shown["episodes"]] == [0.0, 1.0]
    (draw,) = shown["draws"]
    assert (draw["step"], draw["run_name"], draw["outcome"]) == (7, "first", "sampled")
    table = rows_of(run("groups", "show", "math", group_id, url=filled_url))
    assert ["reward_mean", "0.5"] in table
    assert ["1", "1", "1", "5", "3", "1", "0", "stop", "-"] in table
    assert [str(draw["draw"]), "first", "7"] in [[row[0], *row[3:5]] for row in table]


def test_a_group_without_tokens_is_shown(filled_url: str) -> None:
    async def drop() -> None:
        async with rdb.Store.open(filled_url) as store:
            buffer = await store.buffer("math", archived_payload="drop")
            async with buffer.lease(1, ttl=600):
                pass

    asyncio.run(drop())
    shown = json_of("groups", "show", "math", "uid-0", url=filled_url)
    assert (shown["group"]["status"], shown["episodes"]) == ("archived", None)
    assert [draw["outcome"] for draw in shown["draws"]] == ["acked", "sampled"]
    assert "cannot be read" in run("groups", "show", "math", "uid-0", url=filled_url).stdout
    listed = json_of("episodes", "list", "math", "--limit", 100, url=filled_url)
    assert sorted({one["reward"] for one in listed}) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_narrow_terminal_has_a_line_for_each_group(
    filled_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    listed = json_of("groups", "list", "math", "--task", "odd", url=filled_url)
    for width in (80, 60):
        outcome = run("groups", "list", "math", "--task", "odd", url=filled_url, width=width)
        headings, _rule, *lines = re.sub(r"\x1b\[\d*m", "", outcome.stdout).strip().splitlines()
        assert headings.split()[:3] == ["group", "task", "status"]
        shown = [line.split()[:3] for line in lines[:3]]
        assert shown == [[str(one["id"]), "odd", one["status"]] for one in listed]
        assert lines[-1].startswith("columns that do not fit: created, priority, draws")
        assert max(map(len, lines[:3])) <= width
    by_time = run("groups", "list", "math", "--sort", "created_at", url=filled_url, width=80)
    assert "created" in re.split(r"\x1b\[\d*m| ", by_time.stdout.splitlines()[1])


def test_prompt_and_extras(url: str) -> None:
    async def fill() -> None:
        async with rdb.Store.open(url) as store:
            buffer = await store.buffer("math")
            one = rdb.Episode(prompt_ids=[1, 7], response_ids=[2])
            messages = [{"role": "user", "content": "how\x1b many?"}]
            pixels = [[1.0, float("inf")]]
            await buffer.put(
                [
                    rdb.EpisodeGroup("t", [one], group_uid="g", prompt=messages),
                    rdb.EpisodeGroup(
                        "t", [one], group_uid="h", prompt="why?", extras={"pixels": pixels}
                    ),
                ]
            )

    asyncio.run(fill())
    shown = json_of("groups", "show", "math", "h", url=url)
    assert (shown["prompt"], shown["prompt_ids"]) == ("why?", [1, 7])
    assert shown["extras"] == {"pixels": [[1.0, "Infinity"]]}
    table = run("groups", "show", "math", "h", url=url)
    assert ["prompt", "why?"] in rows_of(table)
    assert ["prompt_ids", "[1,", "7]"] in rows_of(table)
    prompt = json_of("groups", "show", "math", "g", url=url)["prompt"]
    assert prompt == [{"role": "user", "content": "how\x1b many?"}]
    assert "how\\u001b many?" in run("groups", "show", "math", "g", url=url).stdout


def test_a_uid_that_is_the_id_of_another(filled_url: str) -> None:
    first = json_of("groups", "show", "math", "uid-0", url=filled_url)["group"]["id"]
    beyond = "9" * 40  # no id is as large

    async def fill() -> None:
        async with rdb.Store.open(filled_url) as store:
            one = rdb.Episode(prompt_ids=[1], response_ids=[2])
            await (await store.buffer("math")).put(
                rdb.EpisodeGroup("t", [one], group_uid=uid)
                for uid in (str(first), "uid:a", "77", beyond)
            )

    asyncio.run(fill())
    for name, uid in {
        str(first): "uid-0",
        f"uid:{first}": str(first),
        "uid:a": "uid:a",
        "uid:uid:a": "uid:a",
        "77": "77",
        beyond: beyond,
    }.items():
        assert json_of("groups", "show", "math", name, url=filled_url)["group"]["group_uid"] == uid
    outcome = run("groups", "list", "math", "--after", 77, url=filled_url)
    assert outcome.stderr == "error: no such groups in this buffer: 77\n"
    outcome = run("groups", "show", "math", "chess", url=filled_url)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr == "error: no such groups in this buffer: chess\n"


def test_extras_that_are_stored_again_for_shared_tokens(sqlite_url: str) -> None:
    """The episodes have other values from token 10 of their prompt on."""
    first, second = np.ones((2, 50, 4), np.uint8)
    second[10:] = 2
    episodes = [
        rdb.Episode(prompt_ids=range(40), response_ids=[i] * 10, token_extras={"experts": values})
        for i, values in enumerate((first, second))
    ]

    async def fill() -> None:
        async with rdb.Store.open(sqlite_url) as store:
            buffer = await store.buffer("math")
            await buffer.put(rdb.EpisodeGroup("t", episodes, group_uid="g"))

    asyncio.run(fill())
    shown = json_of("groups", "show", "math", "g", url=sqlite_url)
    assert shown["repeated_bytes"] == {"experts": 30 * 4}
