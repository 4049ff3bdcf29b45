"""`replaydb prune` of packs, and `replaydb db relocate`."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import pytest

from replaydb import Store
from support.command import run
from support.groups import groups
from support.users import without_root


@pytest.fixture
def folder(url: str, tmp_path: Path) -> Path:
    """The payloads of a store with two groups, and an orphan of 1,500 bytes, two days old."""
    made = tmp_path / "payloads"
    made.mkdir()

    async def put() -> None:
        async with Store.open(url, payloads=made.as_uri()) as store:
            await (await store.buffer("math")).put(groups(2))

    asyncio.run(put())
    (own,) = made.iterdir()
    stray = own / f"{uuid4().hex}.pack"
    stray.write_bytes(bytes(1500))
    long_ago = time.time() - 2 * 86_400
    os.utime(stray, (long_ago, long_ago))
    return made


def test_prune_is_a_dry_run_unless_remove_is_given(url: str, folder: Path) -> None:
    before = set(folder.glob("*/*"))
    dry_run = run("prune", url=url)
    assert dry_run.exit_code == 0, dry_run.output
    assert "2 packs" in dry_run.output
    assert "1 orphaned: to remove, 1.5 kB" in dry_run.output
    assert dry_run.output.endswith("dry run, nothing removed; use --remove to free 1.5 kB\n")
    assert set(folder.glob("*/*")) == before
    removed = run("prune", "--remove", "--min-hours", "24", url=url)
    assert "1 orphaned: removed, 1.5 kB" in removed.output
    assert len(before - set(folder.glob("*/*"))) == 1
    assert "0 orphaned" in run("prune", url=url).output
    assert run("prune", "--min-hours", "1", url=url).exit_code == 2


@pytest.mark.parametrize("engine_name", ["sqlite"])
def test_a_dry_run_of_a_copy_says_that_it_may_not_remove(
    url: str, folder: Path, tmp_path: Path
) -> None:
    copy = f"sqlite:///{shutil.copy(tmp_path / 'replay.db', tmp_path / 'copy.db')}"
    dry_run, removed = run("prune", url=copy), run("prune", "--remove", url=copy)
    assert (dry_run.exit_code, removed.exit_code) == (0, 1)
    assert "1 orphaned: to remove, 1.5 kB" in dry_run.output
    last = dry_run.output.splitlines()[-1]
    assert "run `replaydb db adopt-payloads`" in last
    reason = removed.stderr.removeprefix("error: ").strip()
    assert last == f"dry run, nothing removed; --remove is refused: {reason}"
    assert run("db", "adopt-payloads", "--yes", url=copy).exit_code == 0
    assert "refused" not in run("prune", url=copy).output
    assert "refused" in run("prune", url=url).output


def test_a_dry_run_on_a_read_only_store() -> None:
    # The folders of pytest are private to the user that runs it.
    with tempfile.TemporaryDirectory(prefix="replaydb-closed-") as name:
        folder = Path(name)
        (folder / "payloads").mkdir()

        async def put() -> None:
            url, payloads = f"sqlite:///{folder}/replay.db", (folder / "payloads").as_uri()
            async with Store.open(url, payloads=payloads) as store:
                await (await store.buffer("math")).put(groups(2))

        asyncio.run(put())
        for each, mode in ((folder / "replay.db", 0o444), (folder, 0o555)):
            each.chmod(mode)
        with without_root():
            dry_run = run("prune", url=f"sqlite:///{folder}/replay.db")
        folder.chmod(0o755)
    assert dry_run.exit_code == 0, dry_run.output
    assert "1 packs" in dry_run.output


def test_a_store_without_packs_has_nothing_to_prune(url: str) -> None:
    for arguments in (("prune",), ("db", "relocate", "file:///tmp")):
        refused = run(*arguments, url=url)
        assert refused.exit_code == 1
        assert "outside the database" in refused.stderr


def test_a_moved_payload_store_is_recorded(url: str, folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "elsewhere")
    wrong = run("db", "relocate", tmp_path.as_uri(), url=url)
    assert (wrong.exit_code, "replaydb-store is missing" in wrong.stderr) == (1, True)
    assert "replaydb-store is missing" in run("prune", url=url).stderr
    assert run("db", "relocate", moved.as_uri(), url=url).exit_code == 0
    assert "2 packs" in run("prune", url=url).output
