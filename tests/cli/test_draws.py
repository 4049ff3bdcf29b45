"""`replaydb draws`: tables and JSON."""

from __future__ import annotations

import asyncio

import replaydb as rdb
from support.command import json_of, rows_of, run


def test_draws_are_listed(filled_url: str) -> None:
    newest, oldest = json_of("draws", "list", "math", url=filled_url)
    assert (newest["step"], newest["outcomes"]) == (8, ["leased"])
    assert (oldest["step"], oldest["run_name"], len(oldest["group_ids"])) == (7, "first", 2)
    for options in (
        ("--step", 7),
        ("--run", "first"),
        ("--group", oldest["group_ids"][1]),
        ("--after", newest["id"]),
    ):
        assert json_of("draws", "list", "math", *options, url=filled_url) == [oldest]
    table = rows_of(run("draws", "list", "math", "--limit", 1, url=filled_url))
    assert table[1][0] == str(newest["id"])
    assert table[1][-3:] == ["1", "leased", "-5"]
    assert table[2] == f"more rows: --after {newest['id']}".split()


def test_a_draw_is_shown(filled_url: str) -> None:
    _newest, drawn = json_of("draws", "list", "math", url=filled_url)
    assert json_of("draws", "show", "math", drawn["id"], url=filled_url) == drawn
    table = rows_of(run("draws", "show", "math", drawn["id"], url=filled_url))
    assert ["step", "7"] in table
    first, second = (str(one) for one in drawn["group_ids"])
    assert [first, "even", "p0", "0.5", "1", "1", "0", "sampled", "-"] in [r[:9] for r in table]

    async def change() -> None:
        async with rdb.Store.open(filled_url) as store:
            buffer = await store.buffer("math")
            await buffer.delete([int(first)])
            [stored] = await buffer.get([int(second)])
            other = rdb.EpisodeGroup("other", stored.episodes, group_uid=stored.group_uid)
            await buffer.put(other, on_duplicate="replace")

    [before] = [row[1:4] for row in table if row[0] == second]
    asyncio.run(change())
    table = rows_of(run("draws", "show", "math", drawn["id"], url=filled_url))
    assert [first, "deleted", "-", "-"] in [row[:4] for row in table]
    assert [second, *before] in [row[:4] for row in table]  # as drawn


def test_numbers_out_of_range_are_usage_errors(filled_url: str) -> None:
    for words in (
        ("show", "math", "9" * 20),
        ("list", "math", "--after", "9" * 20),
        ("list", "math", "--group", -1),
        ("list", "math", "--limit", "9" * 20),
    ):
        outcome = run("draws", *words, url=filled_url)
        assert outcome.exit_code == 2
        assert "Invalid value for" in outcome.stderr
        assert "before" not in outcome.stderr


def test_a_mistyped_run_is_an_error(filled_url: str) -> None:
    outcome = run("draws", "list", "math", "--run", "frist", url=filled_url)
    assert outcome.exit_code == 1
    assert "last runs: 'second', 'first'" in outcome.stderr


def test_no_such_draw(filled_url: str) -> None:
    for number in (0, 99):
        outcome = run("draws", "show", "math", number, url=filled_url)
        assert outcome.exit_code == 1
        assert outcome.stderr == f"error: no draw {number} is recorded in this buffer\n"
