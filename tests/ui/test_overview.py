"""The first page: what it says is what the calls say, and it follows a training."""

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
from replaydb.ui.shared import Shared
from replaydb.ui.views import learning, overview
from support.clock import Clock
from support.command import run
from support.engines import both_engines
from support.groups import group
from support.pages import read

HOSTILE = '<img src=x onerror=alert(1)>"\u202e'
SHOWN = '<img src=x onerror=alert(1)>"\\u202e'


def cells(page: str, caption: str) -> dict[str, list[str]]:
    """A table, by the first cell of each row."""
    table = page.split(f"<caption>{caption}")[1].split("</table>")[0]
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", table.split("<tbody>")[1], re.DOTALL):
        texts = re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)
        first, *others = [unescape(re.sub(r"<[^>]*>", "", it)).strip() for it in texts]
        found[first] = others
    return found


def plots(page: str) -> dict[str, list[dict[str, Any]]]:
    """What plotly is given, by title."""
    found = re.findall(r"<figcaption>(.*?)</figcaption>.*?<script [^>]*>(.*?)</script>", page, re.S)
    return {title: json.loads(data)["data"] for title, data in found}


async def put_versions(buffer: Buffer) -> None:
    """Five groups of each of four policy versions, whose reward is the version."""
    for version in range(4):
        await buffer.advance_policy(version)
        await buffer.put(group(rewards=[version, version], version=version) for _ in range(5))


@both_engines
async def test_it_says_what_the_calls_say(store: Store, browser: httpx.AsyncClient) -> None:
    buffer = await store.buffer("math", max_times_sampled=1, max_staleness={"gsm8k": 9})
    await put_versions(buffer)
    await buffer.put([group(task=HOSTILE), group(task=HOSTILE, status="failed")])
    await buffer.sample(1, tasks=HOSTILE, step=6)
    await buffer.sample(4, rdb.Fifo(), tasks="gsm8k", step=1007)
    lease = await buffer.lease(2, rdb.Fifo(), tasks="gsm8k", ttl=600, step=8, owner=HOSTILE)
    page = (await browser.get("/")).text
    assert "<img src=x" not in page
    tasks = cells(page, "Groups by task")
    # put, put/s, drawn, drawn/s, ready, arriving, leased, others, staleness, limit
    assert tasks["gsm8k"][:10] == ["20", "-", "6", "-", "14", "0", "2", "0", "0 to 2", "9"]
    assert tasks[SHOWN][:8] == ["2", "-", "1", "-", "0", "0", "0", "1"]
    [held] = cells(page, "Who holds what").items()
    assert (held[0], held[1][:3]) == (str(lease.id), [SHOWN, "8", "2"])
    drawn = cells(page, "What was drawn last")
    assert {step: (it[0], it[2], it[4]) for step, it in drawn.items()} == {
        "8": ("test", "2", "2 leased"),
        "1007": ("test", "4", "4 sampled"),
        "6": ("test", "1", "1 sampled"),
    }
    assert f"Nothing to draw, starved or done: {SHOWN}." in unescape(page)
    assert "Held up" not in page
    assert "step 8</a> <small>2 groups" in page
    assert 'href="./step?buffer=math&amp;step=1007&amp;run=test"' in page  # there may be other runs
    assert f'href="./step?buffer=math&amp;draw={lease.batch.draw_id}"' in page
    numbers = await buffer.metrics()
    assert f"<dt>generated</dt><dd>{numbers['gen/groups']:.0f}" in page
    assert f"<dt>kept</dt><dd>{numbers['buffer/groups']:.0f}" in page
    assert f"<dt>replayed of these</dt><dd>{numbers['replay/groups']:.0f}" in page
    await lease.ack()


@both_engines
async def test_what_is_over_and_nobody_came_by(
    store: Store, buffer: Buffer, browser: httpx.AsyncClient, clock: Clock
) -> None:
    clock.jump(-60)
    await buffer.put([group()])
    late = await buffer.open_group("gsm8k", "late", 2, deadline=30)
    await buffer.open_group("gsm8k", "awaited", 2, deadline=600)
    lease = await buffer.lease(1, ttl=30, owner="dead")
    page = (await browser.get("/")).text
    then = "with the next draw or put"
    held_up = [
        f"the lease {lease.id} of dead has expired: its groups come back {then}",
        f"the deadline of group {late} has passed: it completes or fails {then}",
    ]
    assert re.findall("<li>(the .*?)</li>", page) == held_up
    assert "<small>1 group, " in page
    assert "Nothing to draw" not in page
    assert cells(page, "Who holds what")[str(lease.id)][4].startswith("expired ")
    held = await browser.get("/group", params={"buffer": "math", "id": lease.batch.ids[0]})
    assert "Held by <strong>dead</strong>" in held.text
    await store.buffer("other")
    buffers = cells((await browser.get("/")).text, "Buffers of this store")
    assert (buffers["math"][6], buffers["other"][6]) == ("; ".join(held_up), "-")


@both_engines
async def test_what_is_learned(
    buffer: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await learning.learning(buffer)).problem == "Nothing has been put yet."
    await put_versions(buffer)
    await buffer.put([group(task=HOSTILE, version=3)])
    await buffer.sample(10, rdb.Fifo(), tasks="gsm8k", step=0)
    page = (await browser.get("/")).text
    [rewards, hostile] = plots(page)["Reward by policy version"]
    assert (rewards["x"], rewards["y"]) == ([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])
    assert hostile["name"] == SHOWN.replace("<", "&lt;").replace(">", "&gt;")
    trends = re.findall(r"reward <strong>(.*?)</strong>( <span .*?</span>)?", page)
    assert trends == [("0 → 3", ' <span class="good">↑ rising</span>'), ("0.5 → 0.5", "")]
    fates = cells(page, "What became of all groups that are stored")
    assert fates["gsm8k"] == ["20", "20", "10", "0"]
    assert learning.Trend(1.0, 0.5, 0.4).direction == "↓ falling"
    assert learning.Trend(1.0, 0.5, 0.6).direction == "level"
    lately = cells(page, "The newest 21 groups")
    assert lately["gsm8k"] == ["20", "1.5", "0", "100.0%", "10"]
    assert lately[SHOWN] == ["1", "0.5", "0.5", "0.0%", "10"]
    assert '"layout": {"showlegend": true' in page
    ready, trained = plots(page)["Staleness"]
    for part in (ready, trained):
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
    assert (await learning.learning(buffer)).lately["single"].even is None


@both_engines
async def test_versions_compare_within_a_lineage_only(
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
    assert "Policy versions of 17 of them are of another lineage" in page
    ready, trained = plots(page)["Staleness"]
    assert (ready["x"][-1], ready["y"][-1], trained["y"][-1]) == ("unknown", 17 / 22, 0.8)
    assert "of 2 draws, reward 3.5 of the 2 still stored" in page
    assert "up to -4, 4 unknown" in page
    monkeypatch.setattr(learning, "MOST_POINTS", 2)
    chart = (await learning.learning(buffer)).charts[0]
    assert [row[0] for row in chart.rows] == ["0 to 2", "3 to 4"]
    assert chart.traces[0]["x"] == [1, 3.5]


async def test_a_sample_knows_all_that_take_turns(
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
    assert "All this is about the newest 4 groups" in " ".join(page.text.split())
    for _ in range(20):
        await few.put(group())
        await many.put([group() for _ in range(9)])
    monkeypatch.setattr(learning, "SAMPLED", 24)
    assert (await learning.learning(few)).num_sampled == 24
    monkeypatch.setattr(learning, "SAMPLED", 12)  # by ids of which most are of others
    assert 8 <= (await learning.learning(few)).num_sampled <= 16


async def test_it_follows(
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
    asked = []
    stats = Buffer.stats

    async def counted(self: Buffer, **how: bool) -> BufferStats:
        asked.append(how)
        return await stats(self, **how)

    monkeypatch.setattr(Buffer, "stats", counted)
    for name in ("buffers", "prompts", "count"):  # what goes through all groups
        monkeypatch.delattr(Store if hasattr(Store, name) else Buffer, name)
    for part in overview.PARTS:
        monkeypatch.setitem(overview.PARTS, part, replace(overview.PARTS[part], fresh=3600.0))
    pages = await asyncio.gather(*(browser.get("/") for _ in range(10)))
    assert {page.status_code for page in pages} == {200}
    assert asked == [{"totals": False}]
    again = await browser.get("/live?buffer=math&part=now")
    headers = {"If-None-Match": again.headers["ETag"]}
    same = await browser.get("/live?buffer=math&part=now", headers=headers)
    assert (same.status_code, same.text) == (304, "")


async def test_whoever_goes_away_leaves_the_answer_to_others() -> None:
    asked, going_on = [], asyncio.Event()

    async def ask() -> str:
        asked.append(1)
        await going_on.wait()
        if len(asked) == 1:
            raise rdb.DatabaseUnavailableError("down")
        return "up"

    async with Shared() as shared:
        first, second = (asyncio.create_task(shared.answer("a", 60, ask)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        going_on.set()
        with pytest.raises(rdb.DatabaseUnavailableError):
            await second
        assert await shared.answer("a", 60, ask) == "up"  # no failure is kept
        assert await shared.answer("a", 60, ask) == "up"
        assert len(asked) == 2
        assert await shared.answer("a", -1, ask) == "up"
        assert len(asked) == 3


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
    assert list(cells(page, "The newest runs")) == ["test"]
    chosen = await browser.get("/", params={"buffer": HOSTILE})
    assert "gsm8k" in cells(chosen.text, "Groups by task")
    monkeypatch.setattr(overview, "SHOWN_TASKS", 1)  # beyond which there are links to the others
    await store.buffer("zzz")
    links = read((await browser.get("/?buffer=math")).text).links
    pages = [await browser.get(links["all 3"])]
    for _ in range(2):
        pages.append(await browser.get(read(pages[-1].text).links["Next buffers"]))
    seen = [next(iter(cells(it.text, "Buffers of this store"))) for it in pages]
    assert seen == [SHOWN, "math", "zzz"]
    last = read(pages[-1].text).links
    assert "Next buffers" not in last
    assert last["Buffers before"] == "./?first=1"


@contextmanager
def command(*words: str, **env: str) -> Iterator[str]:
    """`replaydb ui` in a process of its own, ended by Ctrl-C; the address that it says."""
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


def test_a_demo_is_that_of_make_demo_and_of_no_store_that_is_named(
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
    assert "one of the two is meant" in refused.output
    # REPLAYDB_URL is not about this call.
    assert run("ui", "--demo", url=sqlite_url).exit_code == 0
    assert served == [f"sqlite:///{left}"]


async def test_the_turns_of_the_demo_hold_their_whole_context(
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


def test_a_demo_is_made_and_served_until_ctrl_c(tmp_path: Path) -> None:
    with command("--demo", REPLAYDB_URL="", TMPDIR=str(tmp_path)) as address:
        with urlopen(f"{address}?secret=1", timeout=60) as answer:  # noqa: S310
            page = answer.read().decode()
        assert "Server" not in answer.headers
        assert set(cells(page, "Groups by task")) == {"sums", "tools"}
        assert plots(page).keys() >= {"Reward by policy version", "Staleness"}
    assert list(tmp_path.iterdir()) == []
