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
from replaydb.database.schema import episode_group
from replaydb.ui import application
from replaydb.ui.addresses import Groups
from replaydb.ui.views import groups as view
from support.connections import transaction
from support.damage import damage
from support.engines import both_engines
from support.groups import episode, group
from support.pages import decode_bytes

Row = tuple[int, ...]


async def seen(browser: httpx.AsyncClient, address: str) -> tuple[list[int], str]:
    """Ids of the groups that the table has, and the page."""
    answer = await browser.get(address)
    assert answer.status_code == 200, answer.text
    return [int(it) for it in re.findall(r'<th scope="row"><a [^>]*>(\d+)</a>', answer.text)], (
        answer.text
    )


def link(page: str, label: str) -> str:
    """Where a link leads."""
    [there] = set(re.findall(rf'<a href="\./([^"]+)"[^>]*>{label}</a>', page))
    return unescape(there)


@pytest.fixture(autouse=True)
def _few_on_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PAGE", 4)


@both_engines
async def test_pages_go_forth_and_back(store: Store, browser: httpx.AsyncClient) -> None:
    """Each group is on one page, also those without a value, which come last either way."""
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
async def test_what_an_address_asks_for_is_found_and_said(
    store: Store, browser: httpx.AsyncClient
) -> None:
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
    asked = {
        "": ([8, 7, 6, 5], "8 groups."),
        "task=%3Cb%3E": ([7, 5, 3, 1], "task is &lt;b&gt;"),
        "task=%3Cb%3E&task=gsm8k&status=archived": ([1], "status is archived"),
        "run=test&prompt=p/2": ([6, 3], "prompt is p/2"),
        "run=nobody": ([], "0 groups."),
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
        "run=nobody&before=3": ([], "0 groups."),
        "after=999": ([8, 7, 6, 5], "8 groups."),
    }
    for query, (expected, said) in asked.items():
        ids, page = await seen(browser, f"groups?buffer=math&{query}")
        assert (ids, said in page) == (expected, True), query
    ids, page = await seen(browser, "groups?buffer=math&min_reward=0.25&sort=priority&task=gsm8k")
    assert ids == [8, 6, 4]
    assert re.search(r'<th scope="col" aria-sort="descending">\s*<a [^>]*>priority</a>', page)
    again = link(page, "priority")
    assert (await seen(browser, again))[0] == [4, 6, 8]
    assert await seen(browser, link(page, "drawn"))


async def test_what_an_address_cannot_say_is_refused(
    buffer: Buffer, browser: httpx.AsyncClient
) -> None:
    for query, said in (
        ("where=reward_meen%20%3E%201", "did you mean reward_mean"),
        ("sort=comparable_version&after=1&at=1e39", "at: expected"),
        ("sort=times_sampled&before=1&at=9223372036854775808", "at: expected"),
        ("sort=last_sampled_at&after=1&at=0001-01-01T00:00:00%2B14:00", "at: expected"),
        ("sort=priority&after=1&at=nan", "at: expected"),
        ("sort=reward_max", "sort: expected one of id, priority"),
        ("order=sideways", "ascending or descending"),
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
        assert said in unescape(answer.text)


@both_engines
async def test_texts_are_looked_for_a_part_at_a_time(
    store: Store, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math")
    for i in range(20):
        text = f"so {'Wait' if i % 6 == 0 else 'no'} <i>{i}</i>" if i % 5 else None
        row = Episode(prompt_ids=[1], response_ids=[2], text=text)
        await buffer.put(EpisodeGroup("gsm8k", [row]))
    monkeypatch.setattr(view, "MOST_LOOKED_THROUGH", 8)
    ids, page = await seen(browser, "groups?buffer=math&text=wait")
    assert ids == [19, 13]
    assert "Looked through 8 groups" in page
    assert "so <mark>Wait</mark> &lt;i&gt;18&lt;/i&gt;" in page
    ids, page = await seen(browser, link(page, "Next"))
    assert ids == [7]
    assert ">Next</a>" in page or "Looked through 8" in page
    monkeypatch.setattr(view, "LOOK_SECONDS", -1)
    ids, page = await seen(browser, "groups?buffer=math&text=nowhere")
    assert ids == []
    assert "Looked through 1 groups" in page
    assert "so far" in page


async def test_texts_are_found_as_they_stand(
    url: str, store: Store, browser: httpx.AsyncClient
) -> None:
    """Of damaged groups too: only texts are read, and their places are those of the original."""
    buffer = await store.buffer("math")
    row = Episode(prompt_ids=[1], response_ids=[2], text="İİİ, then İstanbul of 1453")
    [one] = await buffer.put(EpisodeGroup("gsm8k", [row, row]))
    await damage(url, one)
    for text, said in (("istanbul", "İstanbul"), ("İSTANBUL", "İstanbul"), ("THEN", "then")):
        ids, page = await seen(browser, f"groups?buffer=math&text={quote(text)}")
        assert ids == [one]
        assert f"<mark>{said}</mark>" in page
    assert all(len(view._folded(chr(code))) == 1 for code in range(0x110000))


async def test_what_has_no_text_is_decoded(
    store: Store, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math")

    def says(text: str, known: str | None = None) -> Episode:
        return Episode(prompt_ids=list(b"wait"), response_ids=list(text.encode()), text=known)

    ids = await buffer.put(
        [
            EpisodeGroup("gsm8k", rows)
            for rows in (
                [says("no, Wait a bit")],
                [says("no", "no"), says("oh, wait")],
                [says("wait", "put with another text")],
                [says("no"), says("yes")],
                [says("wait " * 100)],
            )
        ]
    )
    assert (await seen(browser, "groups?buffer=math&text=wait"))[0] == []
    decode_bytes(browser)
    monkeypatch.setattr(view, "MOST_DECODED", 300)
    found, page = await seen(browser, "groups?buffer=math&text=wait")
    assert found == [ids[1], ids[0]]
    assert "no, <mark>Wait</mark> a bit" in page
    assert "Looked through 5 groups." in page
    monkeypatch.setattr(view, "LOOK_SECONDS", -1)
    found, page = await seen(browser, "groups?buffer=math&text=wait")
    assert "Looked through 1 groups." in page
    found = []
    while ">Next</a>" in page:
        more, page = await seen(browser, link(page, "Next"))
        found += more
    assert found == [ids[1], ids[0]]


@both_engines
async def test_counting_ends(
    store: Store, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math")
    await buffer.put([group() for _ in range(5)])
    assert await buffer.count(limit=3) == 3
    assert await buffer.count(limit=5) == await buffer.count(limit=6) == 5
    monkeypatch.setattr(view, "MOST_COUNTED", 4)
    assert "More than 4 groups." in (await seen(browser, "groups?buffer=math"))[1]
    monkeypatch.setattr(view, "COUNT_SECONDS", -1)
    assert "Not counted" in (await seen(browser, "groups?buffer=math"))[1]


@both_engines
@pytest.mark.parametrize("sort", ["priority", "times_sampled", "last_sampled_at", "reward_mean"])
async def test_the_next_page_begins_where_this_one_ended(
    buffer: Buffer, browser: httpx.AsyncClient, sort: str
) -> None:
    """Also where the group that it ended with has moved since, or is gone."""
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
async def test_a_filter_that_overflows_is_no_fault_of_the_server(
    buffer: Buffer, browser: httpx.AsyncClient, engine_name: str
) -> None:
    await buffer.put(group())
    answer = await browser.get("groups?buffer=math&where=reward_mean * 1e308 * 1e308 > 1")
    assert answer.status_code == {"sqlite": 200, "postgresql": 400}[engine_name]
    if engine_name == "postgresql":
        assert "number that is too large" in answer.text
        assert "postgresql:" not in answer.text


async def test_what_was_typed_wrong_can_be_mended(
    buffer: Buffer, browser: httpx.AsyncClient
) -> None:
    await buffer.put(group())
    wrong = {
        "where": "reward_meen > 1",
        "tag": "level",
        "min_reward": "much",
        "sort": "reward",
        "at": "soon",
    }
    for name, value in wrong.items():
        asked = {"buffer": "math", "task": "gsm8k", "after": "5", "at": "1.0", "sort": "priority"}
        answer = await browser.get("groups", params=asked | {name: value})
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


async def test_groups_whose_columns_are_damaged_are_left_out(sqlite_url: str) -> None:
    """PostgreSQL keeps to types."""
    async with Store.open(sqlite_url) as store:
        await (await store.buffer("math")).put([group() for _ in range(8)])
    async with transaction(sqlite_url) as connection:
        spoilt: Any = {"tags": literal_column("'{'")}
        here = episode_group.c.id.in_([1, 5])
        await connection.execute(update(episode_group).where(here).values(spoilt))
    app = application(sqlite_url)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as browser,
    ):
        ids, page = await seen(browser, "groups?buffer=math")
        assert (ids, "says more): 5." in page) == ([8, 7, 6, 4], True)
        ids, page = await seen(browser, link(page, "Next"))
        assert (ids, "says more): 1." in page) == ([3, 2], True)
        downloaded = (await browser.get("groups.json?buffer=math")).json()
        assert [row["tags"] for row in downloaded] == ["{", {}, {}, {}, "{", {}, {}, {}]
        _, overview = await seen(browser, "")
        assert "says more): 1, 5." in overview
        assert "all 6 groups that are stored" in " ".join(overview.split())


async def test_pages_that_may_read_every_group_take_turns(
    buffer: Buffer, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are worked on at once keep no other page waiting."""
    await buffer.put(group())
    scans = ("sort=reward_mean", "where=reward_mean > 0", "min_reward=0", "run=a", "tag=a=1")
    quick = ("", "sort=priority", "task=gsm8k&status=completed", "prompt=a")
    at_once, may_go = [0], asyncio.Event()
    found = view._found

    async def slow(buffer: Buffer, asked: Groups, *rest: Any) -> Any:
        if asked.may_read_all:
            at_once.append(at_once[-1] + 1)
            await may_go.wait()
            at_once.append(at_once[-1] - 1)
        return await found(buffer, asked, *rest)

    monkeypatch.setattr(view, "_found", slow)
    waiting = [
        asyncio.create_task(seen(browser, f"groups?buffer=math&{asked}")) for asked in 2 * scans
    ]
    for asked in quick:
        await seen(browser, f"groups?buffer=math&{asked}")
    assert (at_once, any(task.done() for task in waiting)) == ([0, 1], False)
    may_go.set()
    await asyncio.gather(*waiting)
    assert at_once == [0, *[1, 0] * len(waiting)]
