"""Drawn groups are delivered, even if they are changed or deleted before they are read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from replaydb import Buffer, Store
from replaydb.database.repository.draw_request import Drawn
from replaydb.database.repository.draws import read_in_snapshot
from replaydb.database.runtime.session import Session
from replaydb.database.tables.records import Stored
from support.groups import group, groups
from support.in_transaction import await_in_transaction
from support.proxy import PASS, Fate, Message, Proxy

#: Settings with which the payloads of drawn groups are gone before they are read, and the groups
#: to delete meanwhile. The delete waits for the commit of the draw.
LOSSES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "deleted by another call": ({}, [1, 2, 3]),
    "dropped by the draw": ({"max_times_sampled": 1, "archived_payload": "drop"}, [99]),
}


@pytest.mark.usefixtures("from_snapshots")
@pytest.mark.parametrize("loss", LOSSES)
async def test_groups_deleted_before_they_are_read_are_delivered(
    store: Store, url: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the snapshot that a draw takes while it has the locks."""
    settings, deleted = LOSSES[loss]
    buffer = await store.buffer("math", **settings)
    await buffer.put(groups(3))
    loop = asyncio.get_running_loop()

    async with Store.open(url) as other:
        there: Buffer = await other.buffer("math")

        def read_late(session: Session, drawn: Drawn, fields: None) -> Stored:
            await_in_transaction(there.delete(deleted), loop)
            return read_in_snapshot(session, drawn, fields)

        monkeypatch.setattr("replaydb.database.repository.draws.read_in_snapshot", read_late)
        batch = await buffer.sample(3)
    assert sorted(one.group_uid for one in batch.groups) == ["gsm8k-0", "gsm8k-1", "gsm8k-2"]
    assert all(one.episodes[0].response_ids.tolist() == [3, 4, 5] for one in batch.groups)
    assert await buffer.count(statuses="completed") == 0


@pytest.mark.usefixtures("from_snapshots")
@pytest.mark.parametrize("stalled", ["last statement", "snapshot"])
async def test_a_snapshot_is_taken_while_the_last_statement_runs(
    proxied_url: str, proxy: Proxy, stalled: str
) -> None:
    """Neither waits for the other, and COMMIT waits for both."""
    texts = {
        "last statement": b"INTO commit_proof",
        "snapshot": b"BEGIN ISOLATION LEVEL REPEATABLE",
    }
    answered, sent = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def rule(message: Message) -> Fate:
        found = [one for one, text in texts.items() if text in message.body]
        sent.extend(found)
        if message.asks_to_commit and message.wrote:
            sent.append("commit")
        if message.sender == "server" and message.kind == b"Z" and len(set(sent)) == 2:
            loop.call_soon_threadsafe(answered.set)
        return Fate(0, "stall") if found == [stalled] else PASS

    async with Store.open(proxied_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(groups(3))
        proxy.rule = rule
        drawing = asyncio.create_task(buffer.sample(3))
        await asyncio.wait_for(answered.wait(), 60)  # the other one
        await asyncio.sleep(0.2)
        assert "commit" not in sent
        proxy.heal()
        assert len(await drawing) == 3


async def test_draws_without_pause_do_not_starve_puts(store: Store) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(4))
    await asyncio.gather(buffer.sample(1), buffer.put(group("connects")))
    drawn = 0

    async def draw_for_ever() -> None:
        nonlocal drawn
        while True:
            await buffer.sample(1)
            drawn += 1

    drawing = asyncio.create_task(draw_for_ever())
    for i in range(10):
        await buffer.put(group(f"new-{i}"))
    drawing.cancel()
    assert drawn < 100
