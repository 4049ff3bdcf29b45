"""`replaydb runs`: tables and JSON."""

from __future__ import annotations

from support.command import json_of, rows_of, run


def test_runs_are_listed(filled_url: str) -> None:
    listed = json_of("runs", "list", url=filled_url)
    assert [(one["name"], one["lineage"]) for one in listed] == [
        ("second", "first"),
        ("first", "first"),
    ]
    oldest = json_of("runs", "list", "--sort", "name", "--ascending", url=filled_url)
    assert [one["name"] for one in oldest] == ["first", "second"]
    assert run("runs", "list", "--sort", "metadata", url=filled_url).exit_code == 2
    assert len(json_of("runs", "list", "--lineage", "first", url=filled_url)) == 2
    assert json_of("runs", "list", "--lineage", "second", url=filled_url) == []
    table = rows_of(run("runs", "list", "--limit", 1, url=filled_url))
    assert table[1][:2] == ["second", "first"]
    assert table[2] == ["1", "more", "rows:", "--limit", "2"]


def test_a_run_is_shown(filled_url: str) -> None:
    shown = json_of("runs", "show", "first", url=filled_url)
    assert shown["run"]["metadata"] == {"lr": 0.5}
    (share,) = shown["buffers"]
    assert (share["buffer_name"], share["num_groups"], share["last_step"]) == ("math", 5, 7)
    table = rows_of(run("runs", "show", "second", url=filled_url))
    assert ["lineage", "first"] in table
    assert ["math", "1", "8"] in [[row[0], row[1], row[3]] for row in table if len(row) > 4]


def test_no_such_run(filled_url: str) -> None:
    outcome = run("runs", "show", "frist", url=filled_url)
    assert outcome.exit_code == 1
    assert "last runs: 'second', 'first'" in outcome.stderr
