"""Group, episode and comparison pages."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import numpy as np
import pytest
from sqlalchemy import update

import replaydb as rdb
from replaydb import Buffer, Episode, EpisodeGroup, InvalidInputError, Turn
from replaydb.database.tables.schema import payload
from replaydb.domain.episodes import unrepeated
from replaydb.domain.episodes.ragged import joined
from replaydb.domain.episodes.segments import Segment
from replaydb.packs.folder import Folder
from replaydb.ui import application, differences, tokens
from replaydb.ui.views import group as view
from support.agents import turn
from support.connections import transaction
from support.damage import damage
from support.engines import both_engines
from support.groups import conversation, episode, group, groups
from support.pages import Page, decode_bytes, read

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202eevil\u202c</pre>"
SHOWN = "<script>alert(1)</script>\\x1b[31m\\u202eevil\\u202c</pre>"
STORED, GRPO = (
    "Episodes, with stored advantages",
    "Episodes, with GRPO advantages (sample standard deviation, eps 1e-4), as none are stored",
)
HISTORY, ANNOTATIONS = "Events, oldest first", "Annotations, newest first"


async def get(
    browser: httpx.AsyncClient, address: str, status: int = 200, **query: str | int
) -> Page:
    answer = await browser.get(address, params={"buffer": "math", **query})
    assert answer.status_code == status, answer.text
    return read(answer.text)


@both_engines
async def test_episodes_of_a_group(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    episodes = [
        Episode(prompt_ids=[1], response_ids=[2] * (i + 1), reward=reward, text=f"text {i}",
                policy_version=i, finish_reason="stop")
        for i, reward in enumerate((1.0, 0.25, None))
    ]  # fmt: skip
    [one] = await buffer.put(
        EpisodeGroup("t", episodes, prompt_uid="p/1", prompt="what?", tags={"level": "schwer"})
    )
    page = await get(browser, "/group", id=one)
    rows = page.tables[GRPO][1:]
    assert [row[:2] for row in rows] == [
        ["episode 0", "1"],
        ["episode 1", "0.25"],
        ["episode 2", "-"],
    ]
    expected = rdb.training.advantages.grpo(np.array([1.0, 0.25]), [0, 0])
    assert [row[2] for row in rows] == [*(f"{value:.4g}" for value in expected), "-"]
    assert [row[3:] for row in rows] == [
        [str(i + 2), str(i + 1), "1", str(i), "stop"] for i in range(3)
    ]
    assert ("h2", "Prompt") in page.headings
    assert "what?" in page.text
    assert [text for _, text in page.named("pre")] == ["what?", "text 0", "text 1", "text 2"]
    assert page.links["p/1"] == "./prompt?buffer=math&uid=p%2F1&task=t"
    assert page.links["episode 1"] == f"./episode?buffer=math&group={one}&position=1"


async def test_stored_advantages(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    [one] = await buffer.put(
        EpisodeGroup(
            "t", [episode(1.0, advantage=0.125), episode(0.0, advantage=-7.0), episode(1.0)]
        )
    )
    page = await get(browser, "/group", id=one)
    assert [row[2] for row in page.tables[STORED][1:]] == ["0.125", "-7", "-"]


@both_engines
async def test_history_of_a_group(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    await buffer.put(groups(3, version=0))
    await buffer.advance_policy(2)
    batch = await buffer.sample(3, rdb.Prioritized(), step=4)
    lease = await buffer.lease(1, ttl=60, step=5, owner="trainer <7>")
    [one] = lease.batch.ids
    leased = await get(browser, "/group", id=one)
    assert "Leased by trainer <7> since" in " ".join(leased.text.split())
    assert leased.tables[HISTORY][-1][7] == "leased"
    await lease.nack(reason="too <b>long</b>")
    async with buffer.lease(1, ttl=60, step=6):
        pass
    page = await get(browser, "/group", id=one)
    draws = (await buffer.draws(group_id=one))[::-1]
    assert len(draws) == 3
    rows = page.tables[HISTORY][1:]
    assert [row[1].split(":")[-1].strip() for row in rows] == ["put", *["drawn"] * 3, "archived"]
    for row, draw in zip(rows[1:4], draws, strict=True):
        i = draw.group_ids.index(one)
        assert row[1] == f"draw {draw.id}: drawn"
        assert row[2:7] == [
            "test", str(draw.step), f"{draw.probabilities[i]:.4g}", f"{draw.weights[i]:.4g}", "2",
        ]  # fmt: skip
        assert row[7].startswith(str(draw.outcomes[i]))
    assert rows[2][7] == "nacked: too <b>long</b>"
    assert rows[4][7] == "acked"  # the reason of an event without an outcome
    assert page.links["6"] == "./step?buffer=math&step=6&run=test"
    assert batch.draw_id == draws[0].id


async def test_draws_before_it_was_replaced(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    [one] = await buffer.put(group("a"))
    await buffer.sample(1)
    await buffer.put(group("a"), on_duplicate="replace")
    await buffer.sample(1)
    rows = (await get(browser, "/group", id=one)).tables[HISTORY]
    assert sorted(row[1].split(": ")[-1] for row in rows[1:]) == [
        "drawn",
        "drawn, content replaced since",
        "put",
        "replaced",
    ]


async def test_many_episodes_and_draws_are_paginated(
    browser: httpx.AsyncClient, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "ROWS", 2)
    [one] = await buffer.put(group(rewards=range(5)))
    for step in range(3):
        await buffer.sample(1, step=step)
    seen, steps = [], []
    page = await get(browser, "/group", id=one)
    while True:
        seen += [row[0] for row in page.tables[GRPO][1:]]
        if "Next episodes" not in page.links:
            break
        page = read((await browser.get(page.links["Next episodes"])).text)
    assert seen == [f"episode {i}" for i in range(5)]
    page = await get(browser, "/group", id=one)
    steps = [row[3] for row in page.tables[HISTORY]]
    older = read((await browser.get(page.links["Older draws"])).text)
    assert (steps, [row[3] for row in older.tables[HISTORY]]) == (
        ["step", "-", "1", "2"],
        ["step", "-", "0"],
    )


@pytest.mark.parametrize(
    ("how", "layout", "problem"),
    [
        ("dropped", "inside", "tokens were dropped"),
        ("damaged", "inside", "tokens are damaged"),
        ("too large", "inside", "more than 1 bytes"),
        ("missing", "outside", "cannot be read: {location}: {folder}/"),
        ("refused", "outside", "cannot be read: {location}: Permission denied"),
        ("silent", "outside", "cannot be read: {location}: no response in 0.05 seconds"),
    ],
)
async def test_pages_without_readable_tokens(
    browser: httpx.AsyncClient,
    buffer: Buffer,
    url: str,
    tmp_path: Path,
    how: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {0: "so it is 4", 1: "so it is 5"}
    [one] = await buffer.put(
        EpisodeGroup(
            "t",
            [
                Episode(prompt_ids=[1], response_ids=[2], reward=i / 2, text=texts.get(i))
                for i in range(3)
            ],
        )
    )
    folder = tmp_path / "payloads"
    message = problem.format(location=folder.as_uri(), folder=folder)
    match how:
        case "dropped":
            await buffer.update_settings(archived_payload="drop", max_times_sampled=1)
            await buffer.sample(1)
        case "damaged":
            await damage(url, one)
        case "too large":
            monkeypatch.setattr(view, "MAX_BYTES", 1)
        case "missing":
            folder.rename(tmp_path / "elsewhere")
        case "refused":
            refusal = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            monkeypatch.setattr(Folder, "read", AsyncMock(side_effect=refusal))
        case "silent":
            await get(browser, "/group", id=one)  # the payload store is open before it hangs
            monkeypatch.setattr(Folder, "read", lambda *_: asyncio.Event().wait())
            monkeypatch.setattr(view, "READ_SECONDS", 0.05)
    page = await get(browser, "/group", id=one)
    assert [row[1] for row in page.tables[GRPO][1:]] == ["0", "0.5", "1"]
    assert message in page.text
    has_texts = how != "dropped"  # dropping a payload drops the texts, too
    assert [it for _, it in page.named("pre")] == [*texts.values()] * has_texts
    for address, query, shown in (
        ("/episode", {"position": 1}, [texts[1]]),
        ("/episode", {"position": 1, "show": "tokens"}, [texts[1]]),
        ("/episode", {"position": 2}, []),
        ("/compare", {"a": 0, "b": 1}, ["so it is 45"]),
        ("/compare", {"a": 0, "b": 1, "by": "tokens"}, ["so it is 45"]),
        ("/compare", {"a": 0, "b": 2}, []),
    ):
        page = await get(browser, address, group=one, **query)
        assert message in page.text
        assert [it for _, it in page.named("pre")] == shown * has_texts
        assert not [it for it in page.links if "okens" in it]
        assert {"episode 0", "Previous episode"} & page.links.keys()
    if how == "missing":
        decode_bytes(browser)  # so that the text search reads tokens
        assert message in (await get(browser, "/groups", 503, text="4 and more")).text
        (tmp_path / "elsewhere").rename(folder)


async def test_missing_groups_and_episodes(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    [one] = await buffer.put(group())
    await get(browser, "/group", 404, id=one + 1)
    await get(browser, "/group", 400, id="x")
    await get(browser, "/group", 404, id=one, buffer="other")
    await get(browser, "/episode", 404, group=one, position=2)
    await get(browser, "/episode", 400, group=one, position=0, by="nothing")
    await get(browser, "/compare", 404, group=one, a=0, b=7)


async def test_texts_are_escaped(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    hostile = Episode(
        prompt_ids=[1], response_ids=[2], text=f"{HOSTILE}\0\ud800", finish_reason=HOSTILE,
        metadata={HOSTILE: HOSTILE}, reward=1.0,
    )  # fmt: skip
    [one] = await buffer.put(
        EpisodeGroup(HOSTILE, [hostile, hostile], prompt_uid=HOSTILE, group_uid=HOSTILE,
                     tags={HOSTILE: [HOSTILE]},
                     prompt=[{"role": HOSTILE, "content": f"{HOSTILE}\0\ud800"}])
    )  # fmt: skip
    for address, query in {
        "/group": {"id": one},
        "/episode": {"group": one, "position": 0},
        "/compare": {"group": one, "a": 0, "b": 1},
    }.items():
        answer = await browser.get(address, params={"buffer": "math", **query})
        page = read(answer.text)
        assert SHOWN in page.text
        assert not page.named("script")
        assert not {"\x1b", "\u202e"} & set(answer.text)


@pytest.mark.parametrize("by", ["logprob", "advantage", "mask", "version"])
async def test_tokens_turn_by_turn(browser: httpx.AsyncClient, buffer: Buffer, by: str) -> None:
    one = conversation()
    [id_] = await buffer.put(EpisodeGroup("t", [one, episode(advantage=-0.5)]))
    page = await get(browser, "/episode", group=id_, position=0, show="tokens", by=by)
    assert [text for name, text in page.headings if name == "h2"][1:] == [
        f"turn {i} of 2: {what}" for i in (1, 2) for what in ("context", "response")
    ]
    shown = [
        (attributes["title"], text.strip())
        for attributes, text in page.named("span")
        if "title" in attributes
    ]
    assert [text for _, text in shown] == [str(it) for it in one.token_ids]
    assert [title for title, _ in shown] == {
        "logprob": ["no logprob"] * 2 + ["logprob -0.5"] + ["no logprob"] * 3,
        "advantage": ["no advantage"] * 6,
        "mask": ["not in the loss"] * 2
        + ["in the loss", "not in the loss", "in the loss", "not in the loss"],
        "version": ["no version"] * 2 + ["version 3", "no version", "version 4", "version 5"],
    }[by]
    [table] = page.tables.values()
    assert [row[:2] for row in table[1:]] == [
        [str(i), str(it)] for i, it in enumerate(one.token_ids)
    ]
    assert table[3][3:] == ["yes", "-0.5", "-", "3"]
    assert page.text.count('tool: "python"') == 1


async def test_empty_responses_are_shown(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    turns = [
        Turn(prompt_ids=[65], response_ids=[66], reward=0.5),
        Turn(prompt_ids=[67], response_ids=[], reward=-0.5, finish_reason="length"),
        Turn(prompt_ids=[68], response_ids=[]),
    ]
    await buffer.put(EpisodeGroup("t", [Episode(turns=turns)]))
    decode_bytes(browser)
    for show in ("tokens", "text"):
        page = await get(browser, "/episode", group=1, position=0, show=show)
        names = [text for name, text in page.headings if name == "h2" and "turn " in text]
        assert names == [
            f"turn {i} of 3: {what}" for i in (1, 2, 3) for what in ("context", "response")
        ]
        assert "reward -0.5, finish reason: length" in page.text


async def test_a_tokenizer_decodes_tokens(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    decode_bytes(browser)
    words = [list("né 🦕\n<b>".encode()), [*"né ".encode(), 999, *b"2"]]
    [one] = await buffer.put(
        EpisodeGroup("t", [Episode(prompt_ids=list(b"Q:"), response_ids=it) for it in words])
    )
    page = await get(browser, "/group", id=one)
    assert [text for _, text in page.named("pre")] == ["Q:", "né 🦕\n<b>", "né ⟨999⟩2"]
    page = await get(browser, "/episode", group=one, position=0)
    assert [text for _, text in page.named("pre")] == ["Q:", "né 🦕\n<b>"]
    page = await get(browser, "/episode", group=one, position=0, show="tokens")
    assert [text for _, text in page.named("pre")] == ["Q:", "n⟨195⟩é ⟨240⟩⟨159⟩⟨166⟩🦕↵\n<b>"]
    page = await get(browser, "/compare", group=one, a=0, b=1)
    assert [text for _, text in page.named("del")][1:] == ["🦕\n<b>"]
    assert [text for _, text in page.named("ins")][1:] == ["⟨999⟩2"]


async def test_advantages_of_tokens(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    """Advantages from the token extras, coloured relative to the largest in the group."""
    strong, weak = (
        Episode(
            prompt_ids=[1],
            response_ids=[2, 3],
            advantage=9.0,
            token_extras={"advantages": np.array(values, np.float32)},
        )
        for values in ([-4.0, 0.0], [1.0, 2.0])
    )
    [one] = await buffer.put(EpisodeGroup("t", [strong, weak]))
    page = await get(browser, "/episode", group=one, position=1, show="tokens", by="advantage")
    assert [
        (attributes["class"], attributes["title"])
        for attributes, _ in page.named("span")
        if "title" in attributes
    ] == [("t none", "no advantage"), ("t p1", "advantage 1"), ("t p2", "advantage 2")]
    colours = [attributes["class"] for attributes, _ in page.named("span")][:9]
    assert colours == [f"t {it}" for it in ["m4", "m3", "m2", "m1", "a0", "p1", "p2", "p3", "p4"]]


async def test_advantages_of_grpo_are_coloured(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    one, equal = await buffer.put([group(rewards=[2.0, 0.0, 1.0]), group(rewards=[1.0, 1.0])])
    page = await get(browser, "/group", id=one)
    assert "population standard deviation 0.8165" in page.text
    assert [row[2] for row in page.tables[GRPO][1:]] == ["0.9999", "-0.9999", "0"]
    for position, (colour, value) in enumerate((("p4", "0.9999"), ("m4", "-0.9999"), ("a0", "0"))):
        page = await get(
            browser, "/episode", group=one, position=position, show="tokens", by="advantage"
        )
        assert f"advantage {value} (GRPO);" in page.text
        assert "of their episodes: GRPO advantages (sample standard deviation" in page.text
        titled = [it for it, _ in page.named("span") if "title" in it]
        assert [(it["class"], it["title"]) for it in titled] == [
            *[("t none", "no advantage")] * 2,
            *[(f"t {colour}", f"advantage {value}")] * 3,
        ]
    page = await get(browser, "/episode", group=equal, position=0, show="tokens", by="advantage")
    legend = [text for _, text in page.named("li")][-2:]
    assert legend == ["0", "not in the loss, or no advantage"]
    page = await get(browser, "/compare", group=one, a=0, b=1)
    [table] = page.tables.values()
    assert [row[2] for row in table[1:]] == ["0.9999", "-0.9999"]


@both_engines
@pytest.mark.parametrize("layout", ["inside", "outside"])
async def test_a_long_trajectory_with_large_extras(
    browser: httpx.AsyncClient, buffer: Buffer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages read only tokens, and make arrays of those that they show."""
    experts = np.ones((400, 48, 8), np.uint8)
    fields: dict[str, Any] = {"policy_version": 2, "token_extras": {"experts": experts[:59]}}
    turns = [Turn(prompt_ids=range(40), response_ids=range(20), **fields)]
    for i in range(1, 30):
        fields["token_extras"] = {"experts": experts[: 60 + 6 * i - 1]}
        turns.append(Turn(parent=turns[-1], new_ids=range(4), response_ids=[65, 66], **fields))
    turns.append(Turn(parent=turns[5], prompt_ids=range(50), response_ids=[67]))
    one = Episode(turns=turns, reward=1.0)
    count = 60 + 29 * 6 + 11
    [id_] = await buffer.put(EpisodeGroup("t", [one, one]))
    [info] = await buffer.find()
    assert info.num_bytes > 50_000
    monkeypatch.setattr(view, "MAX_BYTES", 10_000)
    monkeypatch.setattr("replaydb.ui.views.episode.TOKENS", 20)
    monkeypatch.setattr(tokens, "TEXT_TOKENS", 20)
    async with transaction(url) as connection:  # what is not read is not checked
        of_experts = payload.c.field == "experts"
        await connection.execute(update(payload).where(of_experts).values(checksum=0))
        await connection.commit()
    for name in ("token_ids", "response_ids", "loss_mask", "logprobs", "policy_version"):
        monkeypatch.setattr(Episode, name, None)  # these are arrays of all turns
    made: list[int] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = original(*args)
            made.append(len(found))
            return found

        return call

    monkeypatch.setattr(Segment, "values", counted(Segment.values))
    monkeypatch.setattr(unrepeated, "joined", counted(joined))
    for by in ("logprob", "mask", "advantage", "version"):
        page = await get(browser, "/episode", group=id_, position=0, show="tokens", by=by, part=2)
        assert len([it for it, _ in page.named("span") if "title" in it]) == 20
    names = [text for name, text in page.headings if name == "h2"]
    assert names[1] == "turn 1 of 31: response"
    page = await get(browser, "/episode", group=id_, position=0, show="tokens", part=99)
    names = [text for name, text in page.headings if name == "h2"]
    assert names[-2:] == [
        "turn 31 of 31: context after 40 tokens of turn 6",
        "turn 31 of 31: response",
    ]
    assert f"to {count - 1} of {count}" in page.text
    decode_bytes(browser)
    seen = ""
    for part in range(-(-count // 20)):
        page = await get(browser, "/episode", group=id_, position=0, part=part)
        seen += "".join(text for _, text in page.named("pre"))
    assert seen.count("AB") == 29
    assert seen.endswith("C")
    assert max(made) <= 60
    page = await get(browser, "/group", id=id_)
    assert page.text.count("turn 31 of 31: response") == 2
    page = await get(browser, "/compare", group=id_, a=0, b=1)
    assert "No differences" in page.text
    monkeypatch.setattr(view, "MAX_BYTES", 500)
    page = await get(browser, "/episode", group=id_, position=0)
    assert "The tokens are not shown: they have more than 500 bytes." in page.text


async def test_turns_without_a_tokenizer(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    """The page shows the stored prompt and text, and a table of turns."""
    last = Turn(prompt_ids=[4], response_ids=[5, 6], reward=1.0, finish_reason="stop")
    one = Episode(turns=[*conversation().turns, last], text="all turns")
    prompt: list[dict[str, Any]] = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]},
    ]
    [id_] = await buffer.put(EpisodeGroup("t", [one], prompt=prompt))
    page = await get(browser, "/episode", group=id_, position=0)
    assert [text for _, text in page.named("pre")] == [
        'user: what?\n\nassistant:\ntool_calls: [{"name": "search"}]',
        "all turns",
    ]
    assert page.tables["Turns of the episode"][1:] == [
        ["1", "-", "2", "1", "0.25", "tool_calls", 'tool: "python"'],
        ["2", "-", "1", "2", "0.5", "-", ""],
        ["3", "-", "1", "2", "1", "stop", ""],
    ]
    assert "The prompt of turns 2, 3 does not start with all tokens" in page.text
    assert "finish reason: stop." in page.text
    assert (await get(browser, "/group", id=id_)).tables[GRPO][1][-1] == "stop"
    decode_bytes(browser)
    page = await get(browser, "/episode", group=id_, position=0)
    assert "reward 0.25, finish reason: tool_calls; tool:" in page.text
    page = await get(browser, "/group", id=id_)
    *_, (_, text) = page.named("pre")  # without the first context, which is the prompt
    assert text.split("\n") == [
        *("turn 1 of 3: response", "\\x03", "turn 2 of 3: context", "\\x04"),
        *("turn 2 of 3: response", "\\x05\\x06", "turn 3 of 3: context", "\\x04"),
        *("turn 3 of 3: response", "\\x05\\x06"),
    ]


async def test_parts_do_not_split_characters(
    browser: httpx.AsyncClient, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TEXT_TOKENS", 50)
    decode_bytes(browser)
    text = "x" + "🦕" * 150
    one = Episode(prompt_ids=[1], response_ids=[*text.encode(), 999])
    [id_] = await buffer.put(EpisodeGroup("t", [one, episode()], prompt_ids=[*text.encode()] * 4))
    page = await get(browser, "/group", id=id_)
    assert "�" not in page.text
    assert "404 more tokens." in page.text
    assert "202 more tokens of episode 0" in page.links
    seen = [
        shown
        for part in range(13)
        for _, shown in (await get(browser, "/episode", group=id_, position=0, part=part)).named(
            "pre"
        )
    ]
    assert "".join(seen) == "\\x01" + text + "⟨999⟩"
    monkeypatch.setattr("replaydb.ui.views.episode.TOKENS", 50)
    for part in (1, 12):
        page = await get(browser, "/episode", group=id_, position=0, part=part, show="tokens")
        assert "�" not in page.text
    assert [shown for _, shown in page.named("span")][-2:] == ["🦕", "⟨999⟩"]


async def test_long_episodes_are_split_into_parts(
    browser: httpx.AsyncClient, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "CHARACTERS", 7)
    monkeypatch.setattr(tokens, "TOKENS", 4)
    monkeypatch.setattr("replaydb.ui.views.episode.TOKENS", 4)
    text = "0123456789abcdef"
    one = Episode(token_ids=range(9), loss_mask=[True] * 9, text=text)
    [id_] = await buffer.put(EpisodeGroup("t", [one]))
    for query, whole in {"text": text, "tokens": "".join(f"{i} " for i in range(9))}.items():
        seen = ""
        page = await get(browser, "/episode", group=id_, position=0, show=query)
        for _ in range(9):
            seen += "".join(shown for _, shown in page.named("pre"))
            if "Next part" not in page.links:
                break
            page = read((await browser.get(page.links["Next part"])).text)
        assert seen == whole
        page = await get(browser, "/episode", group=id_, position=0, show=query, part=99)
        assert "Previous part" in page.links
    decode_bytes(browser)
    page = await get(browser, "/episode", group=id_, position=0, show="tokens", part=1)
    assert [shown for _, shown in page.named("pre")] == ["\\x04\\x05\\x06\\x07"]


async def test_a_pending_group(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    one = await buffer.open_group("t", "g", 2, prompt="what?", deadline=3600, min_episodes=1)
    page = await get(browser, "/group", id=one)
    assert "No episodes yet." in page.text
    names = [name for _, name in page.named("dt")]
    facts = dict(zip(names, (text for _, text in page.named("dd")), strict=True))
    end = ") (then completed if it has at least 1 episode, else failed)"
    assert facts["deadline"].endswith(end)
    await buffer.add_episode("g", episode(0.5), position=1)
    page = await get(browser, "/group", id=one)
    assert page.tables[GRPO][1][:2] == ["episode 1", "0.5"]
    assert "Reward 0.5" in (await get(browser, "/episode", group=one, position=1)).text


@both_engines
async def test_trajectories(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    """Positions without an episode, agents, and turns that are not trained on."""
    one = await buffer.open_group("t", "g", 3, min_episodes=2)
    first = turn("t0", agent="main")
    for each in (first, turn("t1", first, agent="search"), turn("t2", first, agent="search")):
        await buffer.append_turn("g", 0, each)
    await buffer.finish_episode("g", 0, discarded=["t1"])
    await buffer.fail_episode("g", 1, "no <b>answer</b>")
    await buffer.claim(ttl=60, owner="worker-7")
    page = await get(browser, "/group", id=one)
    rows = page.tables["Missing"][1:]
    assert [row[:5] for row in rows] == [
        ["1", "episode", "0", "0", "-"],
        ["2", "episode", "0", "0", "worker-7"],
    ]
    assert rows[0][6] == "no <b>answer</b>"
    await buffer.update_settings(requires="reward")
    [other] = await buffer.put(group("waits", rewards=[None]))
    page = await get(browser, "/group", id=other)
    assert "waits for reward of 1 of 1 episodes" in page.text
    assert [row[:2] for row in page.tables["Missing"][1:]] == [["0", "reward"]]
    page = await get(browser, "/episode", group=one, position=0)
    assert [row[:2] for row in page.tables["Turns of the episode"][1:]] == [
        ["1", "main"], ["2, discarded", "search"], ["3", "search"],
    ]  # fmt: skip
    decode_bytes(browser)
    page = await get(browser, "/episode", group=one, position=0)
    assert "discarded, not in the loss; agent search, reward" in page.text


@both_engines
async def test_values_that_arrived_later(
    browser: httpx.AsyncClient, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    [one, other] = await buffer.put([EpisodeGroup("t", [conversation()], group_uid="g"), group()])
    label = {"label": HOSTILE, "old": [1, None]}
    for values in (
        rdb.Annotation("g", 0, reward=0.25),
        rdb.Annotation("g", 0, turn=1, reward=2.0, metadata=label),
        rdb.Annotation("g", 0, turn=1, metadata={"old": "x" * 200}),
    ):
        await buffer.annotate(values, author="a <b>judge</b>", policy_version=1234)
    page = await get(browser, "/group", id=one)
    rows = page.tables[ANNOTATIONS][1:]
    assert [row[1:6] for row in rows] == [
        ["0", "2", "metadata: old", f'"{"x" * 76}...', "[1, null]"],
        ["0", "2", "metadata: label", f'"{SHOWN.replace("x1b", "u001b")}"', "-"],
        ["0", "2", "metadata: old", "[1, null]", "-"],
        ["0", "2", "reward", "2", "0.5"],
        ["0", "-", "reward", "0.25", "0.75"],
    ]
    assert {tuple(row[6:]) for row in rows} == {("a <b>judge</b>", "1,234", "test")}
    assert page.links["0"] == f"./episode?buffer=math&group={one}&position=0"
    assert ANNOTATIONS not in (await get(browser, "/group", id=other)).tables
    monkeypatch.setattr(view, "ROWS", 2)
    assert len((await get(browser, "/group", id=one)).tables[ANNOTATIONS]) == 3


async def test_episodes_beside_a_position_without_one(
    browser: httpx.AsyncClient, buffer: Buffer
) -> None:
    one = await buffer.open_group("t", "g", 3, min_episodes=2)
    for position in (0, 2):
        await buffer.add_episode("g", episode(0.5), position=position)
    await buffer.fail_episode("g", 1, "timeout")
    page = await get(browser, "/episode", group=one, position=0)
    assert "Previous episode" not in page.links
    page = read((await browser.get(page.links["Next episode"])).text)
    assert page.headings[0][1].startswith("Episode 2")
    assert "Next episode" not in page.links
    assert page.links["Previous episode"].endswith("position=0&show=text&by=logprob")


async def test_differences_of_two(browser: httpx.AsyncClient, buffer: Buffer) -> None:
    texts = "first we add 3 and 4", "first we add 3 to 5"
    episodes = [
        Episode(prompt_ids=[1], response_ids=[2, 3, 4 + i], text=text, reward=float(i))
        for i, text in enumerate([*texts, texts[0]])
    ]
    [one] = await buffer.put(EpisodeGroup("t", episodes))
    page = await get(browser, "/compare", group=one, a=0, b=1)
    segments = [(tag, text) for tag, _, text in page.elements if tag in ("del", "ins")][2:]
    assert segments == [("del", "and"), ("ins", "to"), ("del", "4"), ("ins", "5")]
    page = await get(browser, "/compare", group=one, a=0, b=1, by="tokens")
    assert [text for _, text in page.named("pre")] == ["2 3 4 5 "]
    page = await get(browser, "/compare", group=one, a=0, b=0)
    assert "No differences: 6 words.\n" in page.text
    page = await get(browser, "/compare", group=one, a=0, b=2)
    assert "No differences: 6 words. The tokens differ." in page.text


async def test_differences_of_long_episodes(
    browser: httpx.AsyncClient, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [7] * 25_000
    episodes = [
        Episode(prompt_ids=[1], response_ids=[*ids, *end, *ids]) for end in ([8, 9], [9, 8, 8])
    ]
    [one] = await buffer.put(EpisodeGroup("t", episodes))
    page = await get(browser, "/compare", group=one, a=0, b=1)
    text = " ".join(page.text.split())
    assert "Compared by tokens, not by words: an episode has no stored text." in text
    assert "99.9% of the tokens are equal. The first 25,000 are identical." in text
    assert "… 24,920 tokens …" in text
    assert [shown for _, shown in page.named("ins")][1:] == ["9 ", "8 "]
    monkeypatch.setattr(differences, "MAX_ITEMS", 1)
    page = await get(browser, "/compare", group=one, a=0, b=1)
    text = " ".join(page.text.split())
    assert (
        "Compared in part: between the common prefix and suffix, the first 1 of 10 tokens of "
        "episode 0, and the first 1 of 11 of episode 1."
    ) in text
    assert "equal" not in text


def test_a_missing_tokenizer_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="tokenizer: expected an existing file or folder"):
        application(url, tokenizer=tmp_path / "nowhere")
