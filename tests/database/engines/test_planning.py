"""Plans on PostgreSQL that were made while the tables were small, as in a new database."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, func, select, text

from replaydb import Store
from support.connections import transaction
from support.groups import group

NUM_GROUPS, NUM_CALLS = 3000, 20


@pytest.mark.parametrize("how", ["pgbouncer=false", "pgbouncer=true", "pgbouncer=prepared"])
async def test_calls_do_not_read_all_groups(
    own_postgresql_url: str, how: str, pass_time: Callable[[float], None]
) -> None:
    """PostgreSQL plans the sixth run of a statement for all later ones, until the next ANALYZE."""
    url = own_postgresql_url + ("&" if "?" in own_postgresql_url else "?") + how
    async with Store.open(url, pool_size=1) as store:
        buffer = await store.buffer("math")
        for _ in range(8):
            await buffer.put(group())
            await buffer.sample(1)
        await buffer.put([group() for _ in range(NUM_GROUPS)])
        for seconds in (100.0, 200.0, 400.0):  # the connections are then twice as old
            pass_time(seconds)
            await buffer.sample(8)
        for run in (store._database.write, store._database.read):
            # A session reports what it has read only once a second.
            await run(lambda session: session.run(select(func.pg_stat_force_next_flush())))
        before = await num_read(own_postgresql_url)
        assert before > 0
        for _ in range(NUM_CALLS):
            await buffer.put([group() for _ in range(50)])
            await buffer.sample(8)
    assert await num_read(own_postgresql_url) - before < NUM_CALLS * NUM_GROUPS / 10


async def num_read(url: str) -> int:
    """Return how many rows of groups and entries of their indexes ended sessions have read."""

    def read(connection: Connection) -> int:
        statement = (
            "SELECT seq_tup_read + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes AS i "
            "WHERE i.relid = t.relid) FROM pg_stat_user_tables AS t WHERE relname = 'episode_group'"
        )
        return int(connection.execute(text(statement)).scalar_one())

    async with transaction(url) as connection:
        return await connection.run_sync(read)
