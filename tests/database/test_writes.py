"""Rows that are written together, in one statement on PostgreSQL."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Connection, delete, event, insert, select

from replaydb import Buffer, EpisodeGroup, Store
from replaydb.database.repository.lineage import insert_draw_groups, insert_known_draw
from replaydb.database.repository.puts import insert_groups
from replaydb.database.repository.tasks import update_tasks
from replaydb.database.runtime.prepared import execute
from replaydb.database.runtime.writes import MAX_BYTES, Write, postpone, write_together
from replaydb.database.statements.episode_group import update_each_group
from replaydb.database.statements.payload import (
    insert_episodes,
    insert_payloads,
    insert_transcripts,
)
from replaydb.database.tables.schema import (
    draw,
    draw_group,
    episode,
    episode_group,
    payload,
    run,
    task,
    transcript,
)
from support.connections import transaction
from support.groups import episode as an_episode
from support.groups import group, groups

INSERTS = {
    episode_group: insert_groups,
    episode: insert_episodes,
    payload: insert_payloads,
    transcript: insert_transcripts,
    draw: insert_known_draw,
    draw_group: insert_draw_groups,
}


def rows_of(connection: Connection, table: Any) -> list[dict[str, Any]]:
    found = connection.execute(select(table).order_by(*table.primary_key)).mappings()
    return [dict(row) for row in found]


def new_run(name: str, started: datetime) -> dict[str, Any]:
    return {"name": name, "started_at": started, "metadata": {}}


@pytest.fixture
def statements() -> list[str]:
    """Statements that `write_together` ran."""
    return []


def write(connection: Connection, writes: list[Write], statements: list[str]) -> None:
    def record(_connection: Any, _cursor: Any, sql: str, *_rest: Any) -> None:
        statements.append(sql)

    event.listen(connection, "before_cursor_execute", record)
    write_together(connection, writes)
    event.remove(connection, "before_cursor_execute", record)


async def test_inserted_rows_have_the_given_values(
    buffer: Buffer, url: str, engine_name: str, statements: list[str]
) -> None:
    """Rows of every type of column, with missing values, are deleted and inserted again."""
    odd = an_episode(1.0, text="grüße \0 🎲", metadata={"a": [1, None, {"b": "ü"}], "c": 1e300})
    code = EpisodeGroup("code", [odd], tags={"x": "ü", "y": [1, 2.5]})
    await buffer.put([group(priority=0.0), code])
    await buffer.put(groups(3, version=7))
    await buffer.sample(3)

    def again(connection: Connection) -> None:
        before = {table: rows_of(connection, table) for table in INSERTS}
        assert all(before.values())
        for table in reversed(INSERTS):
            connection.execute(delete(table))
        writes = [Write(INSERTS[table](), rows) for table, rows in before.items()]
        write(connection, writes, statements)
        assert {table: rows_of(connection, table) for table in INSERTS} == before

    async with transaction(url) as connection:
        await connection.run_sync(again)
    assert len(statements) == (1 if engine_name == "postgresql" else len(INSERTS))


async def test_each_row_is_updated_by_its_id(
    buffer: Buffer, url: str, engine_name: str, statements: list[str]
) -> None:
    first, second, third = await buffer.put(groups(3))
    infinite = float("inf")
    changes: list[dict[str, Any]] = [
        {"group_id": second, "priority": 2.5, "priority_key": infinite, "status_reason": None},
        {"group_id": first, "priority": 1.5, "priority_key": 7.0, "status_reason": "why"},
    ]

    def update_both(connection: Connection) -> None:
        [task_id] = connection.scalars(select(task.c.id))
        writes = [
            Write(update_each_group(), changes),
            Write(insert_draw_groups(), ()),
            Write(update_tasks(), [{"task_id": task_id, "num_sampled": 9}]),
        ]
        with connection.begin_nested() as changed:
            write(connection, writes, statements)
            found = {row["id"]: row for row in rows_of(connection, episode_group)}
            assert connection.scalar(select(task.c.num_sampled)) == 9
            changed.rollback()
        columns = ("priority", "priority_key", "status_reason")
        assert [found[second][name] for name in columns] == [2.5, infinite, None]
        assert [found[first][name] for name in columns] == [1.5, 7.0, "why"]
        assert found[third]["priority"] == 1.0

    async with transaction(url) as connection:
        await connection.run_sync(update_both)
    assert len(statements) == (1 if engine_name == "postgresql" else 2)


async def test_large_rows_are_written_one_table_after_the_other(
    buffer: Buffer, url: str, statements: list[str]
) -> None:
    """An array of them would need their memory once more."""
    await buffer.put(group("a"))
    text = "x" * (MAX_BYTES // 2)

    def add(connection: Connection) -> None:
        [group_id] = connection.scalars(select(episode_group.c.id))
        texts = [{"group_id": group_id, "position": n, "text": text} for n in range(3)]
        writes = [
            Write(insert_transcripts(), texts),
            Write(update_each_group(), [{"group_id": group_id, "status_reason": "why"}]),
        ]
        with connection.begin_nested() as added:
            write(connection, writes, statements)
            added.rollback()

    async with transaction(url) as connection:
        await connection.run_sync(add)
    assert len(statements) == 2


async def test_cursors_of_every_kind_are_written_together(buffer: Buffer) -> None:
    """A list is one value, not an array of values."""
    cursors = {"list": [1.0, "a", [2]], "nothing": [], "text": "a", "object": {"a": [1]}}
    for _ in range(2):
        await buffer.put([group(), group()], cursor=cursors)
        assert {name: await buffer.cursor(name) for name in cursors} == cursors


async def test_postponed_writes_are_seen_by_the_next_statement(store: Store, url: str) -> None:
    await store.buffer("math")
    found: list[list[str]] = []

    def work(connection: Connection) -> None:
        started = store._database.backend.now(connection)
        for name in ("first", "second"):
            postpone(connection, Write(insert(run), [new_run(name, started)]))
        found.append([row.name for row in execute(connection, select(run.c.name))])

    await store._database.write(work)
    [names] = found
    assert {"first", "second"} <= set(names)
    assert {"first", "second"} <= {one.name for one in await store.runs()}


async def test_postponed_writes_of_a_failed_transaction_are_discarded(store: Store) -> None:
    await store.buffer("math")

    def work(connection: Connection) -> None:
        started = store._database.backend.now(connection)
        postpone(connection, Write(insert(run), [new_run("never", started)]))
        raise ValueError("this transaction fails")

    with pytest.raises(ValueError, match="this transaction fails"):
        await store._database.write(work)
    await (await store.buffer("math")).put(groups(1))
    assert "never" not in {one.name for one in await store.runs()}
