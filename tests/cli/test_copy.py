"""`replaydb copy`, `backup` and `restore` from the command line."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from operations.conftest import populate
from operations.test_copy import contents
from replaydb import Store
from support.command import run
from support.engines import both_engines
from support.groups import long_group


async def put(url: str, count: int, num_tokens: int) -> None:
    async with Store.open(url) as store:
        await (await store.buffer("math")).put(
            [long_group(f"large-{i}", num_tokens) for i in range(count)]
        )


@both_engines
def test_a_copy_is_prepared_and_finished(url: str, tmp_path: Path) -> None:
    asyncio.run(populate(url))
    (tmp_path / "payloads").mkdir()
    target = f"sqlite:///{tmp_path / 'copy.db'}"
    location = ("--payloads", (tmp_path / "payloads").as_uri())
    prepared = run("copy", url, target, *location, "--prepare", url="")
    assert prepared.exit_code == 0, prepared.output
    assert re.search(r"50 groups: wrote \d+ rows and 50 payloads \(45 kB\)", prepared.output)
    assert "not finished" in run("buffers", "list", url=target).output
    done = run("copy", url, target, *location, url="")
    assert done.exit_code == 0, done.output
    assert "50 groups: wrote 0 rows and 0 payloads (0 bytes)" in done.output
    assert "verified: compared all rows and sequences, read back 50 payloads" in done.output
    again = run("copy", url, target, url="")
    assert again.exit_code == 1
    assert "expected an empty database" in again.output


@both_engines
def test_a_backup_is_restored(
    url: str, empty_postgresql_url: str, empty_sqlite_url: str, tmp_path: Path
) -> None:
    asyncio.run(populate(url))
    file = str(tmp_path / "backup.db")
    assert run("backup", file, url=url).exit_code == 0
    again = run("backup", file, url=url)
    assert again.exit_code == 1
    assert "name a new file, or delete this one first" in " ".join(again.output.split())
    missing = run("restore", str(tmp_path / "none.db"), url=empty_sqlite_url)
    assert missing.exit_code == 1
    assert "no such file" in missing.output
    target = empty_postgresql_url if url.startswith("sqlite") else empty_sqlite_url
    restored = run("restore", file, url=target)
    assert restored.exit_code == 0, restored.output
    assert asyncio.run(contents(target)) == asyncio.run(contents(url))


def test_special_characters_in_a_file_name(sqlite_url: str, tmp_path: Path) -> None:
    """A path is not a URL."""
    asyncio.run(put(sqlite_url, 1, 10))
    file = tmp_path / "a%20b?c#d\ne.db"
    done = run("backup", file, url=sqlite_url)
    assert done.exit_code == 0, done.output
    assert file.exists()
    target = f"sqlite:///{tmp_path / 'restored.db'}"
    assert run("restore", file, url=target).exit_code == 0
    assert asyncio.run(contents(target)) == asyncio.run(contents(sqlite_url))


#: The command with small steps. Ctrl-C works even if the process that runs the tests ignores it.
IN_SMALL_STEPS = """
import signal
from replaydb.cli import app
from replaydb.operations import reading
signal.signal(signal.SIGINT, signal.default_int_handler)
reading.BATCH_BYTES = 1 << 20
app()
"""


@pytest.mark.parametrize(
    ("engine_name", "how"),
    [
        ("sqlite", signal.SIGINT),
        ("postgresql", signal.SIGKILL),
        pytest.param("sqlite", signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param("postgresql", signal.SIGINT, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_copy_resumes(url: str, tmp_path: Path, how: signal.Signals) -> None:
    asyncio.run(populate(url))
    asyncio.run(put(url, 48, 120_000))
    file = tmp_path / "copy.db"
    command = [sys.executable, "-c", IN_SMALL_STEPS, "copy", url, f"sqlite:///{file}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (file.exists() and file.stat().st_size > 8 << 20):  # some payloads are written
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(how)
    _, error = process.communicate(timeout=60)
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert error == "interrupted; rerun the same command to resume\n"
    assert "not finished" in run("buffers", "list", url=f"sqlite:///{file}").output
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    [copied] = re.findall(r"rows and (\d+) payloads", done.stdout)
    assert int(copied) < 98
    assert asyncio.run(contents(f"sqlite:///{file}")) == asyncio.run(contents(url))
