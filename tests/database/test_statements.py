"""Statements of a session, and transactions in one thread hop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import (
    Boolean,
    Delete,
    Integer,
    Select,
    bindparam,
    column,
    delete,
    func,
    insert,
    literal,
    select,
    table,
    true,
    update,
)

import replaydb as rdb
from replaydb import Store
from replaydb.database.engines import backend_for
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import Database
from replaydb.database.tables.schema import run
from support.watching import recorded

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


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    """An open database."""
    opened = Database(backend_for(url))
    yield opened
    await opened.close()


async def test_run_many_writes_the_values_of_sqlalchemy(database: Database) -> None:
    def work(session: Session) -> None:
        session.run_many(INSERT, rows())
        found = session.run(named("run-0", "run-1"))
        assert [row.metadata for row in found] == [one["metadata"] for one in rows()[:2]]
        assert [row.started_at for row in found] == [one["started_at"] for one in rows()[:2]]
        assert [row.lineage for row in found] == [None, None]

    await database.write(work)


async def test_repeated_parameters_and_constants(database: Database) -> None:
    def work(session: Session) -> None:
        session.run_many(INSERT, rows())
        ids = [row.id for row in session.run(select(run.c.id).order_by(run.c.id))]
        session.run_many(RENAME, [{"new": f"new-{one}", "which": one} for one in ids[:2]])
        found = session.run(named("new", "newer"))
        assert [row.name for row in found] == [row.lineage for row in found]
        assert [row.name for row in found] == [f"new-{one}" for one in ids[:2]]
        assert {row.started_at for row in found} == {EARLIER.astimezone(UTC)}

    await database.write(work)


async def test_the_repeated_hour_of_a_clock_change_is_two_hours(database: Database) -> None:
    """In Python, both times are equal, also as keys of a cache."""
    twice = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert twice == twice.replace(fold=1)
    mine = [one | {"started_at": twice.replace(fold=i)} for i, one in enumerate(rows()[:2])]

    def work(session: Session) -> None:
        session.run_many(INSERT, mine)
        first, second = sorted(row.started_at for row in session.run(named("run-0", "run-1")))
        assert second - first == timedelta(hours=1)

    await database.write(work)


async def test_run_many_without_rows(database: Database) -> None:
    def work(session: Session) -> None:
        session.run_many(INSERT, [])
        assert session.run(select(run)) == []

    await database.write(work)


async def test_run_returns_rows_or_their_number(database: Database) -> None:
    def work(session: Session) -> None:
        session.run_many(INSERT, rows())
        statement = select(run).where(run.c.name == "run-1")
        (row,) = session.run(statement)
        assert (row.name, row.metadata) == ("run-1", {"seed": 1, "nested": [1e16, None]})
        assert session.run(statement.where(run.c.id == 0)) == []
        renamed = update(run).where(run.c.name != "run-1").values(lineage="new")
        assert session.run(renamed) == 2
        assert session.run(renamed.where(run.c.id == 0)) == 0
        assert session.run(removed("run-0", "run-1")) == 2

    await database.write(work)


async def test_watching_a_store_shows_every_statement(store: Store) -> None:
    """On PostgreSQL, statements then run through SQLAlchemy, and results are the same."""

    def unwatched(session: Session) -> tuple[list[int], Sequence[Any]]:
        ids = [session.inserted_id(INSERT_ONE, row) for row in rows()]
        return ids, session.run(named("run-0", "run-9"))

    ids, before = await store._database.write(unwatched)
    with recorded(store) as statements:

        def watched(session: Session) -> tuple[list[str], Sequence[Any]]:
            statements.clear()
            more = [row | {"name": f"{row['name']}-again"} for row in rows()]
            session.run_many(INSERT, more)
            found = session.run(named("run-0", "run-9"))
            assert session.run(removed("run-0", "run-1")) == 3
            return [sql.partition(" ")[0] for sql in statements], found

        kinds, after = await store._database.write(watched)
    assert kinds == ["INSERT", "SELECT", "DELETE"]
    assert [row.id for row in before] == ids
    assert [row._asdict() for row in before] == [row._asdict() for row in after[::2]]
    assert before[0].started_at.tzinfo is UTC


async def test_errors_contain_no_values(database: Database) -> None:
    """The server adds the key that is stored already, as a detail."""

    def work(session: Session) -> None:
        session.run_many(INSERT, rows()[:1])
        session.run_many(INSERT, rows()[:1])

    with pytest.raises(rdb.DatabaseError, match=r"(?i)unique constraint") as failed:
        await database.write(work)
    assert "run-0" not in str(failed.value)


@pytest.mark.parametrize("method", ["run", "lock"])
async def test_statements_work_after_a_table_was_changed(
    own_postgresql_url: str, method: str
) -> None:
    """Prepared statements then fail, and the call is run again on a new connection."""
    database = Database(backend_for(own_postgresql_url))
    is_last = bindparam("is_last", type_=Boolean()) if method == "lock" else true()
    columns = NUMBERS.c.number, is_last.label("is_last"), literal("7").label("locked_ids")
    changing = prepared(lambda least: select(*columns).where(NUMBERS.c.number >= least))

    def change(sql: str) -> Awaitable[object]:
        return database.write(lambda session: session.core.exec_driver_sql(sql))

    def read() -> Awaitable[Sequence[Any]]:
        return database.read(lambda session: getattr(session, method)(changing(7)))

    await change("CREATE TABLE numbers AS SELECT CAST(7 AS integer) AS number")
    for _ in range(2):
        assert len(await read()) == 1
    await change("ALTER TABLE numbers ALTER COLUMN number TYPE bigint")
    assert len(await read()) == 1
    await database.close()


def test_a_prepared_statement_is_built_once() -> None:
    first, second = named("a", "b"), named("c", "d")
    assert first.statement is second.statement
    assert first.values == {"names_from": "a", "names_to": "b"}
    with pytest.raises(ValueError, match="shorter"):
        named("a")


async def test_a_transaction_runs_in_one_thread_which_is_not_the_callers(
    database: Database,
) -> None:
    threads = set()

    def work(session: Session) -> None:
        for row in rows():
            session.run_many(INSERT, [row])
            threads.add(threading.get_ident())

    await database.write(work)
    assert len(threads - {threading.get_ident()}) == len(threads) == 1
    assert len(await database.read(lambda it: it.run(named("run-0", "run-9")))) == 3


Pinned = Callable[[], object]


def insert_all(session: Session) -> int:
    session.run_many(INSERT, rows())
    return len(rows())


def num_stored(session: Session) -> int:
    return int(session.run(select(func.count()).select_from(run))[0][0])


async def test_a_read_after_a_write_has_a_snapshot_from_before_the_commit(
    database: Database,
) -> None:
    def read(session: Session, result: int, pinned: Pinned) -> tuple[int, int]:
        before = num_stored(session)
        pinned()
        return before, result

    many, found = await database.write_then_read(
        insert_all, read, is_needed=bool, num_bytes=lambda _: 0
    )
    assert found == (0, many)
    assert await database.read(num_stored) == many


@pytest.mark.parametrize(
    ("when", "num_left"), [("before the snapshot", 0), ("after the snapshot", 3), ("never", 3)]
)
async def test_only_a_read_without_a_snapshot_prevents_the_commit(
    database: Database, when: str, num_left: int
) -> None:
    def fail(session: Session, result: int, pinned: Pinned) -> None:
        if when == "after the snapshot":
            num_stored(session)
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


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_transaction_ends_before_it_is_rolled_back(
    sqlite_url: str, times: int
) -> None:
    """However often it is cancelled, its thread uses the connection until the next statement."""
    database = Database(backend_for(sqlite_url))
    inside, resume = threading.Event(), threading.Event()

    def work(session: Session) -> None:
        session.run_many(INSERT, rows()[:1])
        inside.set()
        resume.wait(60)
        session.run_many(INSERT, rows()[1:])
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
    assert await database.read(lambda it: it.run(select(run))) == []
    await database.write(lambda it: it.run_many(INSERT, rows()))
    await database.close()
