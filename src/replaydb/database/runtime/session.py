"""Sessions: how the functions of a transaction run their statements.

A transaction is a function of a session, which may wait only for its connection. It runs where that
connection is used: in its thread, or in the event loop of a server's connections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

from sqlalchemy import Connection, Executable, Insert, Select, Update, UpdateBase

from replaydb.database.runtime.prepared import Bound, Postponable, Write
from replaydb.errors import DatabaseError

T = TypeVar("T")


class Identified(NamedTuple):
    """What is known about groups before they are put.

    Attributes:
        stored: Ids of the groups that are stored, by uid.
        new: A new id for each uid.
        has_children: Whether the children of those that are not stored were inserted.
        taken_error: Why the new ids cannot be used, if they cannot and all groups are stored.
    """

    stored: dict[str, int]
    new: Sequence[int]
    has_children: bool
    taken_error: DatabaseError | None = None


class Session(ABC):
    """A transaction in progress.

    By default each statement runs when it is called. The session of a server sends several together
    instead, since each round trip takes time: see `sends_together`.
    """

    #: Whether statements are sent together, because the connection is to a server.
    sends_together: ClassVar[bool] = False
    #: Whether a statement is known to have run in the transaction: BEGIN takes no snapshot.
    has_snapshot = False
    #: Called with the session, the SQL and the parameters of each statement.
    watch: Watch | None = None

    @property
    @abstractmethod
    def core(self) -> Connection:
        """The connection as SQLAlchemy's, for changes and descriptions of tables."""

    @overload
    def run(
        self, statement: Select[*tuple[Any, ...]] | Bound[Select[*tuple[Any, ...]]]
    ) -> Sequence[Any]: ...

    @overload
    def run(self, statement: UpdateBase | Bound[UpdateBase]) -> int: ...

    @abstractmethod
    def run(self, statement: Executable | Bound[Any]) -> Sequence[Any] | int:
        """Run a statement. If it is cached, so is its compiled form.

        Returns:
            The rows that it reads, with columns as attributes, or the number of rows that it
            changes.
        """

    @abstractmethod
    def run_many(self, statement: Insert | Update, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement once for each row, a dict of its parameters with the same names.

        `statement` must be an object that every call uses, not one that is built for this call.
        """

    def inserted_id(self, statement: Insert, values: Mapping[str, Any]) -> int:
        """Insert a row with a cached statement that returns its id, and return the id."""
        rows: Any = self.run(Bound(statement, values))
        return int(rows[0].id)

    def lock(self, statement: Bound[Any], reads: Sequence[Bound[Any]] = ()) -> Sequence[Any]:
        """Run a statement that locks rows, and return what it reads once it has the locks.

        Args:
            statement: Has a parameter `is_last`, also a column: false if the statement only waits
                for the locks, and should return few rows. The column `locked_ids` of its first row
                lists the rows that it has locked.
            reads: Prepared statements that are run next. On a server they are sent with this one,
                and run after the locks were granted. Their rows are kept for when they are run,
                unless something is written before that.
        """
        locking: Bound[Any] = Bound(statement.statement, {**statement.values, "is_last": True})
        rows: Sequence[Any] = self.run(locking)
        return rows

    def read_together(
        self, reads: Sequence[Bound[Select[*tuple[Any, ...]]]]
    ) -> list[Sequence[Any]]:
        """Run prepared statements that read, and return the rows of each."""
        return [self.run(read) for read in reads]

    def read_later(self, reads: Sequence[Bound[Any]]) -> Later:
        """Read rows as they are now, perhaps with the last statement of the transaction.

        Returns:
            A function that returns the rows of each statement, to be called when the transaction
            has ended.
        """
        rows = self.read_together(reads)
        return lambda: rows

    def postpone(self, *writes: Postponable) -> None:
        """Write before the next statement of the transaction, or with the last one."""
        for write in writes:
            if isinstance(write, Write):
                self.run_many(write.statement, write.rows)
            else:
                self.run(write)

    def send(self, last: Bound[Any] | None = None) -> Any:
        """Write what was postponed, and run a statement with it. Return the result of that."""
        return None if last is None else self.run(last)

    def savepoint(self) -> AbstractContextManager[object]:
        """Roll back what the block changes, if it raises."""
        return self.core.begin_nested()

    @abstractmethod
    def now(self) -> datetime:
        """Return the time for leases and deadlines, from one clock for all clients."""

    @abstractmethod
    def identify(
        self, buffer_id: int, uids: Sequence[str], *, children: Sequence[Write]
    ) -> Identified:
        """Find the groups that have these uids, and generate a new id for each uid.

        New ids are ascending. One that is used is never returned again. Groups that are stored need
        new ids only if they are renewed, or deleted before they are locked.

        The `children` of groups that are not stored yet may be inserted as well. Instead of
        `group_id` these rows have the position of the uid of their group, from 1.
        """

    @abstractmethod
    def read_payloads(
        self, ids: Sequence[int], fields: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the rows of `payload` of groups, with `data` as bytes or as a view of bytes.

        Those in packs have the pack's name as `pack`. Of parts with columns, only those in `fields`
        are read; None: all.
        """


def run_in_core(session: Session, statement: Any, values: Mapping[str, Any]) -> Any:
    """Run a statement that was built for this call with SQLAlchemy: see `Session.run`."""
    if session.watch is not None:
        options = {"render_postcompile": True}
        compiled = statement.compile(dialect=session.core.dialect, compile_kwargs=options)
        session.watch(session, str(compiled), {**compiled.params, **values})
    result: Any = session.core.execute(statement, values)
    return result.all() if result.returns_rows else result.rowcount


#: Returns the rows that several statements of a transaction have read.
Later = Callable[[], Sequence[Sequence[Any]]]
#: A transaction.
Work = Callable[[Session], T]
#: Sees a statement before it runs: its session, SQL and parameters.
Watch = Callable[[Session, str, Any], object]
