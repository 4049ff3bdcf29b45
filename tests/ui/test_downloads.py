"""Downloads as Parquet and JSON: rows, limits and errors."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import threading
from collections.abc import Iterator
from datetime import datetime
from html import unescape
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pyarrow.parquet as pq
import pytest
from sqlalchemy import update

from replaydb import Buffer, Episode, EpisodeGroup, GroupStatus, Store, analysis, col
from replaydb.analysis import source
from replaydb.database import migrations
from replaydb.database.tables.schema import REVISIONS, compatibility
from replaydb.ui import downloads
from support.connections import transaction
from support.engines import both_engines
from support.groups import GENERATED, STORED, episode

ADDRESSES = [
    "",
    "task=it's&task=gsm8k&status=completed&run=test",
    "prompt=p/2&min_reward=0.1&max_priority=6.5&max_staleness=6&min_staleness=2",
    "tag=kind=%25d 'x' \\ é&where=" + quote("tags['level'] in [1, 'one'] or tags['l'][0] == 'py'"),
    "where=" + quote("task_name.like('g%8_') and id in [2, 4, 6] and not has_transcript"),
    "where=" + quote("deadline is None and (lease_id is not None or run_id > 0) and id > 1"),
    "where=" + quote("leased_from == 'completed' and min_episodes is None and staleness > 2"),
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
    await buffer.lease(2, ttl=600)
    await (await store.buffer("other")).put(EpisodeGroup("gsm8k", [episode()]))
    return buffer


async def test_a_download_has_the_groups_of_its_page(
    url: str, filled: Buffer, browser: httpx.AsyncClient
) -> None:
    """Both formats have the same rows."""
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
    as_json = (await browser.get(f"groups.json?{address}")).json()
    assert as_json[8]["tags"]["l"] == ["py"]
    assert as_json[8]["created_at"] == expected[8]["created_at"].isoformat()
    assert [row["reward_mean"] for row in as_json] == [row["reward_mean"] for row in expected]


#: Download URLs, with `{}` for the file type.
PAGES = (
    "group.{}?id=2&buffer=%s",
    "episode.{}?group=2&position=0&buffer=%s",
    "compare.{}?group=11&a=2&b=0&buffer=other",
    "prompt.{}?uid=p/2&buffer=%s",
    "prompt.{}?uid=p/2&task=gsm8k&buffer=%s",
    "runs.{}",
    "step.{}?step=1&buffer=%s",
    "step.{}?step=1&run=test&buffer=%s",
    "step.{}?step=1&run=it's&buffer=%s",
    "step.{}?draw=1&buffer=%s",
    "steps.{}?buffer=%s",
    "steps.{}?run=test&buffer=%s",
    "steps.{}?run=it's&buffer=%s",
)


@both_engines
async def test_downloads_of_every_view(
    url: str, filled: Buffer, browser: httpx.AsyncClient
) -> None:
    """Both formats have the same rows."""
    async with Store.open(url, run="it's") as store:
        rows = [episode(i / 2, version=3, text=f"'{i}'", metadata={"n": i}) for i in range(3)]
        await (await store.buffer("other")).put(EpisodeGroup("gsm8k", rows))
    found = {}
    for page in PAGES:
        address = page.replace("%s", quote(filled.name))
        answers = {kind: await browser.get(address.format(kind)) for kind in downloads.MEDIA_TYPES}
        assert {answer.status_code for answer in answers.values()} == {200}, address
        table = pq.read_table(io.BytesIO(answers["parquet"].content))
        rows = found[page] = table.to_pylist()
        expected = [[shown(value) for value in row.values()] for row in rows]
        as_json = [[shown(value) for value in row.values()] for row in answers["json"].json()]
        assert as_json == expected, page
    [same] = analysis.episodes(url, where=col.id == 2).to_table().to_pylist()
    assert found["episode.{}?group=2&position=0&buffer=%s"] == [same]
    assert found["group.{}?id=2&buffer=%s"] == [same]
    two = found["compare.{}?group=11&a=2&b=0&buffer=other"]
    assert [(row["position"], row["text"]) for row in two] == [(0, "'0'"), (2, "'2'")]
    prompt = analysis.prompts(url, buffer=filled.name, where=col.prompt_uid == "p/2").to_table()
    assert found["prompt.{}?uid=p/2&buffer=%s"] == prompt.to_pylist()
    assert len(found["prompt.{}?uid=p/2&task=gsm8k&buffer=%s"]) == 1
    assert found["runs.{}"] == analysis.runs(url).to_table().to_pylist()
    history = analysis.draws(url, buffer=filled.name).to_table().to_pylist()
    step = [row for row in history if row["step"] == 1]
    assert len(history) == 5
    assert len(step) == 3
    for page in PAGES:
        if page.startswith("steps"):
            assert found[page] == ([] if "it's" in page else history)
        if page.startswith("step."):
            assert found[page] == ([] if "it's" in page else step)


def shown(value: Any) -> Any:
    """Normalize a value of either format: JSON is parsed, times are text."""
    if isinstance(value, str) and value.startswith(("{", "[")):
        return json.loads(value)
    return value.isoformat() if isinstance(value, datetime) else value


async def test_downloads_of_tokens(url: str, filled: Buffer, browser: httpx.AsyncClient) -> None:
    rows = [
        Episode(prompt_ids=[1], response_ids=[2, 3], logprobs=[-0.5, math.nan], policy_version=i)
        for i in range(2)
    ]
    [put] = await filled.put(EpisodeGroup("gsm8k", rows))
    address = f"buffer={quote(filled.name)}&group={put}&position=1"
    parquet = await browser.get(f"tokens.parquet?{address}")
    found = pq.read_table(io.BytesIO(parquet.content)).to_pylist()
    assert [row["token_id"] for row in found] == [1, 2, 3]
    assert repr([row["logprob"] for row in found]) == "[0.0, -0.5, nan]"
    assert {row["position"] for row in found} == {row["token_version"] for row in found} == {1}
    as_json = (await browser.get(f"tokens.json?{address}")).json()
    assert [row["logprob"] for row in as_json] == [0.0, -0.5, None]
    assert (await browser.get(f"tokens.csv?{address}")).status_code == 404
    await filled.update(ids=[put], status="archived")
    assert (await browser.get(f"tokens.json?{address}")).status_code == 200


async def test_texts_are_downloaded_in_their_stored_form(
    url: str, buffer: Buffer, browser: httpx.AsyncClient
) -> None:
    given = episode(text=GENERATED, metadata={"text": GENERATED})
    [put] = await buffer.put(EpisodeGroup("gsm8k", [given]))
    group = f"buffer={buffer.name}&group={put}"
    for page in f"episode.{{}}?{group}&position=0", f"compare.{{}}?{group}&a=0&b=0":
        answers = {kind: await browser.get(page.format(kind)) for kind in downloads.MEDIA_TYPES}
        [row] = pq.read_table(io.BytesIO(answers["parquet"].content)).to_pylist()
        [as_json] = answers["json"].json()
        assert row["text"] == as_json["text"] == as_json["metadata"]["text"] == STORED


async def test_every_page_links_to_its_downloads(
    filled: Buffer, browser: httpx.AsyncClient
) -> None:
    for page in (
        "groups?buffer=%s",
        "group?id=2&buffer=%s",
        "episode?group=2&position=0&buffer=%s",
        "compare?group=2&a=0&b=0&buffer=%s",
        "prompt?uid=p/2&buffer=%s",
        "runs",
        "step?step=1&buffer=%s",
        "steps?buffer=%s",
    ):
        shown = await browser.get(page.replace("%s", quote(filled.name)))
        links = re.findall(r'href="\./([^"]+)">(?:parquet|json)<', shown.text)
        kinds = {urlsplit(link).path.rpartition(".")[2] for link in links}
        assert kinds == {*downloads.MEDIA_TYPES}, page
        for link in links:
            assert (await browser.get(unescape(link))).status_code == 200, link


async def test_invalid_downloads(filled: Buffer, browser: httpx.AsyncClient) -> None:
    buffer = f"buffer={quote(filled.name)}"
    for address, status, message in (
        (f"step.json?{buffer}", 400, "step: expected"),
        (f"group.json?{buffer}&id=99", 404, "99"),
        (f"episode.json?{buffer}&group=2&position=1", 404, "group 2 has no episode 1: it has 1"),
        (f"compare.json?{buffer}&group=2&a=0", 400, "b: expected"),
        (f"tokens.json?{buffer}&group=2&position=9", 404, "group 2 has no episode 9: it has 1"),
        (f"prompt.json?{buffer}", 400, "uid: expected"),
        ("groups.json?buffer=none", 404, "none"),
    ):
        answer = await browser.get(address)
        assert answer.status_code == status, address
        assert message in answer.text


async def test_another_schema_revision_is_reported(
    url: str, store: Store, filled: Buffer, browser: httpx.AsyncClient
) -> None:
    """The schema changes while the store is open: every download fails, and pages that need it."""
    groups = [f"groups.{kind}?buffer={quote(filled.name)}" for kind in downloads.MEDIA_TYPES]
    for buffer in (filled, await store.buffer("other")):
        await buffer.delete(statuses=list(GroupStatus))  # their payloads prevent a downgrade
    for revision, addresses in ((REVISIONS[-2], groups), ("base", ["", *groups])):
        await migrations.downgrade(url, revision)
        for address in addresses:
            answer = await browser.get(address)
            assert answer.status_code == 503, address
            assert f"is not at revision {REVISIONS[-1]}" in answer.text
    await migrations.upgrade(url)
    assert "No buffers yet." in (await browser.get("")).text


async def test_a_store_that_needs_a_newer_client_is_reported(
    url: str, filled: Buffer, browser: httpx.AsyncClient
) -> None:
    async with transaction(url) as connection:
        await connection.execute(update(compatibility).values(min_client="9.0.0"))
    answer = await browser.get(f"groups?buffer={quote(filled.name)}")
    assert answer.status_code == 503
    assert "the store needs replaydb 9.0.0 or later" in answer.text


async def test_downloads_have_a_maximum_number_of_rows(
    filled: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "MAX_ROWS", 2)
    buffer = f"buffer={quote(filled.name)}"
    for page in (f"groups.{{}}?{buffer}", f"step.{{}}?step=1&{buffer}"):
        assert len((await browser.get(page.format("json"))).json()) == 2
        parquet = await browser.get(page.format("parquet"))
        assert pq.read_table(io.BytesIO(parquet.content)).num_rows == 2


async def test_downloads_are_read_page_by_page(
    filled: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages have a limited number of rows, and of bytes of texts."""
    rows = [episode(i / 4, text="long " * i) for i in range(1, 4)]
    [put] = await filled.put(EpisodeGroup("gsm8k", rows))
    name = f"buffer={quote(filled.name)}"
    for limit, pages in {
        "PAGE": (
            f"prompt.{{}}?uid=p/2&{name}",
            f"step.{{}}?step=1&{name}",
            f"group.{{}}?id={put}&{name}",
        ),
        "PAGE_BYTES": (f"group.{{}}?id={put}&{name}", f"compare.{{}}?group={put}&a=0&b=2&{name}"),
    }.items():
        for page in pages:
            whole = (await browser.get(page.format("json"))).json()
            with monkeypatch.context() as patched:
                patched.setattr(source, limit, 1)
                assert (await browser.get(page.format("json"))).json() == whole
                content = (await browser.get(page.format("parquet"))).content
            assert pq.ParquetFile(io.BytesIO(content)).num_row_groups == len(whole) > 1, page


async def test_unsupported_queries_are_refused(filled: Buffer, browser: httpx.AsyncClient) -> None:
    for kind, query, message in (
        ("json", "text=wait", "text: expected no text search in a download"),
        ("parquet", "where=nonsense", "a column of groups"),
    ):
        answer = await browser.get(f"groups.{kind}?buffer={quote(filled.name)}&{query}")
        assert answer.status_code == 400
        assert message in answer.text


async def test_a_disconnect_stops_reading() -> None:
    ended = threading.Event()

    def made() -> Iterator[bytes]:
        try:
            yield from (b"one", b"two")
        finally:
            ended.set()

    chunks = downloads._chunks(made())
    assert await anext(chunks) == b"one"
    await chunks.aclose()
    assert await asyncio.to_thread(ended.wait, 60)
