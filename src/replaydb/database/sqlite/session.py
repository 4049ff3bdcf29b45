"""Sessions on SQLite: each statement runs at once, in the thread of its connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Insert,
    Select,
    Update,
    and_,
    case,
    column,
    create_engine,
    event,
    func,
    select,
)
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.pool import StaticPool

from replaydb.database.runtime.prepared import Bound, Write, plan_of, prepared
from replaydb.database.runtime.session import Identified, Session, run_in_core
from replaydb.database.sqlite.sequences import SEQUENCE
from replaydb.database.statements.episode_group import select_known_uids
from replaydb.database.statements.payload import NAME_OF_PACK
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import CONTEXT_PART, episode_group, payload
from replaydb.util.memory import LEAST_BYTES, take

#: One for all connections, each of which would otherwise compile every prepared statement again.
_DIALECT = SQLiteDialect_pysqlite(dbapi=sqlite3)
#: Bytes of a blob that are read at once: few enough to be still in the processor's cache when they
#: are copied to their destination.
BLOB_CHUNK = 1 << 16


class SqliteSession(Session):
    """Runs prepared statements with the driver, and others with SQLAlchemy on its connection."""

    def __init__(self, driver: sqlite3.Connection, check: Callable[[], None]) -> None:
        """Set the connection, and a function that raises if the transaction must end."""
        self._driver = driver
        self._check = check
        engine = create_engine(
            "sqlite://",
            creator=lambda: driver,
            poolclass=StaticPool,
            pool_reset_on_return=None,
            hide_parameters=True,
        )
        event.listen(engine, "before_cursor_execute", lambda *_: check())
        self._core = engine.connect()  # now: for the first connection it ends any transaction

    @property
    def core(self) -> Connection:
        """The connection as SQLAlchemy's. It neither begins nor ends transactions."""
        return self._core

    def run(self, statement: Executable | Bound[Any]) -> Any:
        """Run a statement."""
        self._check()
        if not isinstance(statement, Bound):
            return run_in_core(self, statement, {})
        if not statement.is_cached:
            return run_in_core(self, statement.statement, statement.values)
        plan = plan_of(statement.statement, tuple(statement.values), _DIALECT)
        parameters = plan.parameters(statement.values)
        if self.watch is not None:
            self.watch(self, plan.sql, parameters)
        # Not left to the garbage collector: after an error of `fetchall` itself, such as for text
        # that is not UTF-8, the statement would keep the snapshot of its transaction.
        with closing(self._driver.execute(plan.sql, parameters)) as cursor:
            if cursor.description is None:
                return cursor.rowcount
            return plan.rows(cursor.fetchall(), cursor.description)

    def run_many(self, statement: Insert | Update, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement once for each row."""
        if not rows:
            return
        self._check()
        plan = plan_of(statement, tuple(rows[0]), _DIALECT)
        parameters = plan.parameters_of_each(rows)
        if self.watch is not None:
            self.watch(self, plan.sql, parameters)
        self._driver.executemany(plan.sql, parameters)

    def now(self) -> datetime:
        """Return the time of this machine, which all clients of the file share."""
        return datetime.now(UTC)

    def identify(
        self, buffer_id: int, uids: Sequence[str], *, children: Sequence[Write]
    ) -> Identified:
        """Return new ids after AUTOINCREMENT's counter and after the largest id of a group."""
        known = {row.group_uid: row.id for row in self.run(select_known_uids(buffer_id, uids))}
        [(last,)] = self.run(_select_last_group_id())
        return Identified(known, range(last + 1, last + 1 + len(uids)), has_children=False)

    def read_payloads(
        self, ids: Sequence[int], fields: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Read the rows, with large payloads as blobs.

        SQLite assembles the value of a column from its pages, and the driver then copies it. A blob
        is copied only once, from the pages to its destination. For megabytes this takes a third of
        the time.
        """
        if fields is None:
            found = self.run(_select_small_payloads(ids))
        else:
            found = self.run(_select_small_cores(ids))
            found += self.run(_select_small_fields(ids, sorted(fields)))
        rows = [row._asdict() for row in found]
        for row in rows:
            rowid = row.pop("rowid_if_large")
            if rowid is not None:
                row["data"] = self._read_blob(rowid)
        return rows

    def _read_blob(self, rowid: int) -> memoryview:
        with self._driver.blobopen(payload.name, payload.c.data.name, rowid, readonly=True) as blob:
            data = take(len(blob))
            for begin in range(0, len(data), BLOB_CHUNK):
                data[begin : begin + BLOB_CHUNK] = blob.read(BLOB_CHUNK)
        return data


@prepared
def _select_last_group_id() -> Select[int]:
    last = select(func.max(SEQUENCE.c.seq)).where(SEQUENCE.c.name == episode_group.name)
    used = select(func.max(episode_group.c.id))
    return select(
        func.max(  # with two arguments: the larger one
            func.coalesce(last.scalar_subquery(), 0), func.coalesce(used.scalar_subquery(), 0)
        )
    )


@prepared
def _select_small_payloads(ids: Any) -> Select[Any]:
    """Select the rows of `payload` of groups, without the data of large ones."""
    return _small_payloads(among(payload.c.group_id, ids))


# Two statements: to evaluate a condition on `field`, the column after the data, SQLite reads every
# page of the data.
@prepared
def _select_small_cores(ids: Any) -> Select[Any]:
    """Select these rows without those of columns."""
    return _small_payloads(among(payload.c.group_id, ids), payload.c.part >= CONTEXT_PART)


@prepared
def _select_small_fields(ids: Any, fields: Any) -> Select[Any]:
    """Select these rows of some columns."""
    return _small_payloads(among(payload.c.group_id, ids), among(payload.c.field, fields))


def _small_payloads(*conditions: ColumnElement[bool]) -> Select[Any]:
    data = payload.c.data
    # A value of another type cannot be opened as a blob, and its length has another unit.
    is_large = and_(func.typeof(data) == "blob", func.length(data) >= LEAST_BYTES)
    return select(
        *[each for each in payload.c if each is not data],
        case((is_large, None), else_=data).label(data.name),
        case((is_large, column("rowid"))).label("rowid_if_large"),
        NAME_OF_PACK,
    ).where(*conditions)
