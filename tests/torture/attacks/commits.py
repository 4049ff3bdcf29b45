"""Connections that break around COMMIT duplicate nothing, and all reported results are correct.

A proxy disconnects between the server's COMMIT and its response, before COMMIT arrives, or while it
is in flight, during every kind of write, sequential and concurrent. Each call is made once. At the
end a lease is disconnected and the server is unreachable: its groups are returned when the network
has recovered.
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
from torture import checker
from torture.checker import Tables
from torture.context import AttackContext

PROMISES = (1, 2, 3, 11)
ENGINES = ("postgresql",)
MOMENTS: tuple[Moment, ...] = ("answer", "request", "flight")
#: Result of a call whose outcome is unknown: it may have been committed or not.
UNKNOWN = "unknown"


async def attack(context: AttackContext) -> None:
    """Make every kind of write with one kind of disconnect."""
    moment = context.chance.choice(MOMENTS)
    every = context.chance.choice([3, 4])  # queries for the outcome of a commit count, too
    with running_proxy(context.url) as proxy:
        async with Store.open(proxy.url, run="torture") as store:
            buffer = await store.buffer("torture")
            proxy.rule = cut_commits(moment, every=every, delay=0.05)
            results = await _everything(buffer, context)
            proxy.heal()
            lengths = await _lengths(buffer)
            context.figures[f"cut at the {moment}"] += proxy.num_cut
            context.figures["writes"] += len(results)
            context.figures["outcomes unknown"] += sum(one is UNKNOWN for one in results.values())
            await _cut_off_for_a_while(buffer, proxy, moment)
            await _returned(buffer, results)
    tables = await checker.read_tables(context.url)
    checker.check_tables(tables)
    _compare(results, tables, lengths)


@contextmanager
def _impatient() -> Iterator[None]:
    """Shorten the timeouts after which a disconnected call gives up."""
    with (
        patch("replaydb.buffer.waiting.GRACE_SECONDS", 0.3),
        patch("replaydb.database.postgresql.transactions.COMMIT_SECONDS", 0.2),
        patch("replaydb.buffer.drawing.RELEASE_SECONDS", 0.1),
    ):
        yield


async def _cut_off_for_a_while(buffer: Buffer, proxy: Proxy, moment: Moment) -> None:
    """Disconnect a lease at its commit, and all connections after that."""
    is_cut, cut = False, cut_commits(moment, delay=1.0)

    def rule(message: Message) -> Fate:
        nonlocal is_cut
        fate = CLOSE if is_cut else cut(message)
        is_cut = fate is not PASS
        return fate

    proxy.rule = rule
    with _impatient():
        assert await _result(buffer.lease(2, ttl=600, timeout=0.2).__aenter__()) is UNKNOWN
    proxy.heal()


async def _returned(buffer: Buffer, results: dict[str, Any]) -> None:
    """Wait until leases that no call has returned are released."""
    given = {result.id for result in results.values() if isinstance(result, rdb.Lease)}
    async with asyncio.timeout(60):
        while {one.id for one in await buffer.leases()} - given:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _result(call: Awaitable[Any]) -> Any:
    """Return the result or the error of a call."""
    try:
        return await call
    except rdb.DatabaseUnavailableError:
        return UNKNOWN
    except rdb.ReplayDBError as error:
        return error


async def _everything(buffer: Buffer, context: AttackContext) -> dict[str, Any]:
    """Make all kinds of writes; return their results by name."""
    results: dict[str, Any] = {}
    for i in range(4):
        results[f"put alone-{i}"] = await _result(buffer.put(group(f"alone-{i}")))
    together = {f"put together-{i}": _result(buffer.put(group(f"together-{i}"))) for i in range(12)}
    results |= dict(zip(together, await asyncio.gather(*together.values()), strict=True))
    opened = []
    for i in range(3):
        results[f"open {i}"] = await _result(buffer.open_group("incremental", f"group-{i}", 4))
        if isinstance(results[f"open {i}"], int):
            opened.append(i)
    additions = {
        f"add {i} {k}": _result(buffer.add_episode(f"group-{i}", episode(float(k)), position=k))
        for i in opened
        for k in range(3)
    }
    results |= dict(zip(additions, await asyncio.gather(*additions.values()), strict=True))
    for i in range(4):
        results[f"sample {i}"] = await _result(buffer.sample(3, timeout=5))
    results |= await _leases(buffer)
    for i in range(1, 4):
        results[f"advance {i}"] = await _result(buffer.advance_policy(i))
    ids = _ids(results)
    results["priorities"] = await _result(buffer.update_priorities(ids, [3.0] * len(ids)))
    return results


async def _leases(buffer: Buffer) -> dict[str, Any]:
    """Take leases; ack, nack and revoke them, and keep the last one."""
    results: dict[str, Any] = {}
    for i in range(5):
        results[f"lease {i}"] = lease = await _result(_lease(buffer))
        if isinstance(lease, rdb.Lease) and i < 4:
            kind = ("ack", "ack", "nack", "revoke")[i]
            end = buffer.revoke(lease.id) if kind == "revoke" else getattr(lease, kind)()
            results[f"end {i}"] = await _result(end)
    return results


async def _lease(buffer: Buffer) -> rdb.Lease:
    return await buffer.lease(2, ttl=600, tasks="gsm8k", timeout=5)


def _ids(results: dict[str, Any]) -> list[int]:
    """Return the ids of groups with a successful put."""
    return [one for result in results.values() if isinstance(result, list) for one in result]


async def _lengths(buffer: Buffer) -> dict[str, int]:
    """Return the number of recorded draws, and the policy version."""
    async with asyncio.timeout(60):
        draws = await buffer.draws(limit=1000)
        stats = await buffer.stats()
    return {"draws": len(draws), "version": stats.policy_version}


def _compare(results: dict[str, Any], tables: Tables, lengths: dict[str, int]) -> None:
    """Compare results with the tables. Each call was made once, so none may be refused."""
    refused = {
        name: result for name, result in results.items() if isinstance(result, rdb.ReplayDBError)
    }
    assert not refused, f"refused, although made once: {refused}"
    by_uid = tables.by_uid
    for name, result in results.items():
        kind, _, rest = name.partition(" ")
        if kind == "put" and result is not UNKNOWN:
            assert [by_uid[rest]["id"]] == result, name
    for i in range(3):
        if (row := by_uid.get(f"group-{i}")) is not None:
            added = [results.get(f"add {i} {k}", UNKNOWN) for k in range(3)]
            known = sum(one is not UNKNOWN for one in added)
            assert known <= row["num_episodes"] <= len(added), (row, added)
    drawn = [name for name in results if name.startswith(("sample", "lease"))]
    known = sum(results[name] is not UNKNOWN for name in drawn)
    assert known <= lengths["draws"] <= len(drawn), (known, lengths, len(drawn))
    _compare_leases(results, tables)
    versions = [i for i in range(1, 4) if results[f"advance {i}"] is not UNKNOWN]
    assert lengths["version"] >= max(versions, default=0), lengths


def _compare_leases(results: dict[str, Any], tables: Tables) -> None:
    """Groups are leased only by known leases; those of unknown calls were returned."""
    leased, archived = tables.with_status("leased"), tables.with_status("archived")
    kept = results["lease 4"]
    if kept is not UNKNOWN:
        ids = set(kept.batch.ids)
        assert ids <= leased, "groups of a returned lease are not leased"
        leased -= ids
    for i in range(4):
        if results[f"lease {i}"] is UNKNOWN:
            continue
        ids, end = set(results[f"lease {i}"].batch.ids), results[f"end {i}"]
        if end is UNKNOWN:
            leased -= ids
        elif i < 2:
            assert ids <= archived, "groups of a successful ack are not archived"
        elif i == 3:
            assert set(end) == ids, "a revoke returned other groups than were leased"
    assert not leased, f"groups are leased without a known lease: {leased}"
