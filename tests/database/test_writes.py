"""Rows that are written together, in one statement on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import delete, insert, select

from replaydb import Buffer, EpisodeGroup, Store
from replaydb.database.postgresql.combined_writes import MAX_BYTES
from replaydb.database.repository.groups import select_facts
from replaydb.database.repository.tasks import update_tasks
from replaydb.database.runtime.prepared import Write
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import update_each_group
from replaydb.database.statements.insertion import insert_into
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
from support.groups import episode as an_episode
from support.groups import group, groups
from support.watching import recorded

TABLES = (episode_group, episode, payload, transcript, draw, draw_group)


def rows_of(session: Session, table: Any) -> list[dict[str, Any]]:
    found = session.core.execute(select(table).order_by(*table.primary_key)).mappings()
    return [dict(row) for row in found]


def new_run(name: str, started: datetime) -> dict[str, Any]:
    return {"name": name, "started_at": started, "metadata": {}}


@pytest.fixture
def statements(store: Store) -> Iterator[list[str]]:
    """Statements that the store has run."""
    with recorded(store) as statements:
        yield statements


def write(session: Session, writes: list[Write], statements: list[str]) -> int:
    """Write together, and return the number of statements."""
    statements.clear()
    session.postpone(*writes)
    session.send()
    return len(statements)


async def test_inserted_rows_have_the_given_values(
    store: Store, buffer: Buffer, engine_name: str, statements: list[str]
) -> None:
    """Rows of every type of column, with missing values, are deleted and inserted again."""
    odd = an_episode(1.0, text="grüße \0 🎲", metadata={"a": [1, None, {"b": "ü"}], "c": 1e300})
    code = EpisodeGroup("code", [odd], tags={"x": "ü", "y": [1, 2.5]})
    await buffer.put([group(priority=0.0), code])
    await buffer.put(groups(3, version=7))
    await buffer.sample(3)

    def again(session: Session) -> int:
        before = {table: rows_of(session, table) for table in TABLES}
        assert all(before.values())
        for table in reversed(TABLES):
            session.run(delete(table))
        writes = [Write(insert_into(table), rows) for table, rows in before.items()]
        num_statements = write(session, writes, statements)
        assert {table: rows_of(session, table) for table in TABLES} == before
        return num_statements

    num_statements = await store._database.write(again)
    assert num_statements == (1 if engine_name == "postgresql" else len(TABLES))


async def test_each_row_is_updated_by_its_id(
    store: Store, buffer: Buffer, engine_name: str, statements: list[str]
) -> None:
    first, second, third = await buffer.put(groups(3))
    infinite = float("inf")
    changes: list[dict[str, Any]] = [
        {"group_id": second, "priority": 2.5, "priority_key": infinite, "status_reason": None},
        {"group_id": first, "priority": 1.5, "priority_key": 7.0, "status_reason": "why"},
    ]

    def update_both(session: Session) -> int:
        [(task_id,)] = session.run(select(task.c.id))
        writes = [
            Write(update_each_group(), changes),
            Write(insert_into(draw_group), ()),
            Write(update_tasks(), [{"task_id": task_id, "num_sampled": 9}]),
        ]
        with session.core.begin_nested() as changed:
            num_statements = write(session, writes, statements)
            found = {row["id"]: row for row in rows_of(session, episode_group)}
            assert session.run(select(task.c.num_sampled)) == [(9,)]
            changed.rollback()
        columns = ("priority", "priority_key", "status_reason")
        assert [found[second][name] for name in columns] == [2.5, infinite, None]
        assert [found[first][name] for name in columns] == [1.5, 7.0, "why"]
        assert found[third]["priority"] == 1.0
        return num_statements

    num_statements = await store._database.write(update_both)
    assert num_statements == (1 if engine_name == "postgresql" else 2)


async def test_large_rows_are_written_one_table_after_the_other(
    store: Store, buffer: Buffer, statements: list[str]
) -> None:
    """An array of them would need their memory once more."""
    await buffer.put(group("a"))
    text = "x" * (MAX_BYTES // 2)

    def add(session: Session) -> int:
        [(group_id,)] = session.run(select(episode_group.c.id))
        texts = [{"group_id": group_id, "position": n, "text": text} for n in range(3)]
        writes = [
            Write(insert_into(transcript), texts),
            Write(update_each_group(), [{"group_id": group_id, "status_reason": "why"}]),
        ]
        with session.core.begin_nested() as added:
            num_statements = write(session, writes, statements)
            added.rollback()
        return num_statements

    assert await store._database.write(add) == 2


async def test_cursors_of_every_kind_are_written_together(buffer: Buffer) -> None:
    """A list is one value, not an array of values."""
    cursors = {"list": [1.0, "a", [2]], "nothing": [], "text": "a", "object": {"a": [1]}}
    for _ in range(2):
        await buffer.put([group(), group()], cursor=cursors)
        assert {name: await buffer.cursor(name) for name in cursors} == cursors


async def test_postponed_writes_are_seen_by_the_next_statement(store: Store) -> None:
    await store.buffer("math")
    found: list[list[str]] = []

    def work(session: Session) -> None:
        started = session.now()
        for name in ("first", "second"):
            session.postpone(Write(insert(run), [new_run(name, started)]))
        found.append([row.name for row in session.run(select(run.c.name))])

    await store._database.write(work)
    [names] = found
    assert {"first", "second"} <= set(names)
    assert {"first", "second"} <= {one.name for one in await store.runs()}


async def test_postponed_writes_of_a_failed_transaction_are_discarded(store: Store) -> None:
    await store.buffer("math")

    def work(session: Session) -> None:
        started = session.now()
        session.postpone(Write(insert(run), [new_run("never", started)]))
        raise ValueError("this transaction fails")

    with pytest.raises(ValueError, match="this transaction fails"):
        await store._database.write(work)
    await (await store.buffer("math")).put(groups(1))
    assert "never" not in {one.name for one in await store.runs()}


@pytest.mark.parametrize("size", [1, MAX_BYTES + 1], ids=["small", "large"])
async def test_later_reads_see_nothing_that_was_postponed_after_them(
    store: Store, buffer: Buffer, size: int
) -> None:
    """Neither if all is sent in one statement, nor if it is too large for that."""
    [group_id] = await buffer.put(group("a"))
    found: list[Any] = []

    def work(session: Session) -> None:
        found.append(session.read_later([select_facts(buffer.id, [group_id])]))
        changes = {"group_id": group_id, "status_reason": "x" * size}
        session.postpone(Write(update_each_group(), [changes]))

    await store._database.write(work)
    [[[row]]] = (later() for later in found)
    assert row.status_reason is None
    [info] = await buffer.find()
    assert info.status_reason == "x" * size
