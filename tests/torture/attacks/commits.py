"""A connection cut around COMMIT: nothing is doubled, nothing is reported that is not so.

A relay cuts between the server's COMMIT and its answer, before COMMIT arrives, or while it is in
flight, under every kind of write, alone and concurrent. Each call is made once. At the end a lease
is cut off and the server cannot be asked: what it holds is returned when the network is good again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import replaydb as rdb
from replaydb import Buffer, Store
from support.groups import episode, group
from support.proxy import CLOSE, PASS, Fate, Message, Moment, Proxy, cut_commits, running_proxy
from torture import judge
from torture.arena import Arena
from torture.judge import Tables

PROMISES = (1, 2, 3, 11)
ENGINES = ("postgresql",)
MOMENTS: tuple[Moment, ...] = ("answer", "request", "flight")
#: Not told what became of a call. Where that is so, either may be.
UNKNOWN = "unknown"


async def attack(arena: Arena) -> None:
    """Every kind of write under one kind of cut."""
    moment = arena.chance.choice(MOMENTS)
    every = arena.chance.choice([3, 4])  # asking what became of a commit is one, too
    with running_proxy(arena.url) as proxy:
        async with Store.open(proxy.url, run="torture") as store:
            buffer = await store.buffer("torture")
            proxy.rule = cut_commits(moment, every=every, delay=0.05)
            told = await _everything(buffer, arena)
            proxy.heal()
            lengths = await _lengths(buffer)
            arena.figures[f"cut at the {moment}"] += proxy.num_cut
            arena.figures["writes"] += len(told)
            arena.figures["outcomes unknown"] += sum(one is UNKNOWN for one in told.values())
            await _cut_off_for_a_while(buffer, proxy, moment)
            await _returned(buffer, told)
    tables = await judge.read(arena.url)
    judge.check(tables)
    _compare(told, tables, lengths)


@contextmanager
def _impatient() -> Iterator[None]:
    """Whoever is cut off learns in a second that nobody can be asked."""
    with (
        patch("replaydb.buffer.waiting.GRACE_SECONDS", 0.3),
        patch("replaydb.database.engines.postgresql.COMMIT_SECONDS", 0.2),
        patch("replaydb.buffer.drawing.HAND_BACK_SECONDS", 0.1),
    ):
        yield


async def _cut_off_for_a_while(buffer: Buffer, proxy: Proxy, moment: Moment) -> None:
    """A lease is cut off at its commit, and so is every connection after that."""
    is_cut, cut = False, cut_commits(moment, delay=1.0)

    def rule(message: Message) -> Fate:
        nonlocal is_cut
        fate = CLOSE if is_cut else cut(message)
        is_cut = fate is not PASS
        return fate

    proxy.rule = rule
    with _impatient():
        assert await _told(buffer.lease(2, ttl=600, timeout=0.2).__aenter__()) is UNKNOWN
    proxy.heal()


async def _returned(buffer: Buffer, told: dict[str, Any]) -> None:
    """Until every lease is one that somebody was given."""
    given = {said.id for said in told.values() if isinstance(said, rdb.Lease)}
    async with asyncio.timeout(60):
        while {one.id for one in await buffer.leases()} - given:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _told(call: Awaitable[Any]) -> Any:
    """What a call said."""
    try:
        return await call
    except rdb.DatabaseUnavailableError:
        return UNKNOWN
    except rdb.ReplayDBError as error:
        return error


async def _everything(buffer: Buffer, arena: Arena) -> dict[str, Any]:
    """What each write said."""
    told: dict[str, Any] = {}
    for i in range(4):
        told[f"put alone-{i}"] = await _told(buffer.put(group(f"alone-{i}")))
    together = {f"put together-{i}": _told(buffer.put(group(f"together-{i}"))) for i in range(12)}
    told |= dict(zip(together, await asyncio.gather(*together.values()), strict=True))
    opened = []
    for i in range(3):
        told[f"open {i}"] = await _told(buffer.open_group("pieces", f"piece-{i}", 4))
        if isinstance(told[f"open {i}"], int):
            opened.append(i)
    pieces = {
        f"add {i} {k}": _told(buffer.add_episode(f"piece-{i}", episode(float(k)), position=k))
        for i in opened
        for k in range(3)
    }
    told |= dict(zip(pieces, await asyncio.gather(*pieces.values()), strict=True))
    for i in range(4):
        told[f"sample {i}"] = await _told(buffer.sample(3, timeout=5))
    told |= await _leases(buffer)
    for i in range(1, 4):
        told[f"advance {i}"] = await _told(buffer.advance_policy(i))
    ids = _ids(told)
    told["priorities"] = await _told(buffer.update_priorities(ids, [3.0] * len(ids)))
    return told


async def _leases(buffer: Buffer) -> dict[str, Any]:
    """Leases that are acked, given back, taken back and kept."""
    told: dict[str, Any] = {}
    for i in range(5):
        told[f"lease {i}"] = lease = await _told(_lease(buffer))
        if isinstance(lease, rdb.Lease) and i < 4:
            kind = ("ack", "ack", "nack", "revoke")[i]
            end = buffer.revoke(lease.id) if kind == "revoke" else getattr(lease, kind)()
            told[f"end {i}"] = await _told(end)
    return told


async def _lease(buffer: Buffer) -> rdb.Lease:
    return await buffer.lease(2, ttl=600, tasks="gsm8k", timeout=5)


def _ids(told: dict[str, Any]) -> list[int]:
    """Of the groups whose put said so."""
    return [one for said in told.values() if isinstance(said, list) for one in said]


async def _lengths(buffer: Buffer) -> dict[str, int]:
    """Draws that were recorded, the policy version."""
    async with asyncio.timeout(60):
        draws = await buffer.draws(limit=1000)
        stats = await buffer.stats()
    return {"draws": len(draws), "version": stats.policy_version}


def _compare(told: dict[str, Any], tables: Tables, lengths: dict[str, int]) -> None:
    """What was said is so; every call was made once, so no refusal can be true."""
    refused = {name: said for name, said in told.items() if isinstance(said, rdb.ReplayDBError)}
    assert not refused, f"refused, though made once: {refused}"
    by_uid = tables.by_uid
    for name, said in told.items():
        kind, _, rest = name.partition(" ")
        if kind == "put" and said is not UNKNOWN:
            assert [by_uid[rest]["id"]] == said, name
    for i in range(3):
        if (row := by_uid.get(f"piece-{i}")) is not None:
            said = [told.get(f"add {i} {k}", UNKNOWN) for k in range(3)]
            known = sum(one is not UNKNOWN for one in said)
            assert known <= row["num_episodes"] <= len(said), (row, said)
    drawn = [name for name in told if name.startswith(("sample", "lease"))]
    known = sum(told[name] is not UNKNOWN for name in drawn)
    assert known <= lengths["draws"] <= len(drawn), (known, lengths, len(drawn))
    _compare_leases(told, tables)
    versions = [i for i in range(1, 4) if told[f"advance {i}"] is not UNKNOWN]
    assert lengths["version"] >= max(versions, default=0), lengths


def _compare_leases(told: dict[str, Any], tables: Tables) -> None:
    """What is leased is what somebody holds; what was leased by an unknown call was returned."""
    leased, archived = tables.with_status("leased"), tables.with_status("archived")
    kept = told["lease 4"]
    if kept is not UNKNOWN:
        ids = set(kept.batch.ids)
        assert ids <= leased, "a lease that was given is not held"
        leased -= ids
    for i in range(4):
        if told[f"lease {i}"] is UNKNOWN:
            continue
        ids, end = set(told[f"lease {i}"].batch.ids), told[f"end {i}"]
        if end is UNKNOWN:
            leased -= ids
        elif i < 2:
            assert ids <= archived, "an ack that was told was not made"
        elif i == 3:
            assert set(end) == ids, "what was taken back is not what was held"
    assert not leased, f"leased, though nobody holds them: {leased}"
