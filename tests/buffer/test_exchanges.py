"""Exchanges with PostgreSQL for which a call waits: each costs a round trip to the server.

A proxy counts every answer of the server after which it is ready for the next request, including
those to BEGIN, COMMIT and ROLLBACK, and every description of a statement that is not prepared. All
calls have run before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from replaydb import Annotation, Buffer, Fifo, SamplingPolicy, Store, Uniform, col
from replaydb.buffer.requests import draw_request
from replaydb.database.repository import draws
from support.agents import turn
from support.groups import episode, group, groups
from support.proxy import PASS, Fate, Message, Proxy

Call = Callable[[Buffer, int], Awaitable[Any]]


WAITING = draw_request(999, Uniform(), None, None, None, None, None)


async def lease_and_ack(buffer: Buffer, number: int) -> None:
    lease = await buffer.lease(8, ttl=60)
    await lease.ack()


RARE = col.tags["kind"] == "rare"


async def sample_rare(buffer: Buffer, number: int) -> None:
    """Draw all groups that meet a filter: 12 of 200, which are read in four pages."""
    await buffer.sample(13, where=RARE, at_least=1)


async def sample_large(policy: SamplingPolicy, buffer: Buffer, number: int) -> None:
    """Draw from a large task with a filter that would need a scan of its groups."""
    with (
        patch.object(draws, "MOST_SCANNED", 0),
        patch.object(draws, "KEYS_READ_AT_LEAST", 0),
        patch.object(draws, "KEYS_READ_PER_GROUP", 1),
    ):
        await buffer.sample(8, policy, where=RARE)


async def opened(buffer: Buffer, number: int) -> None:
    if number == 1:
        await buffer.open_group("agents", "open", 9)


async def add_episode(buffer: Buffer, number: int) -> None:
    await opened(buffer, number)
    await buffer.add_episode("open", episode(), position=number)


async def annotate(first: int, buffer: Buffer, number: int) -> None:
    values: dict[str, Any] = {"reward": float(number), "metadata": {"n": number}}
    await buffer.annotate([Annotation(f"gsm8k-{first + i}", 0, **values) for i in range(8)])


async def score(buffer: Buffer, number: int) -> None:
    """Add the last values that groups wait for."""
    several = [[f"scored-{n}-{i}" for i in range(8)] for n in range(1, 5)]
    if number == 1:
        await buffer.update_settings(requires={"scored": "reward"})
        for uids in several:
            await buffer.put([group(uid, "scored", rewards=[None]) for uid in uids])
    new = [Annotation(uid, 0, reward=0.5) for uid in several[number - 1]]
    await buffer.annotate(new)


async def append_turn(buffer: Buffer, number: int) -> None:
    await opened(buffer, number)
    await buffer.append_turn("open", 0, turn(f"call-{number}"))


async def finish_episode(buffer: Buffer, number: int) -> None:
    await opened(buffer, number)
    await buffer.append_turn("open", number, turn(f"call-{number}"))
    await buffer.finish_episode("open", number)


async def claim_and_release(buffer: Buffer, number: int) -> None:
    await opened(buffer, number)
    [claim] = await buffer.claim(ttl=60)
    await claim.release()


CALLS: dict[str, tuple[int, Call]] = {
    "add_episode": (13, add_episode),
    "annotate": (4, partial(annotate, 100)),
    "annotate groups that were drawn": (5, partial(annotate, 0)),
    "annotate what groups wait for": (4, score),
    "append_turn": (5, append_turn),
    "append_turn and finish_episode": (26, finish_episode),
    "claim and release": (16, claim_and_release),
    "put of one group": (5, lambda it, n: it.put(group(version=n))),
    "put of fifty groups": (5, lambda it, n: it.put([group(version=n) for _ in range(50)])),
    "put of a stored group": (5, lambda it, n: it.put(group("gsm8k-0"), on_duplicate="ignore")),
    "put at the highest priority": (5, lambda it, n: it.put(group(version=n), priority="max")),
    "put that replaces": (7, lambda it, n: it.put(group("gsm8k-0"), on_duplicate="replace")),
    "put that renews": (7, lambda it, n: it.put(group("gsm8k-0"), on_duplicate="renew")),
    "sample": (4, lambda it, n: it.sample(8)),
    "sample with a rare filter": (10, sample_rare),
    "sample from a large task with a rare filter": (13, partial(sample_large, Uniform())),
    "sample in order from a large task with a filter": (10, partial(sample_large, Fifo())),
    "lease and ack": (8, lease_and_ack),
    "update_priorities": (4, lambda it, n: it.update_priorities(range(1, 9), [2.0 + n] * 8)),
    "advance_policy": (5, lambda it, n: it.advance_policy(n)),
    "stats": (1, lambda it, n: it.stats()),
    "count": (1, lambda it, n: it.count()),
    "metrics": (1, lambda it, n: it.metrics()),
    "cursor": (1, lambda it, n: it.cursor("data")),
    "check of a waiting draw": (1, lambda it, n: it._may_suffice(WAITING, None)),
    "find": (5, lambda it, n: it.find(limit=8)),
    "find of a task and status": (
        4,
        lambda it, n: it.find(tasks="gsm8k", statuses="completed", limit=8),
    ),
}

#: With pgbouncer=true, for which every statement is described first, and with pgbouncer=prepared.
THROUGH_PGBOUNCER = {
    "put of one group": (8, 5),
    "sample": (6, 4),
    "lease and ack": (12, 8),
    "stats": (6, 4),
}


@pytest.mark.parametrize("name", CALLS)
async def test_exchanges(
    proxied_url: str, proxy: Proxy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, call = CALLS[name]
    assert await exchanges(proxied_url, proxy, call, monkeypatch) == expected


@pytest.mark.usefixtures("from_snapshots")
async def test_exchanges_of_a_large_draw(
    proxied_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its payloads are read from a snapshot on another connection.

    It has four exchanges on each. BEGIN overlaps with the last statement of the draw, and the read
    with COMMIT, so the call waits for six.
    """
    _, call = CALLS["sample"]
    assert await exchanges(proxied_url, proxy, call, monkeypatch) == 8


@pytest.mark.usefixtures("from_snapshots")
@pytest.mark.parametrize(
    ("name", "expected"), [("put of one group", 6), ("sample", 4), ("lease and ack", 8)]
)
async def test_exchanges_with_payloads_outside(
    proxied_url: str,
    proxy: Proxy,
    tmp_path: Path,
    name: str,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draw reads only the locations of payloads, however large these are."""
    (tmp_path / "payloads").mkdir()
    payloads = (tmp_path / "payloads").as_uri()
    _, call = CALLS[name]
    found = await exchanges(proxied_url, proxy, call, monkeypatch, payloads=payloads)
    assert found == expected


@pytest.mark.parametrize("how", ["true", "prepared"])
@pytest.mark.parametrize("name", THROUGH_PGBOUNCER)
async def test_exchanges_through_pgbouncer(
    proxied_url: str, proxy: Proxy, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client does is the same without a PgBouncer."""
    url = f"{proxied_url}?pgbouncer={how}"
    expected = THROUGH_PGBOUNCER[name][how == "prepared"]
    assert await exchanges(url, proxy, CALLS[name][1], monkeypatch) == expected


async def exchanges(
    url: str,
    proxy: Proxy,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    *,
    payloads: str | None = None,
) -> int:
    """Return the number of exchanges of a call that has run before."""
    num_exchanges = 0

    def count(message: Message) -> Fate:
        nonlocal num_exchanges
        num_exchanges += message.sender == "server" and message.kind in (b"Z", b"t")
        return PASS

    async with Store.open(url, run="a", payloads=payloads) as store:
        monkeypatch.setattr(store._database.signal, "announce", lambda: None)
        buffer = await store.buffer("math", max_staleness=4)
        await buffer.put(groups(188, version=1), cursor={"data": 1})
        await buffer.put([group(version=1, tags={"kind": "rare"}) for _ in range(12)])
        await buffer.lease(8, ttl=600)  # which another trainer might have
        for number in range(1, 4):
            await call(buffer, number)
        proxy.rule = count
        await call(buffer, 4)
    return num_exchanges
