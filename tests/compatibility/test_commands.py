"""Every command of an older client on tables of newer releases: it works, or says what it needs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from compatibility.clients import BREAKING, NEXT, Client, Outcome
from compatibility.program import BUFFER
from compatibility.test_fleet import check_message, rows_of, succeeded
from support.engines import postgresql_nightly
from support.extras import COMMANDS, SERVING

#: Commands that need to know every table, so that they refuse tables to which a newer release has
#: added some.
NEED_ALL = {"backup", "copy", "db check", "db downgrade", "db roles", "db write-format"}
#: Commands that read nothing but the revision, or another database.
NEED_NOTHING = {"db current", "db history", "restore"}
#: Commands that fail here for another reason: the stores have no packs, and `datasets` is missing.
NOT_HERE = {"db adopt-payloads", "db relocate", "import-dataset", "prune"}
#: Commands that delete, in an order in which each finds something. The others run before, at once.
DELETING = ("leases revoke", "groups delete", "runs delete", "buffers delete")
#: Commands that fail on SQLite in any case.
NOT_ON_SQLITE = {"db roles"}
SHORT = ("copy", "db check", "db current", "db upgrade", "doctor")
LONG = pytest.param(tuple(COMMANDS), marks=pytest.mark.nightly, id="all")


async def outcomes(
    client: Client, names: Sequence[str], url: str, folder: Path
) -> dict[str, Outcome]:
    """Run commands in folders of their own."""
    some = [name for name in names if name not in DELETING]
    found = await asyncio.gather(*(called(client, name, url, folder) for name in some))
    rest = [name for name in DELETING if name in names]
    return dict(zip(some, found, strict=True)) | {
        name: await called(client, name, url, folder) for name in rest
    }


async def called(client: Client, name: str, url: str, folder: Path) -> Outcome:
    """Run a command. Interrupt it when it serves."""
    own = folder / name
    own.mkdir(parents=True)
    row = {"group_uid": "a", "task_name": "math", "token_ids": [1, 2], "loss_mask": [0, 1],
           "buffer_name": "new", "reward": 1.0}  # fmt: skip
    (own / "rows.jsonl").write_text(json.dumps(row))
    (own / "dataset.jsonl").write_text(json.dumps({"prompt_ids": [1], "completion_ids": [2]}))
    words, places = name.split(), {"URL": url, "math": BUFFER, "test": "calls", "other": "calls"}
    for word in COMMANDS[name]:
        word = word.replace("sqlite:///FOLDER", f"sqlite:///{own}").replace("FOLDER", str(own))
        words.append(places.get(word, word))
    if name not in ("copy", "restore"):
        words += ["--url", url]
    if name == "restore":
        await client.run("db", "upgrade", "--url", f"sqlite:///{own / 'backup.db'}")
    async with client.process("command", *words) as process:
        line = await process.read_line() if name in SERVING else ""
        if "http" in line:
            os.kill(process.pid, signal.SIGINT)
            await process.ended()
            return Outcome(0, line)
        ended = await process.ended()
        return Outcome(ended.code, line + ended.output)


@postgresql_nightly
@pytest.mark.parametrize("names", [pytest.param(SHORT, id="short"), LONG])
async def test_commands_of_an_older_client(
    old_url: str,
    engine_name: str,
    names: tuple[str, ...],
    previous: Client,
    additive: Client,
    breaking: Client,
    tmp_path: Path,
) -> None:
    async with previous.process("calls", old_url) as process:
        await process.read()
    healthy = (await previous.run("doctor", "--url", old_url)).code
    failing = {*NOT_HERE, *(NOT_ON_SQLITE if engine_name == "sqlite" else ())}

    await succeeded(additive, "db", "upgrade", "--url", old_url)
    found = await outcomes(previous, names, old_url, tmp_path / "additive")
    for name, outcome in found.items():
        if name in NEED_ALL - failing:
            check_message(outcome, f"the tables are of revision {NEXT} of a newer replaydb")
        elif name in failing:
            check_message(outcome, "")
        elif name == "doctor":
            assert outcome.code == healthy
            assert outcome.output.count(f"the tables are of revision {NEXT} of a newer") == 1
        else:
            assert outcome.code == 0, (name, outcome.output)

    await succeeded(breaking, "db", "upgrade", "--yes", "--url", old_url)
    before = await rows_of(old_url)
    found = await outcomes(previous, names, old_url, tmp_path / "breaking")
    for name, outcome in found.items():
        if name in NEED_NOTHING:
            assert outcome.code == 0, (name, outcome.output)
        elif name in failing:
            check_message(outcome, "")
        elif name == "doctor":
            assert outcome.code == 1
            assert outcome.output.count(f"the store needs replaydb {BREAKING}") == 1
        else:
            check_message(outcome, f"the store needs replaydb {BREAKING} or later")
    assert await rows_of(old_url) == before
