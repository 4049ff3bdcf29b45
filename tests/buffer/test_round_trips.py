"""Number of statements of a trainer's calls: each is a round trip on PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from replaydb import Buffer, Store
from replaydb.domain.settings import OnAck
from support.groups import groups, long_group
from support.watching import recorded

#: The second and the last are checks for lost commits, and the proof of a commit.
_OVERHEAD = (
    "SELECT clock_timestamp",
    "SELECT now()",
    "SELECT set_config",
    "INSERT INTO commit_proof",
)


async def number(store: Store, call: Awaitable[object]) -> int:
    """Return the number of statements of a call, without server time, settings and proofs alone."""
    with recorded(store) as statements:
        await call
    return sum(not sql.startswith(_OVERHEAD) for sql in statements)


async def leased(buffer: Buffer, count: int = 8) -> Any:
    return await buffer.lease(count, ttl=60)


#: Statements of each call, on SQLite and on PostgreSQL, where the lock is counted twice.
CALLS = {
    "lease": (10, 3),
    "extend": (1, 1),
    "ack": (6, 3),
    "ack of some": (6, 5),
    "nack": (6, 3),
    "update_priorities": (4, 3),
}


@pytest.mark.parametrize("on_ack", ["archive", "return"])
async def test_statements_of_a_lease(
    store: Store, on_ack: OnAck, reading: str, engine_name: str
) -> None:
    buffer = await store.buffer("math", on_ack=on_ack)
    ids = await buffer.put([*groups(20), long_group("long", 9, "code")])
    one, two, three = [await leased(buffer, 3) for _ in range(3)]
    calls = {
        "lease": buffer.lease(8, ttl=60, tasks="gsm8k"),
        "extend": one.extend(),
        "ack": one.ack(),
        "ack of some": two.ack(two.batch.ids[:2]),
        "nack": three.nack(),
        "update_priorities": buffer.update_priorities(ids, [2.0] * 21),
    }
    is_server = engine_name == "postgresql"
    expected = {name: numbers[is_server] for name, numbers in CALLS.items()}
    if reading == "from a snapshot":
        expected["lease"] += 1
    assert {name: await number(store, call) for name, call in calls.items()} == expected


async def test_an_ack_that_drops_payloads_deletes_two_kinds_of_rows(
    store: Store, engine_name: str
) -> None:
    buffer = await store.buffer("math", archived_payload="drop")
    await buffer.put(groups(8))
    lease = await leased(buffer)
    # They are deleted in the last statement on PostgreSQL.
    assert await number(store, lease.ack()) == (3 if engine_name == "postgresql" else 8)


@pytest.mark.parametrize("ttl", [None, 1000.0])
async def test_statements_of_calls_that_wait_for_a_number(store: Store, ttl: float | None) -> None:
    """One reads the buffer, one the names of all tasks, and one counts and finds what is due."""
    buffer = await store.buffer("math", time_to_live=ttl)
    await buffer.put([*groups(3), *groups(2, "code")])
    assert await number(store, buffer.wait_until(at_least=1, timeout=0)) == 3
    assert await number(store, buffer.wait_until(at_least=1, tasks="code", timeout=0)) == 2
    assert await number(store, buffer.admission(9, max_staleness=0, timeout=0)) == 2
