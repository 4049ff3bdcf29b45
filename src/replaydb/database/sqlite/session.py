"""Sessions on SQLite: each statement runs at once, in the thread of its connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Executable, Insert, Update, create_engine, event
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.pool import StaticPool

from replaydb.database.runtime.prepared import Bound, Write, plan_of
from replaydb.database.runtime.session import Identified, Session, run_in_core
from replaydb.database.sqlite import blobs, sequences
from replaydb.database.statements.episode_group import select_known_uids

#: One for all connections, each of which would otherwise compile every prepared statement again.
_DIALECT = SQLiteDialect_pysqlite(dbapi=sqlite3)


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
        last = sequences.last_group_id(self)
        return Identified(known, range(last + 1, last + 1 + len(uids)), has_children=False)

    def read_payloads(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Read the rows, with large payloads as blobs."""
        return blobs.read_payloads(self, self._driver, ids)
