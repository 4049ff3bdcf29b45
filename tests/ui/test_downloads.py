from __future__ import annotations

import asyncio
import io
import re
import sqlite3
import threading
from collections.abc import Iterator
from html import unescape
from typing import Any
from urllib.parse import quote

import asyncpg
import httpx
import pyarrow.parquet as pq
import pytest

from replaydb import Buffer, EpisodeGroup, Store, analysis, col
from replaydb.ui import downloads
from support.groups import episode

ADDRESSES = [
    "",
    "task=it's&task=gsm8k&status=completed&run=test",
    "prompt=p/2&min_reward=0.1&max_priority=6.5&max_staleness=6&min_staleness=2",
    "tag=kind=%25d 'x' \\ é&where=" + quote("tags['level'] in [1, 'one'] or tags['l'][0] == 'py'"),
    "where=" + quote("task_name.like('g%8_') and id in [2, 4, 6] and not has_transcript"),
    "sort=priority&where="
    + quote("created_at > '2026-01-01' and coalesce(reward_std, 1) * 2 < 1e-3 and id % 3 < 2"),
]


@pytest.fixture
async def filled(store: Store) -> Buffer:
    buffer = await store.buffer('it\'s "math"')
    for i in range(9):
        await buffer.put(
            EpisodeGroup(
                "gsm8k" if i % 2 else "it's",
                [episode(i / 8, version=i, text="said" if i % 4 == 1 else None)],
                prompt_uid=f"p/{i % 3}" if i else None,
                priority=float(i),
                tags={
                    "level": i % 4 if i % 3 else "one",
                    "kind": "%d 'x' \\ é",
                    "l": ["py" if i == 8 else "c"],
                },
            )
        )
    await buffer.advance_policy(9)
    await buffer.sample(3, step=1)
    await buffer.update(ids=[9], status="archived")
    await (await store.buffer("other")).put(EpisodeGroup("gsm8k", [episode()]))
    return buffer


async def run(url: str, sql: str) -> list[tuple[Any, ...]]:
    """What a client of the database gets."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()
    client = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await client.fetch(sql)]
    finally:
        await client.close()


async def test_a_download_has_the_groups_of_its_page(
    url: str, filled: Buffer, browser: httpx.AsyncClient
) -> None:
    """The same rows in three forms, the SQL run by a client of the database."""
    names = analysis.groups(url).schema.names
    for query in ADDRESSES:
        address = f"buffer={quote(filled.name)}&{query}"
        answers = {
            kind: await browser.get(f"groups.{kind}?{address}") for kind in downloads.MEDIA_TYPES
        }
        for kind, answer in answers.items():
            assert answer.status_code == 200, answer.text
            saved = f'attachment; filename="groups.{kind}"'
            assert answer.headers["content-disposition"] == saved
        table = pq.read_table(io.BytesIO(answers["parquet"].content))
        assert table.schema.names == names
        ids = table["group_id"].to_pylist()
        assert [row["group_id"] for row in answers["json"].json()] == ids
        assert [row[0] for row in await run(url, answers["sql"].text)] == ids, query
        page = await browser.get(f"groups?{address}")
        assert f"{len(ids)} group" in page.text
        assert len(ids) in (range(1, 9) if query else (9,)), query


async def test_rows_are_those_of_the_view(
    url: str, filled: Buffer, browser: httpx.AsyncClient
) -> None:
    address = f"buffer={quote(filled.name)}"
    expected = analysis.groups(url, buffer=filled.name).to_table().to_pylist()
    parquet = await browser.get(f"groups.parquet?{address}")
    assert pq.read_table(io.BytesIO(parquet.content)).to_pylist() == expected
    said = (await browser.get(f"groups.json?{address}")).json()
    assert said[8]["tags"]["l"] == ["py"]
    assert said[8]["created_at"] == expected[8]["created_at"].isoformat()
    assert [row["reward_mean"] for row in said] == [row["reward_mean"] for row in expected]
    rows = await run(url, (await browser.get(f"groups.sql?{address}")).text)
    names = analysis.groups(url).schema.names
    for row, known in zip(rows, expected, strict=True):
        shown = dict(zip(names, row, strict=True))
        for name in ("group_id", "task_name", "reward_mean", "staleness", "priority", "run_name"):
            assert shown[name] == known[name]


async def test_groups_and_steps_have_theirs(
    url: str, filled: Buffer, browser: httpx.AsyncClient
) -> None:
    buffer = quote(filled.name)
    history = analysis.draws(url, buffer=filled.name).to_table().to_pylist()
    assert len(history) == 3
    episodes = analysis.episodes(url, where=col.id == 2).to_table().drop(["text"]).to_pylist()
    for address, expected in {
        "group.{}?id=2": episodes,
        "step.{}?step=1": history,
        "step.{}?step=1&run=test": history,
        "step.{}?step=1&run=other": [],
        f"step.{{}}?draw={history[0]['draw_id']}": history,
    }.items():
        answers = {
            kind: await browser.get(f"{address.format(kind)}&buffer={buffer}")
            for kind in downloads.MEDIA_TYPES
        }
        assert {answer.status_code for answer in answers.values()} == {200}
        assert pq.read_table(io.BytesIO(answers["parquet"].content)).to_pylist() == expected
        assert len(answers["json"].json()) == len(expected)
        assert len(await run(url, answers["sql"].text)) == len(expected)
    for page in ("group?id=2", "step?step=1", "prompt?uid=p/2"):
        shown = await browser.get(f"{page}&buffer={buffer}")
        [link] = re.findall(r'href="\./([^"]+)">json<', shown.text)
        assert (await browser.get(unescape(link))).json(), page
    assert (await browser.get(f"step.json?buffer={buffer}")).status_code == 400
    assert (await browser.get(f"group.json?buffer={buffer}&id=99")).status_code == 404


async def test_downloads_end(
    filled: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "MOST_ROWS", 4)
    address = f"buffer={quote(filled.name)}"
    assert len((await browser.get(f"groups.json?{address}")).json()) == 4
    parquet = await browser.get(f"groups.parquet?{address}")
    assert pq.read_table(io.BytesIO(parquet.content)).num_rows == 4
    assert "LIMIT 4" in (await browser.get(f"groups.sql?{address}")).text


async def test_what_no_download_has_is_refused(filled: Buffer, browser: httpx.AsyncClient) -> None:
    for kind, query, said in (
        ("json", "text=wait", "text: expected none in a download"),
        ("sql", "where=deadline%20is%20None", "columns that the view group_overview has"),
        ("parquet", "where=nonsense", "a column of groups"),
    ):
        answer = await browser.get(f"groups.{kind}?buffer={quote(filled.name)}&{query}")
        assert answer.status_code == 400
        assert said in answer.text


async def test_whoever_goes_away_ends_the_reading() -> None:
    ended = threading.Event()

    def made() -> Iterator[bytes]:
        try:
            yield from (b"one", b"two")
        finally:
            ended.set()

    parts = downloads._parts(made())
    assert await anext(parts) == b"one"
    await parts.aclose()
    assert await asyncio.to_thread(ended.wait, 60)
