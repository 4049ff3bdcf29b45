"""`replaydb metrics serve`, scraped as by Prometheus, and the Grafana dashboard."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update

from replaydb import Store, blocking
from replaydb.database.repository import buffers, metrics
from replaydb.database.tables.schema import compatibility
from replaydb.training.prometheus import COUNTERS, GAUGES, BufferCollector, StoreCollector
from support.command import run
from support.connections import transaction
from support.engines import both_engines
from support.groups import groups

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


@contextmanager
def serving(url: str, *words: str) -> Iterator[str]:
    """Run a server in its own process and stop it with Ctrl-C; yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "replaydb.cli", "metrics", "serve", *words, "--port", "0"],
        env={**os.environ, "REPLAYDB_URL": url, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        left, _ = process.communicate(timeout=60)
    assert (process.returncode, left) == (0, "")


def scraped(address: str) -> str:
    with urlopen(address, timeout=60) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def test_a_scrape(filled_url: str) -> None:
    with serving(filled_url, "--max-age", "0") as address:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", address)
        text = scraped(address)
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = {
            (one.name, *one.labels.values()): one.value
            for family in families.values()
            for one in family.samples
        }
        assert text.count("# HELP replaydb_gen_groups_total ") == 1  # once for two buffers
        assert families["replaydb_gen_groups"].type == "counter"
        assert families["replaydb_buffer_groups"].type == "gauge"
        assert samples["replaydb_up",] == 1.0
        assert samples["replaydb_gen_groups_total", "math"] == 6.0
        assert samples["replaydb_gen_groups_total", "code"] == 0.0
        assert samples["replaydb_train_task_total", "math", "odd"] == 2.0
        assert samples["replaydb_buffer_task", "math", "failed", "odd"] == 1.0

        async def put() -> None:
            async with Store.open(filled_url) as store:
                await (await store.buffer("new")).put(groups(2))

        asyncio.run(put())
        assert 'replaydb_gen_groups_total{buffer="new"} 2.0' in scraped(address)
    documented = {f"replaydb_{name}" for name in (*COUNTERS, *GAUGES)} | {"replaydb_up"}
    assert families.keys() <= documented
    assert all(len(family.documentation) > 10 for family in families.values())
    dashboard = DASHBOARD.read_text(encoding="utf8")
    shown = set(re.findall(r"\breplaydb_\w+", dashboard))
    assert len(shown) > 20
    assert shown <= documented | {f"replaydb_{name}_total" for name in COUNTERS}
    assert shown.isdisjoint(f"replaydb_{name}" for name in COUNTERS)
    panels = json.loads(dashboard)["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) > 10


@both_engines
def test_only_named_buffers_are_exported(filled_url: str) -> None:
    with blocking.Store.open(filled_url, read_only=True) as store:
        [up, *families] = StoreCollector(store, ["code"]).collect()
        assert up.samples[0].value == 1.0
        assert {one.labels["buffer"] for family in families for one in family.samples} == {"code"}
        assert len(list(StoreCollector(store, ["gone"]).collect())) == 1


def test_a_scrape_without_totals_reads_no_group(
    filled_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a statement that reads every group")

    monkeypatch.setattr(metrics, "sum_by_status", refused)
    monkeypatch.setattr(buffers, "select_buffers", refused)
    with blocking.Store.open(filled_url, read_only=True) as store:
        families = [family.name for family in StoreCollector(store, totals=False).collect()]
        math = BufferCollector(store.buffer("math", create=False), totals=False)
        assert "replaydb_gen_groups" in [family.name for family in math.collect()]
    assert "replaydb_gen_groups" in families
    assert "replaydb_buffer_status" not in families
    with serving(filled_url, "--no-totals") as address:
        text = scraped(address)
    assert "replaydb_gen_groups_total" in text
    assert "replaydb_buffer_status" not in text


def test_a_missing_database_is_reported(sqlite_url: str) -> None:
    with blocking.Store.open(sqlite_url, read_only=True) as store:
        Path(sqlite_url.removeprefix("sqlite:///")).unlink()
        [up] = StoreCollector(store).collect()
    assert (up.name, up.samples[0].value) == ("replaydb_up", 0.0)


@both_engines
def test_a_store_that_needs_a_newer_client_is_reported(filled_url: str) -> None:
    with blocking.Store.open(filled_url, read_only=True) as store:
        asyncio.run(require(filled_url, "9.0.0"))
        try:
            [up] = StoreCollector(store).collect()
        finally:
            asyncio.run(require(filled_url, "0.1.0"))
    assert (up.name, up.samples[0].value) == ("replaydb_up", 0.0)


async def require(url: str, min_client: str) -> None:
    async with transaction(url) as connection:
        await connection.execute(update(compatibility).values(min_client=min_client))


def test_errors_before_serving(sqlite_url: str) -> None:
    outcome = run("metrics", "serve", "chess", url=sqlite_url)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "there is no buffer named 'chess'" in outcome.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = run("metrics", "serve", "--port", port, url=sqlite_url)
    assert outcome.exit_code == 1
    assert f"expected a free address and port, got 127.0.0.1:{port}" in outcome.stderr
