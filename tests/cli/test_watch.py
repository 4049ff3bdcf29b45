"""`replaydb watch`: what it shows, and what it leaves of the terminal."""

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
from replaydb.cli.watch import look_on
from replaydb.looks import Look, empty, followed, overdue, rates, waits
from replaydb.settings import RateLimit
from support.command import rows_of, run
from support.engines import both_engines
from support.groups import group, groups


@both_engines
def test_a_look(filled_url: str) -> None:
    result = run("watch", "math", "--once", "--interval", "0.1", url=filled_url)
    headline, *table = rows_of(result)
    assert " ".join(headline).startswith("math · policy version 0 · 6 groups · 60 tokens · ")
    # Put, drawn; ready, arriving, leased, other; reward; staleness.
    assert ["even", "0", "0", "3", "0", "0", "0", "2.5", "-4", "-2", "0", "-"] in table
    assert ["odd", "0", "0", "1", "0", "1", "1", "1.5", "-1", "-1", "-1", "-"] in table
    assert ["trainer-0", "8", "1"] in [row[1:4] for row in table]


async def test_rates(buffer: rdb.Buffer) -> None:
    async def look(at: float) -> Look:
        return Look(await buffer.stats(), (), at)

    await buffer.put(groups(2, "old"))
    first = await look(10.0)
    assert rates(first, first)["old"].puts is None
    await buffer.put(groups(3, "new"))
    await buffer.sample(1, tasks="old")
    await buffer.sample(1, tasks="old")
    found = rates(first, await look(12.0))
    assert (found["old"].puts, found["old"].draws) == (0.0, 1.0)
    assert (found["new"].puts, found["new"].draws) == (1.5, 0.0)
    looks: deque[Look] = deque()
    for at, puts in ((0.0, None), (20.0, 0.0), (51.0, None), (52.0, 0.0)):  # nobody looked for long
        assert followed(looks, await look(at))["old"].puts == puts
    assert [one.at for one in looks] == [51.0, 52.0]


@pytest.mark.parametrize(
    "limit", [rdb.MinSize(3), rdb.Queue(2), rdb.SamplesPerInsert(2.0, 2, 3.0)], ids=repr
)
async def test_who_waits_is_who_would_be_held_back(store: rdb.Store, limit: RateLimit) -> None:
    buffer = await store.buffer("math", rate_limit=limit)
    seen = set()
    for number in range(8):
        said = " ".join(waits(await buffer.stats()))
        put_waits, draw_waits = "puts wait" in said, "draws wait" in said
        seen |= {("put", put_waits), ("draw", draw_waits)}
        try:
            await buffer.put(groups(1, f"t{number}"), timeout=0)
            assert not put_waits, said
        except rdb.RateLimitedError:
            assert put_waits, said
        said = " ".join(waits(await buffer.stats()))
        if number % 3:
            try:
                await buffer.sample(1, timeout=0)
                assert "draws wait" not in said
            except rdb.RateLimitedError:
                assert "draws wait" in said
    assert {name for name, waited in seen if waited}


async def test_what_is_full_or_empty(store: rdb.Store) -> None:
    buffer = await store.buffer(
        "math", capacity=rdb.Capacity(groups=5), task_capacity={"a": rdb.Capacity(groups=2)}
    )
    await buffer.put(groups(2, "a"))
    await buffer.put(groups(1, "b"))
    await buffer.put(groups(2, "c"))
    assert list(waits(await buffer.stats())) == []  # what can be evicted makes room
    async with buffer.lease(2, ttl=60, tasks="a"):
        stats = await buffer.stats()
        full = "puts wait: task a is full, 2 of 2 groups, and all of it leased or arriving"
        assert list(waits(stats)) == [full]
        with pytest.raises(rdb.BufferFullError):
            await buffer.put([group("more", "a")], timeout=0)
        assert empty(stats) == []
    assert empty(await buffer.stats()) == ["a"]


async def test_what_a_dead_trainer_holds_keeps_nobody_waiting(store: rdb.Store) -> None:
    buffer = await store.buffer("math", rate_limit=rdb.MinSize(2))
    await buffer.put(groups(2))
    await buffer.lease(1, ttl=0.01)
    await asyncio.sleep(0.02)
    stats, leases = await buffer.stats(), await buffer.leases(expired=True)
    assert list(waits(stats, overdue(leases, datetime.now(UTC)))) == []
    assert list(waits(stats, overdue(leases, leases[0].acquired_at)))  # as long as it lived
    assert len(await buffer.sample(1, timeout=0)) == 1


async def test_an_outage_is_said_and_survived(
    buffer: rdb.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before stays, until the database is back."""
    look = buffer.stats
    answers = [None, rdb.DatabaseUnavailableError("gone \x1b[2J"), None, KeyboardInterrupt()]

    async def stats() -> rdb.BufferStats:
        if (error := answers.pop(0)) is not None:
            raise error
        return await look()

    monkeypatch.setattr(buffer, "stats", stats)
    shown: list[str] = []

    def show(what: RenderableType) -> None:
        out = StringIO()
        Console(file=out, width=200).print(what)
        shown.append(out.getvalue())

    with pytest.raises(KeyboardInterrupt):
        await look_on(buffer, 0.001, None, show)
    said = r"as it was before: gone \x1b[2J"
    assert [said in one for one in shown] == [False, True, False]
    assert all(one.startswith(buffer.name) for one in shown)


def test_ctrl_c_leaves_the_terminal_as_it_was(filled_url: str) -> None:
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
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0  # the cursor is there again


def _own(terminal: int) -> None:
    """Make it the controlling terminal, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in the background ignores it
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
