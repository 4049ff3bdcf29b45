"""Prepared statements, `execute_many`, and transactions in one thread hop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import (
    Boolean,
    Connection,
    Delete,
    Integer,
    Select,
    bindparam,
    column,
    delete,
    event,
    func,
    insert,
    literal,
    select,
    table,
    true,
    update,
)
from sqlalchemy.exc import IntegrityError

from replaydb.database.engines import backend_for
from replaydb.database.runtime.prepared import (
    execute,
    execute_locking,
    execute_many,
    inserted_id,
    prepared,
)
from replaydb.database.runtime.transactions import Database
from replaydb.database.tables.schema import run
from support.connections import transaction

EARLIER = datetime(2026, 1, 15, 12, tzinfo=timezone(timedelta(hours=2)))
INSERT = insert(run)
INSERT_ONE = insert(run).returning(run.c.id)
NUMBERS = table("numbers", column("number", Integer))
RENAME = (
    update(run)
    .where(run.c.id == bindparam("which"))
    .values(name=bindparam("new"), lineage=bindparam("new"), started_at=EARLIER)
)


@prepared
def named(names_from: Any, names_to: Any) -> Select[Any]:
    """Select runs in a range of names."""
    return select(run).where(run.c.name.between(names_from, names_to)).order_by(run.c.name)


@prepared
def removed(names_from: Any, names_to: Any) -> Delete:
    """Delete runs in a range of names."""
    return delete(run).where(run.c.name.between(names_from, names_to))


def rows() -> list[dict[str, object]]:
    return [
        {
            "name": f"run-{i}",
            "started_at": EARLIER + timedelta(hours=i),
            "metadata": {"seed": i, "nested": [1e16, None]},
        }
        for i in range(3)
    ]


async def test_execute_many_writes_the_values_of_sqlalchemy(url: str) -> None:
    async with transaction(url) as connection:
        await connection.run_sync(execute_many, INSERT, rows())
        found = await connection.run_sync(execute, named("run-0", "run-1"))
        assert [row.metadata for row in found] == [one["metadata"] for one in rows()[:2]]
        assert [row.started_at for row in found] == [one["started_at"] for one in rows()[:2]]
        assert [row.lineage for row in found] == [None, None]


async def test_repeated_parameters_and_constants(url: str) -> None:
    async with transaction(url) as connection:
        await connection.run_sync(execute_many, INSERT, rows())
        ids = (await connection.scalars(select(run.c.id).order_by(run.c.id))).all()
        await connection.run_sync(
            execute_many, RENAME, [{"new": f"new-{one}", "which": one} for one in ids[:2]]
        )
        found = await connection.run_sync(execute, named("new", "newer"))
    assert [row.name for row in found] == [row.lineage for row in found]
    assert [row.name for row in found] == [f"new-{one}" for one in ids[:2]]
    assert {row.started_at for row in found} == {EARLIER.astimezone(UTC)}


async def test_the_repeated_hour_of_a_clock_change_is_two_hours(url: str) -> None:
    """In Python, both times are equal, also as keys of a cache."""
    twice = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert twice == twice.replace(fold=1)
    mine = [one | {"started_at": twice.replace(fold=i)} for i, one in enumerate(rows()[:2])]
    async with transaction(url) as connection:
        await connection.run_sync(execute_many, INSERT, mine)
        found = await connection.run_sync(execute, named("run-0", "run-1"))
    first, second = sorted(row.started_at for row in found)
    assert second - first == timedelta(hours=1)


async def test_execute_many_without_rows(url: str) -> None:
    async with transaction(url) as connection:
        await connection.run_sync(execute_many, INSERT, [])
        assert (await connection.execute(select(run))).all() == []


async def test_execute_returns_rows_or_their_number(url: str) -> None:
    async with transaction(url) as connection:
        await connection.run_sync(execute_many, INSERT, rows())
        statement = select(run).where(run.c.name == "run-1")
        (row,) = await connection.run_sync(execute, statement)
        assert (row.name, row.metadata) == ("run-1", {"seed": 1, "nested": [1e16, None]})
        assert await connection.run_sync(execute, statement.where(run.c.id == 0)) == []
        renamed = update(run).where(run.c.name != "run-1").values(lineage="new")
        assert await connection.run_sync(execute, renamed) == 2
        assert await connection.run_sync(execute, renamed.where(run.c.id == 0)) == 0
        assert await connection.run_sync(execute, removed("run-0", "run-1")) == 2


async def test_event_listeners_get_every_statement(url: str) -> None:
    """With listeners, statements run through SQLAlchemy, and results are the same."""
    statements = []

    def listen(_connection: object, _cursor: object, sql: str, *_: object) -> None:
        statements.append(sql.partition(" ")[0])

    async with transaction(url) as connection:
        ids = [await connection.run_sync(inserted_id, INSERT_ONE, row) for row in rows()]
        before = await connection.run_sync(execute, named("run-0", "run-9"))
        event.listen(connection.sync_connection, "before_cursor_execute", listen)
        more = [row | {"name": f"{row['name']}-again"} for row in rows()]
        await connection.run_sync(execute_many, INSERT, more)
        after = await connection.run_sync(execute, named("run-0", "run-9"))
        assert await connection.run_sync(execute, removed("run-0", "run-1")) == 3
    assert statements == ["INSERT", "SELECT", "DELETE"]
    assert [row.id for row in before] == ids
    assert [row._asdict() for row in before] == [row._asdict() for row in after[::2]]
    assert before[0].started_at.tzinfo is UTC


async def test_errors_are_those_of_sqlalchemy(url: str) -> None:
    async with transaction(url) as connection:
        await connection.run_sync(execute_many, INSERT, rows()[:1])
        with pytest.raises(IntegrityError) as failed:
            await connection.run_sync(execute_many, INSERT, rows()[:1])
        assert "INSERT INTO run" in str(failed.value.statement)
        assert "run-0" not in str(failed.value.params)


@pytest.mark.parametrize("read", [execute, execute_locking])
async def test_statements_work_after_a_table_was_changed(
    own_postgresql_url: str, read: Any
) -> None:
    """Prepared statements then fail, and the call is run again on a new connection."""
    database = Database(backend_for(own_postgresql_url))
    is_last = bindparam("is_last", type_=Boolean()) if read is execute_locking else true()
    columns = NUMBERS.c.number, is_last.label("is_last"), literal("7").label("locked_ids")
    changing = prepared(lambda least: select(*columns).where(NUMBERS.c.number >= least))

    def change(sql: str) -> Awaitable[object]:
        return database.write(lambda connection: connection.exec_driver_sql(sql))

    await change("CREATE TABLE numbers AS SELECT CAST(7 AS integer) AS number")
    for _ in range(2):
        assert len(await database.read(lambda it: read(it, changing(7)))) == 1
    await change("ALTER TABLE numbers ALTER COLUMN number TYPE bigint")
    assert len(await database.read(lambda it: read(it, changing(7)))) == 1
    await database.close()


def test_a_prepared_statement_is_built_once() -> None:
    first, second = named("a", "b"), named("c", "d")
    assert first.statement is second.statement
    assert first.values == {"names_from": "a", "names_to": "b"}
    with pytest.raises(ValueError, match="shorter"):
        named("a")


async def test_a_transaction_runs_in_one_thread_which_is_not_the_callers(url: str) -> None:
    database = Database(backend_for(url))
    threads = set()

    def work(connection: Connection) -> None:
        for row in rows():
            connection.execute(INSERT, row)
            threads.add(threading.get_ident())

    await database.write(work)
    assert len(threads - {threading.get_ident()}) == len(threads) == 1
    assert len(await database.read(lambda c: execute(c, named("run-0", "run-9")))) == 3
    await database.close()


Pinned = Callable[[], object]


def insert_all(connection: Connection) -> int:
    execute_many(connection, INSERT, rows())
    return len(rows())


def num_stored(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(run)).scalar_one())


async def test_a_read_after_a_write_has_a_snapshot_from_before_the_commit(url: str) -> None:
    database = Database(backend_for(url))

    def read(connection: Connection, result: int, pinned: Pinned) -> tuple[int, int]:
        before = num_stored(connection)
        pinned()
        return before, result

    many, found = await database.write_then_read(
        insert_all, read, is_needed=bool, num_bytes=lambda _: 0
    )
    assert found == (0, many)
    assert await database.read(num_stored) == many
    await database.close()


@pytest.mark.parametrize(
    ("when", "num_left"), [("before the snapshot", 0), ("after the snapshot", 3), ("never", 3)]
)
async def test_only_a_read_without_a_snapshot_prevents_the_commit(
    url: str, when: str, num_left: int
) -> None:
    database = Database(backend_for(url))

    def fail(connection: Connection, result: int, pinned: Pinned) -> None:
        if when == "after the snapshot":
            num_stored(connection)
            pinned()
        raise LookupError

    writing = database.write_then_read(
        insert_all, fail, is_needed=lambda _: when != "never", num_bytes=lambda _: 0
    )
    if when == "never":
        assert await writing == (3, None)
    else:
        with pytest.raises(LookupError):
            await writing
    assert await database.read(num_stored) == num_left
    await database.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_transaction_ends_before_it_is_rolled_back(
    sqlite_url: str, times: int
) -> None:
    """However often it is cancelled, its thread uses the connection until the next statement."""
    database = Database(backend_for(sqlite_url))
    inside, resume = threading.Event(), threading.Event()

    def work(connection: Connection) -> None:
        connection.execute(INSERT, rows()[0])
        inside.set()
        resume.wait(60)
        connection.execute(INSERT, rows()[1])
        pytest.fail("the transaction was cancelled")

    writing = asyncio.ensure_future(database.write(work))
    await asyncio.to_thread(inside.wait, 60)
    for _ in range(times):
        writing.cancel()
        await asyncio.sleep(0.01)
    assert not writing.done()
    resume.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await database.read(lambda c: c.execute(select(run)).all()) == []
    await database.write(lambda connection: execute_many(connection, INSERT, rows()))
    await database.close()
