"""Unique violations: lost races for a key are retried; other errors name a fix."""

from __future__ import annotations

import pytest
from sqlalchemy import text

import replaydb as rdb
from replaydb import Store
from replaydb.database.runtime.transactions import ATTEMPTS
from support.connections import transaction
from support.groups import group, groups

#: Refuses every task as if another transaction had just inserted it, and counts the attempts.
TAKEN = """
    CREATE FUNCTION taken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM nextval('attempts');
        RAISE EXCEPTION USING ERRCODE = '23505', MESSAGE = 'duplicate key',
            TABLE = 'task', CONSTRAINT = '{constraint}';
    END $$
"""


async def refused(url: str, constraint: str) -> tuple[str, int]:
    """Put into a task that another transaction seems to insert first in every attempt.

    Returns:
        The error, and the number of attempts.
    """
    async with transaction(url) as connection:
        await connection.execute(text("CREATE SEQUENCE attempts"))
        await connection.execute(text(TAKEN.format(constraint=constraint)))
        trigger = "CREATE TRIGGER taken BEFORE INSERT ON task EXECUTE FUNCTION taken()"
        await connection.execute(text(trigger))
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        with pytest.raises(rdb.DatabaseError, match="23505") as caught:
            await buffer.put(group())
    async with transaction(url) as connection:
        number = await connection.scalar(text("SELECT last_value FROM attempts"))
    return str(caught.value), int(number or 0)


async def test_a_chosen_key_that_stays_taken(own_postgresql_url: str) -> None:
    """It may be a lost race, so it is retried, but not forever."""
    message, attempts = await refused(own_postgresql_url, "uq_task_buffer_id_task_name")
    assert "table task" in message
    assert "another transaction stored the same key first, in each attempt" in message
    assert "does not resolve it" not in message
    assert attempts % ATTEMPTS == 0  # the put shares its transaction, and then has one of its own


@pytest.mark.parametrize(
    ("constraint", "what"), [("pk_task", "verify --repair"), ("theirs", "replaydb doctor")]
)
async def test_violations_that_are_not_retried(
    own_postgresql_url: str, constraint: str, what: str
) -> None:
    """A generated id, which no other transaction gets, and a constraint that is not replaydb's."""
    message, attempts = await refused(own_postgresql_url, constraint)
    assert "table task" in message
    assert what in message
    assert attempts < ATTEMPTS


BEHIND = "the sequence of table {} is behind"


@pytest.mark.parametrize("keep_draws", [None, rdb.Keep(count=1000)])
async def test_a_draw_whose_id_exists(postgresql_url: str, keep_draws: rdb.Keep | None) -> None:
    """A retry would take the next id, and hide that the sequence is behind."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math", keep_draws=keep_draws)
        await buffer.put(groups(4))
        for _ in range(3):
            await buffer.sample(2)
        await set_sequence(postgresql_url, "draw")
        with pytest.raises(rdb.DatabaseError, match=BEHIND.format("draw")):
            await buffer.sample(2)


async def test_groups_whose_ids_exist(postgresql_url: str) -> None:
    """A put that needs no new id does not fail."""
    async with Store.open(postgresql_url) as store:
        buffer = await store.buffer("math")
        ids = await buffer.put(groups(2))
        await set_sequence(postgresql_url, "episode_group")
        assert await buffer.put(groups(2), on_duplicate="ignore") == ids
        await set_sequence(postgresql_url, "episode_group")
        assert await buffer.put(groups(2), on_duplicate="replace") == ids
        for again in (buffer.put(groups(2), on_duplicate="renew"), buffer.put(groups(3, "code"))):
            await set_sequence(postgresql_url, "episode_group")
            with pytest.raises(rdb.DatabaseError, match=BEHIND.format("episode_group")):
                await again


async def set_sequence(url: str, table: str) -> None:
    """Let a sequence start again, as after a restored backup."""
    async with transaction(url) as connection:
        await connection.execute(text(f"SELECT setval('{table}_id_seq', 1, false)"))
