"""Unique violations: lost races for a key are retried; other errors name a fix."""

from __future__ import annotations

import pytest
from sqlalchemy import text

import replaydb as rdb
from replaydb import Store
from replaydb.database.transactions import ATTEMPTS
from support.connections import transaction
from support.groups import group

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
    assert "replaydb verify" in message
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
