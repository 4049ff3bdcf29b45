from __future__ import annotations

import re
from html import unescape

import httpx
import pytest

from replaydb import Buffer, Episode, EpisodeGroup, Store, col
from replaydb.ui.views import groups as view
from support.groups import episode, group

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
        "where=&task=&min_reward=&text=&after=": ([8, 7, 6, 5], "8 groups."),
        "after=999": ([8, 7, 6, 5], "no longer there: this is the first page"),
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
    assert "Looked through 4 groups" in page
    assert "so far" in page


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
