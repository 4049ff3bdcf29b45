"""Smoke test of an installation, with only replaydb and its dependencies.

    python smoke.py URL [NAME==VERSION ...]

`python -m lowest` runs it in an environment with the lowest allowed versions and a database without
tables. It uses every dependency at least once: migrations and the command line
(alembic, typer, rich), both engines' drivers, payloads (numpy, xxhash, zstandard), tables, files
and reports (pyarrow, plotly), the web UI (jinja2, rapidfuzz, starlette, uvicorn), waiting,
cancellation and the blocking facade.
"""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

import pyarrow.parquet as pq
from typer.testing import CliRunner

import replaydb as rdb
from replaydb import analysis, blocking
from replaydb.cli import app
from replaydb.packs import PayloadStore


def group(uid: str, reward: float = 1.0) -> rdb.EpisodeGroup:
    row = rdb.Episode(
        prompt_ids=[1, 2], response_ids=[3, 4, 5], logprobs=[-0.5, -0.25, -1.0], reward=reward,
        policy_version=0, text=uid,
    )  # fmt: skip
    return rdb.EpisodeGroup("gsm8k", [row], group_uid=uid, tags={"level": "hard"})


def command(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


async def use(url: str) -> None:
    async with rdb.Store.open(url, run="smoke") as store:
        buffer = await store.buffer("math", compression="zstd")
        ids = await buffer.put([group(f"{i}", reward=i % 2) for i in range(8)], cursor={"at": {}})
        assert await buffer.count(where=rdb.col.reward_mean > 0.5) == 4
        batch = await buffer.sample(4, rdb.Prioritized(beta=0.4), step=0)
        assert batch.padded(pad_token_id=0).token_ids.tolist() == [[1, 2, 3, 4, 5]] * 4
        await buffer.update_priorities(batch.ids, [2.0] * 4)
        async with buffer.lease(2, rdb.Fifo(), ttl=60) as lease:
            assert lease.batch.ids == ids[:2]
        found = (await buffer.get(ids[2:3]))[0]
        assert found.episodes[0].token_ids.tolist() == [1, 2, 3, 4, 5]
        waiting = asyncio.create_task(buffer.sample(100, timeout=60))
        put = asyncio.create_task(buffer.put([group(f"more-{i}") for i in range(100)]))
        assert len((await waiting).ids) == 100
        await put
        cancelled = asyncio.create_task(buffer.sample(1000, timeout=60))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        try:
            await buffer.put(group("0"))
        except rdb.DuplicateGroupError:
            pass
        else:
            raise AssertionError("a uid was stored twice")


def main(url: str, *pins: str) -> None:
    for name, wanted in (pin.split("==") for pin in pins):
        found = version(name)
        assert f"{found}.".startswith(f"{wanted}."), f"{name} is {found}, not {wanted}"
    PayloadStore("s3://bucket/prefix", "0" * 32)
    command("db", "upgrade", "--url", url)
    command("db", "check", "--url", url)
    asyncio.run(use(url))
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        assert len(buffer.sample(100).ids) == 100
    inspect_store(url)
    browse(url)
    with tempfile.TemporaryDirectory() as folder:
        copy_and_export(url, folder)
    command("db", "downgrade", "base", "--yes", "--url", url)


def inspect_store(url: str) -> None:
    """Read the store by the command line and as tables."""
    for noun in ("buffers", "runs"):
        assert "smoke" in command(noun, "list", "--url", url) or noun == "buffers"
    for noun in ("groups", "episodes", "draws", "leases"):
        command(noun, "list", "math", "--url", url)
    assert "gsm8k" in command("buffers", "show", "math", "--url", url)
    assert "gsm8k" in command("watch", "math", "--once", "--url", url)
    assert "--url" in command("groups", "list", "--help")
    table = analysis.tokens(url, buffer="math", where=rdb.col.group_uid == "1").to_table()
    assert table["token_ids"].to_pylist() == [[1, 2, 3, 4, 5]]
    assert analysis.draws(url).to_table().num_rows > 100


def browse(url: str) -> None:
    """Serve the web UI, fetch some pages and a download, and stop it by SIGINT."""
    ui = [sys.executable, "-P", "-m", "replaydb.cli", "ui", "--port", "0", "--url", url]
    with subprocess.Popen(ui, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        root = process.stdout.readline().strip()

        def page(address: str) -> bytes:
            with urlopen(root + address, timeout=60) as answer:  # noqa: S310
                return bytes(answer.read())

        try:
            overview = page("?buffer=math").decode()
            assert "gsm8k" in overview
            assert "Reward by policy version" in overview
            assert b"completed" in page("groups?buffer=math&where=reward_mean+%3E+0.5")
            assert b"-0.25" in page("episode?buffer=math&group=1&position=0&show=tokens")
            assert b"No differences" in page("compare?buffer=math&group=1&a=0&b=0&by=tokens")
            assert b"--fore" in page("static/ui.css")
            rows = pq.read_table(io.BytesIO(page("groups.parquet?buffer=math")))
            assert rows.num_rows == 108
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def copy_and_export(url: str, folder: str) -> None:
    """Create files, copies and a report of the store."""
    copied = f"sqlite:///{folder}/copy.db"
    command("verify", "--url", url)
    command("export", f"{folder}/files", "--url", url)
    imported = f"sqlite:///{folder}/imported.db"
    command("db", "upgrade", "--url", imported)
    command("import", f"{folder}/files", "--create", "--url", imported)
    assert analysis.groups(imported).to_table().num_rows == 108
    command("copy", url, copied)
    assert analysis.groups(copied).to_table() == analysis.groups(url).to_table()
    command("vacuum", "--url", copied)
    command("report", "math", "-o", f"{folder}/report.html", "--url", url)
    assert "gsm8k" in Path(folder, "report.html").read_text()


if __name__ == "__main__":
    main(*sys.argv[1:])
