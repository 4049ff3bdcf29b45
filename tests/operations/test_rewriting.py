"""Payloads of format 1 are rewritten in format 2, while the store is used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner

import replaydb as rdb
from replaydb import Store
from replaydb.buffer.joining import Joining
from replaydb.cli import app
from replaydb.database import migrations
from replaydb.database.tables import records
from replaydb.database.tables.schema import payload
from replaydb.domain.episodes.context import GroupContext
from replaydb.operations import RewriteReport, rewrite_payloads, verify
from support.connections import transaction
from support.groups import conversation, episode, group
from support.invariants import check_invariants

LAYOUTS = pytest.mark.parametrize("layout", ["inside", "outside"])


async def formats(url: str) -> set[int]:
    async with transaction(url) as connection:
        return set(await connection.scalars(select(payload.c.codec_version)))


async def filled(url: str, store: Store) -> rdb.Buffer:
    """Put groups of every form and status in format 1; then let the store write format 2."""
    await migrations.write_format(url, 1)
    buffer = await store.buffer("math", capacity=rdb.Capacity(groups=100))
    await buffer.put([group(f"g{i}") for i in range(5)])
    await buffer.put(
        rdb.EpisodeGroup("chat", [conversation(), episode(1.0, text="hi")], prompt="?")
    )
    await buffer.open_group("code", "open", 4, prompt_ids=[1, 2])
    for position in (3, 1):
        await buffer.add_episode("open", episode(float(position)), position=position)
    await buffer.open_group("code", "empty", 2, prompt="later")
    await buffer.update(uids="g0", status="archived")
    await buffer.sample(2)
    await buffer.lease(1, ttl=600)
    assert await formats(url) == {1}
    await migrations.write_format(url, 2)
    return buffer


async def contents(buffer: rdb.Buffer) -> list[Any]:
    found = await buffer.get([one.id for one in await buffer.find()])
    return [(one, one.positions, one.times_sampled, one.times_replaced) for one in found]


@LAYOUTS
async def test_groups_are_the_same_afterwards(store: Store, url: str) -> None:
    buffer = await filled(url, store)
    before, draws = await contents(buffer), await buffer.draws()
    seen: list[RewriteReport] = []
    report = await rewrite_payloads(store, progress=seen.append)
    assert (report.num_groups, report.num_skipped) == (8, 0)
    assert seen[-1] == report
    assert await formats(url) == {2}
    assert await contents(buffer) == before
    assert await buffer.draws() == draws
    assert report.bytes_after == sum(one.num_bytes for one in await buffer.find())
    assert (await verify(store)).is_sound
    await check_invariants(url)
    for position in (0, 2):
        await buffer.add_episode("open", episode(0.5), position=position)
    [done] = await buffer.get(uids="open")
    assert (done.status, done.positions) == ("completed", (0, 1, 2, 3))
    assert done.context == GroupContext.of(None, [1, 2], None)
    await rewrite_payloads(store)  # what was encoded before this process knew of the format
    assert await rewrite_payloads(store) == RewriteReport()


async def test_it_continues_after_an_interruption(store: Store, url: str) -> None:
    buffer = await filled(url, store)
    before = await contents(buffer)

    def stop(report: RewriteReport) -> None:
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replaydb.operations.rewriting.BATCH_BYTES", 1)
        with pytest.raises(InterruptedError):
            await rewrite_payloads(store, progress=stop)
    assert await formats(url) == {1, 2}
    report = await rewrite_payloads(store)
    assert report.num_groups == 7
    assert await contents(buffer) == before
    assert await formats(url) == {2}


@LAYOUTS
async def test_damaged_and_changed_groups_are_skipped(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await filled(url, store)
    [damaged, replaced] = [one.id for one in await buffer.find(uids=["g1", "g2"])]
    several = records.payload_records
    done = False

    async def change(group_id: int) -> None:
        async with transaction(url) as connection:
            mine = payload.c.group_id == group_id
            await connection.execute(update(payload).where(mine).values(checksum=1))

    def interfere(*given: Any) -> Any:
        """Change a group after it was read."""
        nonlocal done
        if not done:
            done = True
            asyncio.run(change(replaced))
        return several(*given)

    await change(damaged)
    monkeypatch.setattr("replaydb.database.rewriting.payload_records", interfere)
    report = await rewrite_payloads(store)
    assert (report.num_groups, report.num_skipped) == (6, 2)
    assert await formats(url) == {1, 2}


def test_the_command(own_url: str) -> None:
    async def fill() -> None:
        async with Store.open(own_url) as store:
            await filled(own_url, store)

    asyncio.run(fill())
    result = CliRunner().invoke(app, ["db", "rewrite-payloads", "--url", own_url])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("rewrote 8 groups: ")
    assert asyncio.run(formats(own_url)) == {2}


@LAYOUTS
async def test_episodes_that_were_added_one_by_one_are_joined(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the episode of an unusable position, and as long as the group is not pending."""
    monkeypatch.setattr(Joining, "join_soon", lambda *_: None)
    buffer = await store.buffer("math")
    prompt = list(range(4096))
    for uid in ("complete", "open"):
        await buffer.open_group("code", uid, 9, prompt_ids=prompt, min_episodes=8)
        for i in range(8):
            one = rdb.Episode(prompt_ids=prompt, response_ids=[i] * 64, reward=float(i))
            await buffer.add_episode(uid, one, position=i + (i > 3))
    await buffer.fail_episode("complete", 4, "timeout")
    before, [group] = await contents(buffer), await buffer.get(uids="complete")
    report = await rewrite_payloads(store)
    assert (report.num_groups, report.num_skipped) == (1, 0)
    assert report.bytes_after < 0.4 * report.bytes_before
    assert await contents(buffer) == before
    [joined] = await buffer.get(uids="complete")
    assert (joined, joined.positions) == (group, (0, 1, 2, 3, 5, 6, 7, 8))
    assert (await rewrite_payloads(store)).num_groups == 0
    assert (await verify(store)).problems == ()
