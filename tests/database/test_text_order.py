"""Names are ordered by code points on both engines, whatever the locale of the server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from sqlalchemy import String, Text, create_mock_engine

import replaydb as rdb
from replaydb import Store
from replaydb.analysis.tables import groups_of, scan_prompts
from replaydb.database.tables.schema import metadata
from support.groups import group
from support.proxy import PASS, Fate, Message, Proxy

NAMES = ["a", "B", "_x", "é", "Z", "10", "9", "A b", "a-c"]
#: Texts whose order no caller sees: of an index that is read in part, or of a single row.
INTERNAL = {"group_status", "group_uid"}
TEXTS = {
    column.name
    for table in metadata.tables.values()
    for column in table.c
    if isinstance(column.type, String | Text)
} - INTERNAL
DEPENDENT = re.compile(rf'\b({"|".join(sorted(TEXTS))})\b(?! COLLATE "C")')


async def check_order(url: str) -> None:
    """Make the calls that return several names."""
    ordered = sorted(NAMES)
    async with Store.open(url, run="a") as store:
        for name in NAMES:
            await store.buffer(name)
        buffer = await store.buffer("a")
        await buffer.put([group(task=name, prompt_uid="p") for name in NAMES])
        await buffer.put([group(task="a", prompt_uid=name, version=1) for name in NAMES])
        assert [info.name for info in await store.buffers()] == ordered
        assert await store.buffer_names() == ordered
        stats = await buffer.stats()
        assert [task.task_name for task in stats.tasks] == ordered
        assert [each.task_name for each in stats.totals] == ordered
        keys = [key for key in await buffer.metrics() if re.match("buffer/task/.*/completed$", key)]
        assert [key.split("/")[2] for key in keys] == ordered
        prompts = [(each.task_name, each.prompt_uid) for each in await buffer.prompts()]
        assert prompts == sorted(prompts)
        versions = (await store.run_stats("a")).versions
        assert list(dict.fromkeys(each.task_name for each in versions)) == ordered
        for owner in NAMES:
            await buffer.lease(1, ttl=60, owner=owner)
        with pytest.raises(rdb.NotEnoughGroupsError) as caught:
            await buffer.sample(99, timeout=0)
        assert list(caught.value.leased_by) == ordered
        with pytest.raises(rdb.UnknownBufferError) as unknown:
            await store.buffer("other", create=False)
        assert list(unknown.value.known) == ordered


async def test_names_are_ordered_by_code_points(url: str) -> None:
    await check_order(url)


async def test_no_order_depends_on_the_locale_of_the_server(proxied_url: str, proxy: Proxy) -> None:
    """The locale of the server that tests use may have that order anyway."""
    found = set()

    def rule(message: Message) -> Fate:
        if message.sender == "client" and message.kind in (b"P", b"Q"):
            for clause in clauses(message.body.decode(errors="replace")):
                found.add(clause)
        return PASS

    proxy.rule = rule
    await check_order(proxied_url)
    assert [clause for clause in found if DEPENDENT.search(clause)] == []
    assert len([clause for clause in found if "COLLATE" in clause]) >= 5


def test_the_order_of_a_download_does_not_depend_on_the_locale_of_the_server() -> None:
    """The tasks of a prompt. The other downloads are ordered by id."""
    page = scan_prompts(groups_of(), 1).page("", "p", None, 9)
    dialect = create_mock_engine("postgresql+asyncpg://", lambda *_: None).dialect
    [clause] = clauses(str(page.compile(dialect=dialect)))
    assert [DEPENDENT.sub("", one) for one in clause.split(", ")] == [
        "episode_group.", '(episode_group.task_name COLLATE "C")'
    ]  # fmt: skip


def clauses(sql: str) -> Iterator[str]:
    """Yield the lists of expressions that ORDER BY is followed by."""
    for part in sql.split("ORDER BY ")[1:]:
        depth = 0
        for position, character in enumerate(part):
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth < 0:
                part = part[:position]
                break
        yield re.split(r"\b(?:LIMIT|FOR)\b", part)[0].strip()
