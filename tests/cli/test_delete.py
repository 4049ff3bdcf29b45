"""`replaydb prune` of history, and `delete`: they report what they will delete."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replaydb import Buffer, Store, operations
from support.command import json_of, rows_of, run
from support.engines import both_engines


def test_history_is_pruned_with_remove(filled_url: str) -> None:
    dry_run = run("prune", "--groups-days", 0, "--status", "failed", url=filled_url)
    assert dry_run.exit_code == 0, dry_run.output
    assert dry_run.output.startswith("to delete: 1 groups, ")
    assert dry_run.output.endswith("dry run, nothing deleted; use --remove to delete\n")
    words = ("prune", "--groups-days", 0, "--draws-days", 0, "--run", "first", "--remove")
    both = run(*words, "--status", "failed", "--buffer", "math", url=filled_url)
    assert both.exit_code == 0, both.output
    assert "deleted: 1 groups" in both.output
    assert both.output.endswith("deleted: 0 groups, 0 bytes; 1 draws\n")
    assert len(json_of("groups", "list", "math", url=filled_url)) == 5
    assert [one["step"] for one in json_of("draws", "list", "math", url=filled_url)] == [8]
    young = run("prune", "--groups-days", 1, "--status", "completed", url=filled_url)
    assert "to delete: 0 groups" in young.output
    names = [one["name"] for one in json_of("runs", "list", url=filled_url)]
    assert names == ["second", "first"]  # pruning registers no run


def test_prune_requires_explicit_options(filled_url: str) -> None:
    for words in (
        ("--run", "first"),
        ("--status", "failed"),
        ("--where", "id > 1"),
        ("--draws-days", 1, "--status", "x"),
    ):
        assert run("prune", *words, url=filled_url).exit_code == 2
    refused = run("prune", "--draws-days", 1, "--status", "failed", url=filled_url)
    assert (refused.exit_code, "--groups-days" in refused.stderr) == (2, True)
    refused = run("prune", "--draws-days", 1, "--where", "id > 1", url=filled_url)
    assert (refused.exit_code, "required with --where" in refused.stderr) == (2, True)
    leased = run("prune", "--groups-days", 0, "--status", "leased", url=filled_url)
    assert (leased.exit_code, "other than 'leased'" in leased.stderr) == (1, True)
    for words in (("--groups-days", 0, "--buffer", "maths"), ("--draws-days", 0, "--run", "frist")):
        for also in ((), ("--remove",)):
            unknown = run("prune", *words, *also, url=filled_url)
            assert unknown.exit_code == 1
            assert words[-1] in unknown.stderr
            assert "math" in unknown.stderr or "'second', 'first'" in unknown.stderr


def test_groups_are_deleted_by_id_and_uid(filled_url: str) -> None:
    ids = {one["group_uid"]: one["id"] for one in json_of("groups", "list", "math", url=filled_url)}
    words = ("groups", "delete", "math", "uid-1", ids["uid-1"], ids["uid-5"])
    unconfirmed = run(*words, url=filled_url)  # no answer
    assert unconfirmed.exit_code == 1
    assert "2 groups, " in unconfirmed.output
    assert "1 of them are leased" in unconfirmed.output
    assert len(json_of("groups", "list", "math", url=filled_url)) == 6
    assert run(*words, "--yes", url=filled_url).output == "deleted 2 groups\n"
    assert len(json_of("groups", "list", "math", url=filled_url)) == 4
    missing = run(*words, "--yes", url=filled_url)
    assert (missing.exit_code, "uid-1" in missing.stderr) == (1, True)


def test_claimed_groups_are_counted(filled_url: str) -> None:
    async def claim() -> None:
        async with Store.open(filled_url) as store:
            buffer = await store.buffer("math", create=False)
            for uid in ("claimed", "open"):
                await buffer.open_group("even", uid, 2)
            await buffer.claim(2, ttl=600)

    asyncio.run(claim())
    words = ("groups", "delete", "math", "--where", "group_status == 'pending'")
    assert "2 groups, 0 bytes; 1 of them are claimed" in run(*words, url=filled_url).output


@both_engines
def test_groups_are_deleted_by_expression(filled_url: str) -> None:
    def left() -> list[str]:
        return [one["group_uid"] for one in json_of("groups", "list", "math", url=filled_url)]

    where = ("--where", "task_name == 'even' and reward_mean > 1.5")
    unconfirmed = run("groups", "delete", "math", *where, url=filled_url)
    assert (unconfirmed.exit_code, "2 groups, " in unconfirmed.output) == (1, True)
    assert len(left()) == 6
    named = run("groups", "delete", "math", "uid-1", "uid-4", *where, "--yes", url=filled_url)
    assert named.output == "deleted 1 groups\n"
    assert left() == [f"uid-{i}" for i in (5, 3, 2, 1, 0)]
    assert run("groups", "delete", "math", *where, "--yes", url=filled_url).exit_code == 0
    assert left() == [f"uid-{i}" for i in (5, 3, 1, 0)]
    without = run("groups", "delete", "math", "--yes", url=filled_url)
    assert (without.exit_code, "--where" in without.stderr) == (2, True)
    pruned = run(
        *("prune", "--groups-days", 0, "--status", "failed", "--status", "completed", "--remove"),
        *("--where", "prompt_uid == 'p0'"),
        url=filled_url,
    )
    assert "deleted: 2 groups" in pruned.output, (pruned.output, left())
    assert left() == ["uid-5", "uid-3"]


def test_listing_a_buffer_that_is_deleted_meanwhile_is_an_error(
    filled_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Store.buffer

    async def then_deleted(self: Store, name: str, **options: Any) -> Buffer:
        monkeypatch.undo()
        found = await opened(self, name, **options)
        async with Store.open(filled_url) as other:
            await operations.delete_buffer(other, name)
        return found

    monkeypatch.setattr(Store, "buffer", then_deleted)
    result = run("leases", "list", "math", url=filled_url)
    assert result.exit_code == 1
    assert "there is no buffer named 'math'" in result.stderr


def test_a_run_is_deleted(filled_url: str) -> None:
    held = run("runs", "delete", "second", "--yes", url=filled_url)
    assert held.exit_code == 1
    assert "held" in held.stderr or "leased" in held.stderr
    (lease,) = json_of("leases", "list", "math", url=filled_url)
    run("leases", "revoke", "math", lease["id"], url=filled_url)
    unconfirmed = run("runs", "delete", "second", url=filled_url)
    assert "run second: 1 groups, " in unconfirmed.output
    done = run("runs", "delete", "second", "--yes", url=filled_url)
    assert done.output.startswith("deleted: 1 groups, "), done.output
    assert done.output.endswith("; 1 draws\n")
    assert "second" not in [one["name"] for one in json_of("runs", "list", url=filled_url)]
    assert run("runs", "delete", "second", "--yes", url=filled_url).exit_code == 1


def test_a_buffer_is_deleted(filled_url: str) -> None:
    unconfirmed = run("buffers", "delete", "math", url=filled_url)
    assert "buffer math: 6 groups, " in unconfirmed.output
    assert len(rows_of(run("buffers", "list", url=filled_url))) == 3
    done = run("buffers", "delete", "math", "--yes", url=filled_url)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("deleted: 6 groups, ")
    assert [one["name"] for one in json_of("buffers", "list", url=filled_url)] == ["code"]
    gone = run("buffers", "delete", "math", "--yes", url=filled_url)
    assert (gone.exit_code, "code" in gone.stderr) == (1, True)
