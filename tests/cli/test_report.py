"""`replaydb report`: correct numbers, and no scripts or requests from untrusted text."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import replaydb as rdb
from replaydb.analysis.report.page import plot
from replaydb.analysis.report.summary import MOST_BINS, Bins
from support.command import run
from support.groups import episode

#: Ends enclosing elements, loads remote files and changes the text direction.
HOSTILE = (
    "</script></pre><img src=http://evil.example/x onerror=alert(1)>"
    '"><script src="//evil.example/y.js"></script><!-- \x1b[31m\u202e'
)


class Page(HTMLParser):
    """The elements of a page with their content."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.contents: list[tuple[str, str]] = []
        self._open = [""]
        self.feed(path.read_text(encoding="utf8"))
        self.close()
        assert self._open == [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.contents.append((self._open[-1], data))

    def text_of(self, tag: str) -> list[str]:
        return [data for inside, data in self.contents if inside == tag]

    @property
    def figures(self) -> dict[str, Any]:
        """Plots by heading."""
        plots = [json.loads(text) for text in self.text_of("script") if text.startswith("{")]
        headings = self.text_of("h2")[1 : 1 + len(plots)]
        return dict(zip(headings, plots, strict=True))


def report_on(url: str, path: Path, buffer: str = "math") -> Page:
    outcome = run("report", buffer, "-o", path, url=url)
    assert (outcome.exit_code, outcome.stdout) == (0, f"{path}\n"), outcome.output
    assert [one.name for one in path.parent.glob("*.part")] == []
    return Page(path)


def test_the_report_matches_the_store(url: str, tmp_path: Path) -> None:
    async def fill() -> tuple[rdb.BufferStats, list[rdb.DrawInfo], list[rdb.GroupInfo]]:
        async with rdb.Store.open(url) as store:
            buffer = await store.buffer("math")
            await store.buffer("other")
            await buffer.put(_group(i) for i in range(30))
            await buffer.put(rdb.EpisodeGroup("hard", [], status="failed"))
            await buffer.advance_policy(4)
            for step in range(3):
                await buffer.sample(4, rdb.Prioritized(), step=step)
                await buffer.lease(2, ttl=600, step=step)
            return await buffer.stats(), await buffer.draws(), await buffer.find()

    stats, draws, groups = asyncio.run(fill())
    page = report_on(url, tmp_path / "report.html")
    cells = page.text_of("td")
    rows = {row[0]: row[1:] for row in zip(*[iter(cells)] * 9, strict=True)}
    for task in stats.tasks:
        mine = [one for one in groups if one.task_name == task.task_name]
        rewards = [one.reward_mean for one in mine if one.reward_mean is not None]
        facts = rows[task.task_name]
        assert facts[0] == str(task.num_inserted)
        assert facts[1] == str(sum(one.num_tokens for one in mine))
        assert float(facts[2]) == pytest.approx(sum(rewards) / len(rewards), rel=1e-3)
        assert facts[4] == str(sum(one.times_sampled for one in mine))
        assert facts[5] == str(sum(not one.times_sampled for one in mine))
        for total in stats.totals:
            if total.task_name == task.task_name:
                assert f"{total.num_groups} {total.status}" in facts[7]
    sampled = [draw for draw in draws if draw.outcomes[0] == "sampled"]
    staleness = [known for draw in sampled for known in draw.staleness if known is not None]
    figures = page.figures
    [bars] = figures["Staleness at training"]["data"]
    assert dict(zip(bars["x"], bars["y"], strict=True)) == {
        value: staleness.count(value) for value in set(staleness)
    }
    lines = {line["name"]: line for line in figures["Reward by policy version"]["data"]}
    for name, line in lines.items():
        for version, reward in zip(line["x"], line["y"], strict=True):
            own = [
                one.reward_mean
                for one in groups
                if (one.task_name, one.min_policy_version) == (name, version)
                and one.reward_mean is not None
            ]
            assert reward == pytest.approx(sum(own) / len(own))
    assert set(lines) == {"easy", "hard"}
    assert {line["y"][0] for line in figures["Generated and trained groups"]["data"]} == {0}
    flows = {
        line["name"]: line["y"][-1] for line in figures["Generated and trained groups"]["data"]
    }
    assert flows == {"generated": len(groups), "trained": 4 * len(sampled)}
    [line] = figures["Staleness at training over time"]["data"]
    assert min(staleness) <= min(line["y"]) <= max(line["y"]) <= max(staleness)
    speeds = figures["Throughput"]["data"]
    assert {line["name"]: sum(line["y"]) for line in speeds} == flows  # in bins of a second
    assert all(line["y"][0] == line["y"][-1] == 0 for line in speeds)
    [bars] = figures["Draws per group"]["data"]
    assert sum(bars["y"]) == len(groups)
    [bars] = figures["Priorities"]["data"]
    assert dict(zip(bars["x"], bars["y"], strict=True)) == {"0": 1, "1": 29, "100": 1}
    assert page.text_of("h3")[0].startswith("group 30 · hard · mean reward 29.5")
    assert page.text_of("pre")[:2] == ["text 29", "text 28"]


def _group(i: int) -> rdb.EpisodeGroup:
    episodes = [episode(float(i), i % 5), episode(i + 1.0, i % 5, text=f"text {i}")]
    priority = {0: 0.0, 1: 100.0}.get(i, 1.0)
    return rdb.EpisodeGroup("hard" if i % 3 else "easy", episodes, priority=priority)


def test_untrusted_text_cannot_run_or_load_anything(url: str, tmp_path: Path) -> None:
    async def fill() -> None:
        async with rdb.Store.open(url, run=HOSTILE) as store:
            buffer = await store.buffer(HOSTILE)
            written = episode(1.0, 0, text=HOSTILE)
            await buffer.put(rdb.EpisodeGroup(HOSTILE, [written], prompt_uid=HOSTILE))

    asyncio.run(fill())

    page = report_on(url, tmp_path / "report.html", HOSTILE)
    asks = {"src", "href", "srcset", "action", "data", "poster", "style", "background", "cite"}
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form", "a"}
        assert asks.isdisjoint(attributes)
        assert not any(one.startswith("on") for one in attributes)
    [style] = page.text_of("style")
    assert "url(" not in style
    assert "@import" not in style
    shown = HOSTILE.encode("unicode_escape").decode()
    assert page.text_of("pre") == [shown] * 2  # the best and the worst
    assert page.text_of("h1") == [shown]
    assert page.text_of("td")[0] == shown
    [line] = page.figures["Reward by policy version"]["data"]
    assert "<" not in line["name"]
    [policy] = [
        str(attributes["content"])
        for tag, attributes in page.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules["img-src"].split()) == {"data:", "blob:"}
    scripts = [text for text in page.text_of("script") if not text.startswith("{")]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts]
    assert rules["script-src"].split() == [f"'sha256-{one.decode()}'" for one in digests]


def test_text_cannot_end_the_script_of_a_plot() -> None:
    shown = plot("heading", '{"a": "</script>"}')
    assert shown.count("</script") == 1
    assert r'{"a": "\u003c/script>"}' in shown


def test_a_report_of_an_empty_buffer(sqlite_url: str, tmp_path: Path) -> None:
    async def make() -> None:
        async with rdb.Store.open(sqlite_url) as store:
            await store.buffer("math")

    asyncio.run(make())
    page = report_on(sqlite_url, tmp_path / "report.html")
    assert "0 groups" in page.text_of("p")[0]
    assert len(page.figures) == 7
    (tmp_path / "link.html").symlink_to(tmp_path / "report.html")
    os.mkfifo(tmp_path / "pipe")
    before = (tmp_path / "report.html").stat().st_ino
    for name, code in (("link.html", 0), ("pipe", 1)):
        assert run("report", "math", "-o", tmp_path / name, url=sqlite_url).exit_code == code
    assert (tmp_path / "report.html").stat().st_ino != before
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "pipe").is_fifo()


def test_bins_double_if_there_are_too_many() -> None:
    bins = Bins()
    for number in range(-1000, 1000):
        bins.add(number, 2, number)
    assert len(bins.counts) <= MOST_BINS
    assert bins.total() == 4000
    assert sum(bins.sums.values()) == sum(range(-1000, 1000))
    for start, count in bins.items():
        assert start % bins.width == 0
        assert count <= 2 * bins.width


def test_a_report_that_cannot_be_written_is_an_error(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "there" / "report.html"
    outcome = run("report", "math", "-o", path, url=sqlite_url)
    assert outcome.exit_code == 1
    assert "path: expected a file in an existing folder" in outcome.stderr
    outcome = run("report", "chess", "-o", tmp_path / "report.html", url=sqlite_url)
    assert outcome.exit_code == 1
    assert "there is no buffer named 'chess'" in outcome.stderr
    assert list(tmp_path.glob("*.html")) == []
