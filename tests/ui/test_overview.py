"""Overview page, list of buffers, shared cache and the demo."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import pytest

import replaydb as rdb
from replaydb import Buffer, BufferStats, Store
from replaydb.ui import demo
from replaydb.ui.shared import SharedCache
from replaydb.ui.views import learning, overview
from support.clock import Clock
from support.command import run
from support.engines import both_engines
from support.groups import group
from support.pages import read

HOSTILE = '<img src=x onerror=alert(1)>"\u202e'
SHOWN = '<img src=x onerror=alert(1)>"\\u202e'


def cells(page: str, caption: str) -> dict[str, list[str]]:
    """Return the rows of a table by their first cell."""
    table = page.split(f"<caption>{caption}")[1].split("</table>")[0]
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", table.split("<tbody>")[1], re.DOTALL):
        texts = re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)
        first, *others = [unescape(re.sub(r"<[^>]*>", "", it)).strip() for it in texts]
        found[first] = others
    return found


def plots(page: str) -> dict[str, list[dict[str, Any]]]:
    """Return the Plotly traces of the charts, by title."""
    found = re.findall(r"<figcaption>(.*?)</figcaption>.*?<script [^>]*>(.*?)</script>", page, re.S)
    return {title: json.loads(data)["data"] for title, data in found}


async def put_versions(buffer: Buffer) -> None:
    """Put five groups of each of four policy versions. Their reward is the version."""
    for version in range(4):
        await buffer.advance_policy(version)
        await buffer.put(group(rewards=[version, version], version=version) for _ in range(5))


@both_engines
async def test_numbers_are_those_of_the_api(store: Store, browser: httpx.AsyncClient) -> None:
    buffer = await store.buffer("math", max_times_sampled=1, max_staleness={"gsm8k": 9})
    await put_versions(buffer)
    await buffer.put([group(task=HOSTILE), group(task=HOSTILE, status="failed")])
    await buffer.sample(1, tasks=HOSTILE, step=6)
    await buffer.sample(4, rdb.Fifo(), tasks="gsm8k", step=1007)
    lease = await buffer.lease(2, rdb.Fifo(), tasks="gsm8k", ttl=600, step=8, owner=HOSTILE)
    page = (await browser.get("/")).text
    assert "<img src=x" not in page
    tasks = cells(page, "Groups by task")
    # added, added/s, drawn, drawn/s, completed, pending, leased, other, staleness, limit
    assert tasks["gsm8k"][:10] == ["20", "-", "6", "-", "14", "0", "2", "0", "0 to 2", "9"]
    assert tasks[SHOWN][:8] == ["2", "-", "1", "-", "0", "0", "0", "1"]
    [shown] = cells(page, "Leases, oldest first").items()
    assert (shown[0], shown[1][:3]) == (str(lease.id), [SHOWN, "8", "2"])
    drawn = cells(page, "Recent draws and their outcomes")
    assert {step: (it[0], it[2], it[4]) for step, it in drawn.items()} == {
        "8": ("test", "2", "2 leased"),
        "1007": ("test", "4", "4 sampled"),
        "6": ("test", "1", "1 sampled"),
    }
    empty = f"Tasks without groups to draw (waiting for generation, or finished): {SHOWN}."
    assert empty in unescape(page)
    assert "Blocked" not in page
    assert "step 8</a> <small>2 groups" in page
    # The run is part of the URL: other runs may have the same step.
    assert 'href="./step?buffer=math&amp;step=1007&amp;run=test"' in page
    assert f'href="./step?buffer=math&amp;draw={lease.batch.draw_id}"' in page
    numbers = await buffer.metrics()
    assert f"<dt>put</dt><dd>{numbers['gen/groups']:.0f}" in page
    assert f"<dt>stored</dt><dd>{numbers['buffer/groups']:.0f}" in page
    assert f"<dt>replayed</dt><dd>{numbers['replay/groups']:.0f}" in page
    await lease.ack()


@pytest.mark.parametrize(
    ("lag", "shown"),
    [
        (12.3, "Read from a standby, 12 s behind its primary."),
        (float("inf"), "Read from a standby, which is not connected to a primary."),
        (None, None),
    ],
)
async def test_the_lag_of_a_standby(
    store: Store,
    browser: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    lag: float | None,
    shown: str | None,
) -> None:
    async def replication_lag(self: Store) -> float | None:
        return lag

    monkeypatch.setattr(Store, "replication_lag", replication_lag)
    await store.buffer("math")
    one = (await browser.get("/")).text
    await store.buffer("code")
    several = (await browser.get("/")).text
    for page in (one, several):
        assert re.findall("<p>(Read from [^<]*)</p>", page) == ([shown] if shown else [])


@both_engines
async def test_expired_leases_and_passed_deadlines_are_shown(
    store: Store, buffer: Buffer, browser: httpx.AsyncClient, clock: Clock
) -> None:
    clock.jump(-60)
    await buffer.put([group()])
    late = await buffer.open_group("gsm8k", "late", 2, deadline=30)
    await buffer.open_group("gsm8k", "in time", 2, deadline=600)
    lease = await buffer.lease(1, ttl=30, owner="dead")
    page = (await browser.get("/")).text
    then = "by the next put, draw or update"
    blocked = [
        f"lease {lease.id} of dead has expired: its groups are released {then}",
        f"the deadline of group {late} has passed: it completes or fails {then}",
    ]
    assert re.findall(f"<li>([^<]*{then})</li>", page) == blocked
    assert "<small>1 group, " in page
    assert "No groups to draw" not in page
    assert cells(page, "Leases, oldest first")[str(lease.id)][4].startswith("expired ")
    leased = await browser.get("/group", params={"buffer": "math", "id": lease.batch.ids[0]})
    assert "Leased by <strong>dead</strong>" in leased.text
    await store.buffer("other")
    buffers = cells((await browser.get("/")).text, "Buffers of this store")
    assert (buffers["math"][6], buffers["other"][6]) == ("; ".join(blocked), "-")


@both_engines
async def test_the_reward_trend(
    buffer: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await learning.learning(buffer)).problem == "No groups yet."
    await put_versions(buffer)
    await buffer.put([group(task=HOSTILE, version=3)])
    await buffer.sample(10, rdb.Fifo(), tasks="gsm8k", step=0)
    page = (await browser.get("/")).text
    [rewards, hostile] = plots(page)["Reward by policy version"]
    assert (rewards["x"], rewards["y"]) == ([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])
    assert hostile["name"] == SHOWN.replace("<", "&lt;").replace(">", "&gt;")
    trends = re.findall(r"reward <strong>(.*?)</strong>( <span .*?</span>)?", page)
    assert trends == [("0 → 3", ' <span class="good">↑ rising</span>'), ("0.5 → 0.5", "")]
    outcomes = cells(page, "Statuses of all stored groups, by task")
    assert outcomes["gsm8k"] == ["20", "20", "10", "0"]
    assert learning.Trend(1.0, 0.5, 0.4).direction == "↓ falling"
    assert learning.Trend(1.0, 0.5, 0.6).direction == "level"
    recent = cells(page, "The newest 21 groups")
    assert recent["gsm8k"] == ["20", "1.5", "0", "100.0%", "10"]
    assert recent[SHOWN] == ["1", "0.5", "0.5", "0.0%", "10"]
    assert '"layout": {"showlegend": true' in page
    completed, trained = plots(page)["Staleness"]
    for part in (completed, trained):
        assert sum(part["y"]) == pytest.approx(1)
    assert trained["y"][trained["x"].index("3-4")] == 0.5
    monkeypatch.setattr(learning, "SAMPLED", 7)
    monkeypatch.setattr(learning, "NEWEST", 5)
    found = await learning.learning(buffer)
    assert found.num_sampled in (6, 7, 8)
    assert not found.is_all
    [chart] = [it for it in found.charts if it.title == "Reward by policy version"]
    assert [row[:2] for row in chart.rows] == [["0", 0.0], ["1", 1.0], ["2", 2.0], ["3", 3.0]]
    await buffer.put([group(task="single", rewards=[1.0])])
    assert (await learning.learning(buffer)).recent["single"].zero_variance is None


async def test_versions_are_compared_within_a_lineage_only(
    buffer: Buffer, url: str, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_versions(buffer)
    async with Store.open(url, run="other") as others:
        mine = await others.buffer("math")
        await mine.advance_policy(0, take_over=True)
        await mine.put(group(rewards=[7.0], version=version) for version in range(5))
        await mine.sample(1, rdb.Lifo())
        await mine.delete((await mine.sample(4, rdb.Fifo())).ids[1:])
    page = (await browser.get("/")).text
    [rewards] = plots(page)["Reward by policy version"]
    assert (rewards["x"], rewards["y"]) == ([0, 1, 2, 3, 4], [7.0] * 5)
    assert "The reward chart omits 17 of them, whose policy versions belong to another" in page
    completed, trained = plots(page)["Staleness"]
    shown = completed["x"][-1], completed["y"][-1], trained["y"][-1]
    assert shown == ("unknown", 17 / 22, 0.8)
    assert "<dt>trained on (last 2 draws)</dt>" in page
    assert "mean reward 3.5 (2 still stored)" in page
    assert "up to -4, 4 unknown" in page
    monkeypatch.setattr(learning, "MAX_POINTS", 2)
    chart = (await learning.learning(buffer)).charts[0]
    assert [row[0] for row in chart.rows] == ["0 to 2", "3 to 4"]
    assert chart.traces[0]["x"] == [1, 3.5]


async def test_a_sample_contains_tasks_that_alternate(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put([group(task="odd" if i % 2 else "even", version=i) for i in range(48)])
    monkeypatch.setattr(learning, "SAMPLED", 24)
    monkeypatch.setattr(learning, "NEWEST", 5)
    found = await learning.learning(buffer)
    assert not found.is_all
    assert set(found.trends) == {"odd", "even"}
    await buffer.put([group(task=f"task {i}", version=0) for i in range(5)])
    monkeypatch.undo()
    found = await learning.learning(buffer)
    assert len(found.trends) == 7
    assert found.charts[0].title == "Reward by policy version, 6 of 7 tasks"


@both_engines
async def test_few_groups_among_many_of_another_buffer(
    store: Store, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "SAMPLED", 2)
    monkeypatch.setattr(learning, "NEWEST", 4)
    few, many = await store.buffer("few"), await store.buffer("many")
    await few.put([group() for _ in range(3)])
    await many.put([group() for _ in range(50)])
    assert (await learning.learning(few)).is_all
    await few.put(group())
    page = await browser.get("/", params={"buffer": "few"})
    assert "Based on the newest 4 groups" in " ".join(page.text.split())
    for _ in range(20):
        await few.put(group())
        await many.put([group() for _ in range(9)])
    monkeypatch.setattr(learning, "SAMPLED", 24)
    assert (await learning.learning(few)).num_sampled == 24
    monkeypatch.setattr(learning, "SAMPLED", 12)  # most of the tried ids are of the other buffer
    assert 8 <= (await learning.learning(few)).num_sampled <= 16


async def test_live_updates(
    buffer: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(overview.PARTS, "now", replace(overview.PARTS["now"], fresh=0.0))
    page = (await browser.get("/")).text
    [address] = re.findall(r'data-live="(.*?part=now)"', unescape(page))
    before = await browser.get(address)
    await buffer.put([group()])
    after = await browser.get(address, headers={"If-None-Match": before.headers["ETag"]})
    assert after.status_code == 200
    assert "gsm8k" not in before.text
    assert cells(after.text, "Groups by task")["gsm8k"][0] == "1"
    assert float(cells(after.text, "Groups by task")["gsm8k"][1]) > 0
    wrong = await browser.get("/live", params={"buffer": "math", "part": "none"})
    assert wrong.status_code == 400


async def test_many_viewers_cost_one_read(
    buffer: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await buffer.put([group()])
    calls = []
    stats = Buffer.stats

    async def counted(self: Buffer, **arguments: bool) -> BufferStats:
        calls.append(arguments)
        return await stats(self, **arguments)

    monkeypatch.setattr(Buffer, "stats", counted)
    for name in ("buffers", "prompts", "count"):  # calls that read all groups
        monkeypatch.delattr(Store if hasattr(Store, name) else Buffer, name)
    for part in overview.PARTS:
        monkeypatch.setitem(overview.PARTS, part, replace(overview.PARTS[part], fresh=3600.0))
    pages = await asyncio.gather(*(browser.get("/") for _ in range(10)))
    assert {page.status_code for page in pages} == {200}
    assert calls == [{"totals": False}]
    again = await browser.get("/live?buffer=math&part=now")
    headers = {"If-None-Match": again.headers["ETag"]}
    same = await browser.get("/live?buffer=math&part=now", headers=headers)
    assert (same.status_code, same.text) == (304, "")


async def test_a_cancelled_caller_does_not_cancel_the_shared_computation() -> None:
    calls, may_finish = [], asyncio.Event()

    async def compute() -> str:
        calls.append(1)
        await may_finish.wait()
        if len(calls) == 1:
            raise rdb.DatabaseUnavailableError("down")
        return "up"

    async with SharedCache() as cache:
        first, second = (asyncio.create_task(cache.get("a", 60, compute)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        may_finish.set()
        with pytest.raises(rdb.DatabaseUnavailableError):
            await second
        assert await cache.get("a", 60, compute) == "up"  # errors are not cached
        assert await cache.get("a", 60, compute) == "up"
        assert len(calls) == 2
        assert await cache.get("a", -1, compute) == "up"
        assert len(calls) == 3


async def test_several_buffers_are_listed(
    store: Store, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("math", HOSTILE):
        await (await store.buffer(name, rate_limit=rdb.MinSize(3))).put([group()])
    page = (await browser.get("/")).text
    buffers = cells(page, "Buffers of this store")
    assert list(buffers) == [SHOWN, "math"]
    assert buffers["math"][:4] == ["0", "1", "0", "1"]
    assert buffers["math"][6].startswith("draws wait: 1 groups can be drawn")
    assert list(cells(page, "Newest runs")) == ["test"]
    chosen = await browser.get("/", params={"buffer": HOSTILE})
    assert "gsm8k" in cells(chosen.text, "Groups by task")
    monkeypatch.setattr(overview, "MAX_TASKS", 1)  # further buffers are on other pages
    await store.buffer("zzz")
    links = read((await browser.get("/?buffer=math")).text).links
    pages = [await browser.get(links["all 3"])]
    for _ in range(2):
        pages.append(await browser.get(read(pages[-1].text).links["Next buffers"]))
    seen = [next(iter(cells(it.text, "Buffers of this store"))) for it in pages]
    assert seen == [SHOWN, "math", "zzz"]
    last = read(pages[-1].text).links
    assert "Next buffers" not in last
    assert last["Previous buffers"] == "./?first=1"


@contextmanager
def command(*words: str, **env: str) -> Iterator[str]:
    """Run `replaydb ui` in a process until the block ends, then send SIGINT; yields its URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "replaydb.cli", "ui", "--port", "0", *words],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_the_demo_shows_the_store_of_make_demo(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "replaydb-demo-x" / "replaydb.db"
    left.parent.mkdir()
    left.touch()
    served: list[str] = []
    monkeypatch.setattr("replaydb.ui.serve", lambda shown, **_: served.append(shown))
    refused = run("ui", "--url", sqlite_url, "--demo", url="")
    assert (refused.exit_code, served) == (2, [])
    assert "give only one of them" in refused.output
    # REPLAYDB_URL is not about this call.
    assert run("ui", "--demo", url=sqlite_url).exit_code == 0
    assert served == [f"sqlite:///{left}"]


async def test_the_turns_of_the_demo_contain_their_full_context(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "VERSIONS", 2)
    await demo.fill(sqlite_url)
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math")
        ids = [info.id for info in await buffer.find(tasks="tools")]
        merged = rdb.Batch(await buffer.get(ids)).padded(0).merged
    assert merged is not None
    assert (merged.num_turns, merged.num_rows, merged.num_mismatches) == (16, 8, 0)


def test_a_generated_demo_is_served_until_ctrl_c(tmp_path: Path) -> None:
    with command("--demo", REPLAYDB_URL="", TMPDIR=str(tmp_path)) as address:
        with urlopen(f"{address}?secret=1", timeout=60) as answer:  # noqa: S310
            page = answer.read().decode()
        assert "Server" not in answer.headers
        assert set(cells(page, "Groups by task")) == {"sums", "tools"}
        assert plots(page).keys() >= {"Reward by policy version", "Staleness"}
    assert list(tmp_path.iterdir()) == []
