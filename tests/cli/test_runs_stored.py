"""Commands that store nothing of a run add none."""

from __future__ import annotations

from pathlib import Path

import pytest

import replaydb as rdb
from support.command import json_of, run

ROW = (
    '{"group_uid": "%s", "task_name": "t", "token_ids": [1], "loss_mask": [true], "run_name": "r"}'
)


@pytest.mark.parametrize(
    "command",
    [
        "leases revoke math 424242",
        "leases revoke math 1",
        "groups delete math 1 --yes",
        "buffers delete code --yes",
        "runs delete second --yes",
        "prune --groups-days 0 --draws-days 0 --remove",
        "verify --repair",
        "vacuum",
        "import {skipped} --buffer math",
        "import {new} --buffer mth",
    ],
)
def test_a_command_adds_no_run(filled_url: str, tmp_path: Path, command: str) -> None:
    files = {"skipped": "uid-0", "new": "uid-new"}
    for name, uid in files.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{ROW % uid}\n")
    run("leases", "revoke", "math", 1, url=filled_url)
    before = {one["name"] for one in json_of("runs", "list", url=filled_url)}
    done = run(*command.format_map({name: tmp_path / f"{name}.jsonl" for name in files}).split(),
               url=filled_url)  # fmt: skip
    assert done.exit_code == ("mth" in command), done.output
    assert {one["name"] for one in json_of("runs", "list", url=filled_url)} <= before


async def test_calls_that_record_no_run_add_none(url: str) -> None:
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("math", indexed_tags=["level"])
        await buffer.update_settings(max_staleness=3)
        assert await buffer.delete(tasks="t") == 0
        assert await buffer.revoke(1) == []
        assert await store.runs() == []
        await buffer.put(rdb.EpisodeGroup("t", [], status="failed"))
        assert [one.name for one in await store.runs()] == [store.run]
