"""Plans on PostgreSQL that were made while the tables were small, as in a new database."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, text

from replaydb import Buffer, Capacity, Lifo, Prioritized, Store, Uniform, col
from support.connections import transaction
from support.groups import group, long_group

#: Tables with a row per group, episode, draw or text. Others stay small.
LARGE = ("episode_group", "payload", "episode", "transcript", "draw", "draw_group", "group_tag")


async def make_calls(buffer: Buffer, number: int) -> None:
    """Make each frequent call."""
    version = number // 10
    ids = await buffer.put([group(task=f"task-{number % 3}", version=version) for _ in range(4)])
    await buffer.put([long_group(f"long-{number}", 30, tags={"kind": "odd"})])
    for policy in (Uniform(), Prioritized(), Lifo()):
        await buffer.sample(3, policy)
    await buffer.sample(1, where=col.tags["kind"] == "odd")
    lease = await buffer.lease(2, ttl=60)
    await lease.ack(lease.batch.ids[:1])
    await lease.nack()
    await buffer.update_priorities(ids, [2.0] * 4)
    await buffer.advance_policy(version)
    await buffer.get(ids)
    await buffer.find(limit=5)
    await buffer.find(uids=[f"long-{number}"])
    await buffer.draws(limit=3)
    await buffer.stats()
    await buffer.metrics()
    await buffer.count()


@pytest.mark.parametrize("how", ["pgbouncer=false", "pgbouncer=true", "pgbouncer=prepared"])
@pytest.mark.parametrize("reading", ["in the draw", "from a snapshot"], indirect=True)
async def test_large_tables_are_never_scanned(
    own_postgresql_url: str, reading: str, how: str
) -> None:
    """PostgreSQL plans the sixth run of a statement for all later ones, until the next ANALYZE."""
    url = own_postgresql_url + ("&" if "?" in own_postgresql_url else "?") + how
    async with Store.open(url, pool_size=2) as store:
        buffer = await store.buffer(
            "math",
            max_staleness=3,
            capacity=Capacity(groups=60),
            on_ack="return",
            indexed_tags=["kind"],
        )
        for number in range(12):
            await make_calls(buffer, number)

    def scans(connection: Connection) -> dict[str, int]:
        statement = "SELECT relname, seq_scan FROM pg_stat_user_tables"
        return {row.relname: row.seq_scan for row in connection.execute(text(statement))}

    async with transaction(own_postgresql_url) as connection:
        counted = await connection.run_sync(scans)
    assert {name: counted[name] for name in LARGE if counted[name]} == {}
