"""Groups page: filters, sorting, pagination and text search."""

from __future__ import annotations

import asyncio
import re
from html import escape, unescape
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from sqlalchemy import literal_column, update

from replaydb import Buffer, Episode, EpisodeGroup, Store, col
from replaydb.database.tables.schema import episode_group
from replaydb.ui import application
from replaydb.ui.addresses import GroupQuery
from replaydb.ui.views import groups as view
from support.connections import transaction
from support.damage import damage
from support.engines import both_engines
from support.groups import episode, group
from support.pages import decode_bytes

Row = tuple[int, ...]


async def seen(browser: httpx.AsyncClient, address: str) -> tuple[list[int], str]:
    """Return the ids of the groups in the table, and the HTML of the page."""
    answer = await browser.get(address)
    assert answer.status_code == 200, answer.text
    return [int(it) for it in re.findall(r'<th scope="row"><a [^>]*>(\d+)</a>', answer.text)], (
        answer.text
    )


def link(page: str, label: str) -> str:
    """Return the URL of a link."""
    [target] = set(re.findall(rf'<a href="\./([^"]+)"[^>]*>{label}</a>', page))
    return unescape(target)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PAGE", 4)


@both_engines
async def test_pages_forwards_and_backwards(store: Store, browser: httpx.AsyncClient) -> None:
    """Each group is on one page. Groups without a value come last in both orders."""
    buffer = await store.buffer("math")
    for i in range(11):
        rewards = [i % 3 / 2] if i % 4 else [None]
        version = i // 2 if i % 5 else None
        await buffer.put(group(rewards=rewards, version=version, priority=1 + i % 3))
    for sort, order in (
        ("id", "descending"),
        ("comparable_version", "ascending"),
        ("reward_mean", "descending"),
    ):
        column = getattr(col, sort)
        order_by = column if order == "ascending" else column.desc()
        expected = [info.id for info in await buffer.find(order_by=order_by)]
        pages = []
        ids, page = await seen(browser, f"groups?buffer=math&sort={sort}&order={order}")
        pages.append(ids)
        while ">Next</a>" in page:
            ids, page = await seen(browser, link(page, "Next"))
            pages.append(ids)
        assert [id_ for ids in pages for id_ in ids] == expected
        assert [len(ids) for ids in pages] == [4, 4, 3]
        back = [ids]
        while ">Previous</a>" in page:
            ids, page = await seen(browser, link(page, "Previous"))
            back.append(ids)
        assert back == pages[::-1], (sort, order)
        assert (await seen(browser, link(page, "Next")))[0] == pages[1]


@both_engines
async def test_queries_are_answered_and_described(store: Store, browser: httpx.AsyncClient) -> None:
    buffer = await store.buffer("math")
    for i in range(8):
        await buffer.put(
            EpisodeGroup(
                "gsm8k" if i % 2 else "<b>",
                [episode(i / 8, version=i)],
                prompt_uid=f"p/{i % 3}",
                priority=float(i),
                tags={"level": i % 4, "kind": "x=y" if i % 2 else "z"},
            )
        )
    await buffer.advance_policy(8)
    await buffer.update(ids=[1], status="archived")
    queries = {
        "": ([8, 7, 6, 5], "8 groups."),
        "task=%3Cb%3E": ([7, 5, 3, 1], "task is &lt;b&gt;"),
        "task=%3Cb%3E&task=gsm8k&status=archived": ([1], "status is archived"),
        "run=test&prompt=p/2": ([6, 3], "prompt is p/2"),
        "run=unknown": ([], "0 groups."),
        "min_reward=0.5&max_reward=0.75": ([7, 6, 5], "mean reward at least 0.5"),
        "max_staleness=3": ([8, 7, 6], "staleness at most 3"),
        "min_priority=6": ([8, 7], "priority at least 6"),
        "tag=level=3": ([8, 4], "tag level=3"),
        "tag=level=3&tag=kind=x=y&max_priority=4": ([4], "tag kind=x=y"),
        "where=reward_mean%20%3C%20.3%20and%20tags['level']!=0": (
            [3, 2],
            "reward_mean &lt; 0.3 and",
        ),
        "tag=level=1e999": ([], "tag level=1e999"),
        f"tag=level={'[' * 2000}": ([], "0 groups."),
        "before=8": ([8, 7, 6, 5], "8 groups."),
        "before=6": ([8, 7, 6, 5], "8 groups."),
        "before=3": ([7, 6, 5, 4], "Previous"),
        "run=unknown&before=3": ([], "0 groups."),
        "after=999": ([8, 7, 6, 5], "8 groups."),
    }
    for query, (expected, text) in queries.items():
        ids, page = await seen(browser, f"groups?buffer=math&{query}")
        assert (ids, text in page) == (expected, True), query
    ids, page = await seen(browser, "groups?buffer=math&min_reward=0.25&sort=priority&task=gsm8k")
    assert ids == [8, 6, 4]
    assert re.search(r'<th scope="col" aria-sort="descending">\s*<a [^>]*>priority</a>', page)
    again = link(page, "priority")
    assert (await seen(browser, again))[0] == [4, 6, 8]
    assert await seen(browser, link(page, "drawn"))


async def test_invalid_queries_are_refused(buffer: Buffer, browser: httpx.AsyncClient) -> None:
    for query, message in (
        ("where=reward_meen%20%3E%201", "did you mean reward_mean"),
        ("sort=comparable_version&after=1&at=1e39", "at: expected"),
        ("sort=times_sampled&before=1&at=9223372036854775808", "at: expected"),
        ("sort=last_sampled_at&after=1&at=0001-01-01T00:00:00%2B14:00", "at: expected"),
        ("sort=priority&after=1&at=nan", "at: expected"),
        ("sort=reward_max", "sort: expected one of id, priority"),
        ("order=sideways", "one of ascending, descending"),
        ("status=done", "status: expected"),
        ("min_reward=lots", "min_reward: expected a number"),
        ("max_priority=nan", "max_priority: expected a number"),
        ("tag=level", "NAME=VALUE"),
        ("tag=level=[1]", "text, a number, true, false or null"),
        ("after=first", "the id of a group"),
        ("after=-1", "an integer"),
        ("before=99999999999999999999", "an integer"),
    ):
        answer = await browser.get(f"groups?buffer={buffer.name}&{query}")
        assert answer.status_code == 400
        assert message in unescape(answer.text)


@both_engines
async def test_a_text_search_continues_on_the_next_page(
    store: Store, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math")
    for i in range(20):
        text = f"so {'Wait' if i % 6 == 0 else 'no'} <i>{i}</i>" if i % 5 else None
        row = Episode(prompt_ids=[1], response_ids=[2], text=text)
        await buffer.put(EpisodeGroup("gsm8k", [row]))
    monkeypatch.setattr(view, "MAX_SEARCHED", 8)
    ids, page = await seen(browser, "groups?buffer=math&text=wait")
    assert ids == [19, 13]
    assert "Searched 8 groups with stored text." in page
    assert "so <mark>Wait</mark> &lt;i&gt;18&lt;/i&gt;" in page
    ids, page = await seen(browser, link(page, "Next"))
    assert ids == [7]
    assert ">Next</a>" in page or "Searched 8" in page
    monkeypatch.setattr(view, "SEARCH_SECONDS", -1)
    ids, page = await seen(browser, "groups?buffer=math&text=nowhere")
    assert ids == []
    assert "Searched 1 group with stored text." in page
    assert "so far" in page


async def test_a_text_search_ignores_case(
    url: str, store: Store, browser: httpx.AsyncClient
) -> None:
    """The snippet has the original case. Damaged groups are found, since only texts are read."""
    buffer = await store.buffer("math")
    row = Episode(prompt_ids=[1], response_ids=[2], text="İİİ, then İstanbul of 1453")
    [one] = await buffer.put(EpisodeGroup("gsm8k", [row, row]))
    await damage(url, one)
    for text, match in (("istanbul", "İstanbul"), ("İSTANBUL", "İstanbul"), ("THEN", "then")):
        ids, page = await seen(browser, f"groups?buffer=math&text={quote(text)}")
        assert ids == [one]
        assert f"<mark>{match}</mark>" in page
    assert all(len(view._folded(chr(code))) == 1 for code in range(0x110000))


async def test_a_text_search_decodes_episodes_without_text(
    store: Store, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math")

    def completion(text: str, stored: str | None = None) -> Episode:
        return Episode(prompt_ids=list(b"wait"), response_ids=list(text.encode()), text=stored)

    ids = await buffer.put(
        [
            EpisodeGroup("gsm8k", rows)
            for rows in (
                [completion("no, Wait a bit")],
                [completion("no", "no"), completion("oh, wait")],
                [completion("wait", "put with another text")],
                [completion("no"), completion("yes")],
                [completion("wait " * 100)],
            )
        ]
    )
    assert (await seen(browser, "groups?buffer=math&text=wait"))[0] == []
    decode_bytes(browser)
    monkeypatch.setattr(view, "MAX_DECODED", 300)
    found, page = await seen(browser, "groups?buffer=math&text=wait")
    assert found == [ids[1], ids[0]]
    assert "no, <mark>Wait</mark> a bit" in page
    assert "Searched 5 groups." in page
    monkeypatch.setattr(view, "SEARCH_SECONDS", -1)
    found, page = await seen(browser, "groups?buffer=math&text=wait")
    assert "Searched 1 group." in page
    found = []
    while ">Next</a>" in page:
        more, page = await seen(browser, link(page, "Next"))
        found += more
    assert found == [ids[1], ids[0]]


@both_engines
async def test_counting_is_limited(
    store: Store, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math")
    await buffer.put([group() for _ in range(5)])
    assert await buffer.count(limit=3) == 3
    assert await buffer.count(limit=5) == await buffer.count(limit=6) == 5
    monkeypatch.setattr(view, "MAX_COUNTED", 4)
    assert "More than 4 groups." in (await seen(browser, "groups?buffer=math"))[1]
    monkeypatch.setattr(view, "COUNT_SECONDS", -1)
    assert "Not counted" in (await seen(browser, "groups?buffer=math"))[1]


@pytest.mark.parametrize("sort", ["priority", "times_sampled", "last_sampled_at", "reward_mean"])
async def test_the_next_page_begins_where_this_one_ended(
    buffer: Buffer, browser: httpx.AsyncClient, sort: str
) -> None:
    """Also if the last group of this page has changed its position or was deleted since."""
    for i in range(12):
        await buffer.put(group(rewards=[float(i)], priority=1.0 + i))
    for _ in range(3):
        await buffer.sample(6)
    expected = [it.id for it in await buffer.find(order_by=getattr(col, sort).desc())]
    ids, page = await seen(browser, f"groups?buffer=math&sort={sort}")
    assert ids == expected[:4]
    after = link(page, "Next")
    await buffer.update_priorities(ids[-1:], [99.0])
    ids, page = await seen(browser, after)
    assert ids == expected[4:8]
    await buffer.delete([*expected[:4], ids[0]])
    assert (await seen(browser, after))[0] == expected[5:9]
    assert (await seen(browser, link(page, "Previous")))[0] == expected[5:9]


@both_engines
async def test_a_filter_that_overflows_is_a_bad_request(
    buffer: Buffer, browser: httpx.AsyncClient, engine_name: str
) -> None:
    await buffer.put(group())
    answer = await browser.get("groups?buffer=math&where=reward_mean * 1e308 * 1e308 > 1")
    assert answer.status_code == {"sqlite": 200, "postgresql": 400}[engine_name]
    if engine_name == "postgresql":
        assert "number that is too large" in answer.text
        assert "postgresql:" not in answer.text


async def test_invalid_input_can_be_corrected(buffer: Buffer, browser: httpx.AsyncClient) -> None:
    await buffer.put(group())
    wrong = {
        "where": "reward_meen > 1",
        "tag": "level",
        "min_reward": "much",
        "sort": "reward",
        "at": "soon",
    }
    for name, value in wrong.items():
        params = {"buffer": "math", "task": "gsm8k", "after": "5", "at": "1.0", "sort": "priority"}
        answer = await browser.get("groups", params=params | {name: value})
        assert answer.status_code == 400
        assert f'role="alert" id="problem">{name}: expected ' in answer.text
        assert '<input name="task" value="gsm8k">' in answer.text
        if name not in ("sort", "at"):
            assert f'value="{escape(value)}"' in answer.text
            assert answer.text.count('aria-invalid="true"') == 1
    answer = await browser.get("groups?buffer=math&where=&task=a%26b&tag=&tag=a=1&text=")
    assert (answer.status_code, answer.headers["Location"]) == (
        303,
        "./groups?buffer=math&task=a%26b&tag=a%3D1",
    )


async def test_groups_with_damaged_columns_are_omitted(sqlite_url: str) -> None:
    """Only on SQLite: PostgreSQL enforces the types of columns."""
    async with Store.open(sqlite_url) as store:
        await (await store.buffer("math")).put([group() for _ in range(8)])
    async with transaction(sqlite_url) as connection:
        damaged: Any = {"tags": literal_column("'{'")}
        where = episode_group.c.id.in_([1, 5])
        await connection.execute(update(episode_group).where(where).values(damaged))
    app = application(sqlite_url)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as browser,
    ):
        ids, page = await seen(browser, "groups?buffer=math")
        assert (ids, "for details): 5." in page) == ([8, 7, 6, 4], True)
        ids, page = await seen(browser, link(page, "Next"))
        assert (ids, "for details): 1." in page) == ([3, 2], True)
        downloaded = (await browser.get("groups.json?buffer=math")).json()
        assert [row["tags"] for row in downloaded] == ["{", {}, {}, {}, "{", {}, {}, {}]
        _, overview = await seen(browser, "")
        assert "for details): 1, 5." in overview
        assert "all 6 stored groups" in " ".join(overview.split())


async def test_scans_are_serialized(
    buffer: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of waiting scans does not block other pages."""
    await buffer.put(group())
    scans = ("sort=reward_mean", "where=reward_mean > 0", "min_reward=0", "run=a", "tag=a=1")
    quick = ("", "sort=priority", "task=gsm8k&status=completed", "prompt=a")
    running, may_finish = [0], asyncio.Event()
    find = view._find

    async def slow(buffer: Buffer, query: GroupQuery, *rest: Any) -> Any:
        if query.may_read_all:
            running.append(running[-1] + 1)
            await may_finish.wait()
            running.append(running[-1] - 1)
        return await find(buffer, query, *rest)

    monkeypatch.setattr(view, "_find", slow)
    waiting = [
        asyncio.create_task(seen(browser, f"groups?buffer=math&{query}")) for query in 2 * scans
    ]
    for query in quick:
        await seen(browser, f"groups?buffer=math&{query}")
    assert (running, any(task.done() for task in waiting)) == ([0, 1], False)
    may_finish.set()
    await asyncio.gather(*waiting)
    assert running == [0, *[1, 0] * len(waiting)]
