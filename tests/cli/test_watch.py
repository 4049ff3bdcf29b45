"""`replaydb watch`: its output, outages and the terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console, RenderableType

import replaydb as rdb
from replaydb.cli.watch import poll
from replaydb.domain.monitoring import BufferSnapshot, empty, followed, overdue, waits
from replaydb.domain.settings import RateLimit
from support.command import rows_of, run
from support.engines import both_engines
from support.groups import group, groups


@both_engines
def test_one_measurement(filled_url: str) -> None:
    result = run("watch", "math", "--once", "--interval", "0.1", url=filled_url)
    headline, *table = rows_of(result)
    assert " ".join(headline).startswith("math · policy version 0 · 6 groups · 60 tokens · ")
    # Put, drawn; completed, pending, leased, other; reward; staleness.
    assert ["even", "0", "0", "3", "0", "0", "0", "2.5", "-4", "-2", "0", "-"] in table
    assert ["odd", "0", "0", "1", "0", "1", "1", "1.5", "-1", "-1", "-1", "-"] in table
    assert ["trainer-0", "8", "1"] in [row[1:4] for row in table]


async def test_rates(buffer: rdb.Buffer) -> None:
    async def snapshot(at: float) -> BufferSnapshot:
        return BufferSnapshot(await buffer.stats(), (), at)

    await buffer.put(groups(2, "old"))
    first = await snapshot(10.0)
    assert followed(deque(), first)["old"].puts is None
    await buffer.put(groups(3, "new"))
    await buffer.sample(1, tasks="old")
    await buffer.sample(1, tasks="old")
    found = followed(deque([first]), await snapshot(12.0))
    assert (found["old"].puts, found["old"].draws) == (0.0, 1.0)
    assert (found["new"].puts, found["new"].draws) == (1.5, 0.0)
    snapshots: deque[BufferSnapshot] = deque()
    for at, puts in ((0.0, None), (20.0, 0.0), (51.0, None), (52.0, 0.0)):  # no snapshot for long
        assert followed(snapshots, await snapshot(at))["old"].puts == puts
    assert [one.at for one in snapshots] == [51.0, 52.0]


@pytest.mark.parametrize(
    "limit", [rdb.MinSize(3), rdb.Queue(2), rdb.SamplesPerInsert(2.0, 2, 3.0)], ids=repr
)
async def test_blocked_calls_are_reported(store: rdb.Store, limit: RateLimit) -> None:
    buffer = await store.buffer("math", rate_limit=limit)
    seen = set()
    for number in range(8):
        shown = " ".join(waits(await buffer.stats()))
        put_waits, draw_waits = "puts wait" in shown, "draws wait" in shown
        seen |= {("put", put_waits), ("draw", draw_waits)}
        try:
            await buffer.put(groups(1, f"t{number}"), timeout=0)
            assert not put_waits, shown
        except rdb.RateLimitedError:
            assert put_waits, shown
        shown = " ".join(waits(await buffer.stats()))
        if number % 3:
            try:
                await buffer.sample(1, timeout=0)
                assert "draws wait" not in shown
            except rdb.RateLimitedError:
                assert "draws wait" in shown
    assert {name for name, waited in seen if waited}


async def test_full_and_empty_tasks_are_reported(store: rdb.Store) -> None:
    buffer = await store.buffer(
        "math", capacity=rdb.Capacity(groups=5), task_capacity={"a": rdb.Capacity(groups=2)}
    )
    await buffer.put(groups(2, "a"))
    await buffer.put(groups(1, "b"))
    await buffer.put(groups(2, "c"))
    assert list(waits(await buffer.stats())) == []  # groups can be evicted
    async with buffer.lease(2, ttl=60, tasks="a"):
        stats = await buffer.stats()
        full = "puts wait: task a is full, 2 of 2 groups, and all of it leased or pending"
        assert list(waits(stats)) == [full]
        with pytest.raises(rdb.BufferFullError):
            await buffer.put([group("more", "a")], timeout=0)
        assert empty(stats) == []
    assert empty(await buffer.stats()) == ["a"]


async def test_expired_leases_do_not_block(store: rdb.Store) -> None:
    buffer = await store.buffer("math", rate_limit=rdb.MinSize(2))
    await buffer.put(groups(2))
    await buffer.lease(1, ttl=0.01)
    await asyncio.sleep(0.02)
    stats, leases = await buffer.stats(), await buffer.leases(expired=True)
    assert list(waits(stats, overdue(leases, datetime.now(UTC)))) == []
    assert list(waits(stats, overdue(leases, leases[0].acquired_at)))  # before it expired
    assert len(await buffer.sample(1, timeout=0)) == 1


async def test_watch_survives_an_outage(
    buffer: rdb.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last snapshot is shown until the database is available again."""
    read = buffer.stats
    answers = [None, rdb.DatabaseUnavailableError("gone \x1b[2J"), None, KeyboardInterrupt()]

    async def stats() -> rdb.BufferStats:
        if (error := answers.pop(0)) is not None:
            raise error
        return await read()

    monkeypatch.setattr(buffer, "stats", stats)
    shown: list[str] = []

    def show(what: RenderableType) -> None:
        out = StringIO()
        Console(file=out, width=200).print(what)
        shown.append(out.getvalue())

    with pytest.raises(KeyboardInterrupt):
        await poll(buffer, 0.001, None, show)
    expected = r"showing the last snapshot: gone \x1b[2J"
    assert [expected in one for one in shown] == [False, True, False]
    assert all(one.startswith(buffer.name) for one in shown)


def test_ctrl_c_restores_the_terminal(filled_url: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "replaydb.cli", "watch", "math", "--interval", "0.1"],
        env={**os.environ, "REPLAYDB_URL": filled_url, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: _own(theirs),
    )
    os.close(theirs)
    shown = b""
    while shown.count("math · policy".encode()) < 2:
        shown += os.read(ours, 4096)
    os.write(ours, b"\x03")
    with suppress(OSError):  # how a pty ends
        while more := os.read(ours, 4096):
            shown += more
    assert process.wait(60) == 0
    os.close(ours)
    assert b"Traceback" not in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0  # the cursor is visible again


def _own(terminal: int) -> None:
    """Make it the controlling terminal, so that Ctrl-C sends a signal."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # background processes ignore it
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
