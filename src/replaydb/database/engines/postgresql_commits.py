"""Whether a PostgreSQL transaction whose COMMIT was not answered was committed.

Each connection that writes has a row in the table `commit_proof`. The first statement of each of
its transactions sets the number of the transaction in that row. So the number is committed if and
only if the transaction is. When the answer to a COMMIT is lost, another connection locks the row
and compares the number. The number that it finds is final:

- A COMMIT is sent only after the first statement was answered. On the server that it was sent to,
  the transaction therefore holds the lock of the row or has ended. `INSERT ... ON CONFLICT` waits
  for that lock, even if the row itself is not committed yet, and under READ COMMITTED it then reads
  the newest number.
- The proof does not depend on which server answers. A server that took over, or that recovered from
  a crash or a backup, has the number exactly if it has the rest of the transaction. It has replayed
  all of the old log that it will ever replay before it accepts a write. A standby, which may still
  receive the COMMIT, refuses to lock rows.
- The question writes and is committed itself, after the transaction that it asks about. Its own
  COMMIT is answered when both are as durable as any other commit, for example on a synchronous
  standby.

Transaction ids prove less: a server gives them again after a crash that lost them, and so does a
standby that is promoted without them.

The same rows show that a server has lost commits, because a backup was restored, or a standby
without the newest commits was promoted. Such a server generates the ids of the lost rows again. A
process that still has those ids would act on rows of others. Therefore the first statement of each
transaction also looks for the newest commits that were acknowledged to the same store. If one of
them is missing, the transaction is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Delete,
    Insert,
    Interval,
    Select,
    Uuid,
    any_,
    cast,
    column,
    delete,
    func,
    select,
    table,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.elements import Grouping

from replaydb.database.prepared import Bound, execute, prepared
from replaydb.database.schema import commit_proof

#: A transaction may end so much later on the server than the call that made it.
SERVER_GRACE_SECONDS = 5.0
#: A client that hangs inside a transaction must not hold a task's lock for ever.
IDLE_IN_TRANSACTION_SECONDS = 60
#: Pauses between questions.
PAUSE_SECONDS = 0.05
#: Rows of connections that have written nothing for so long are deleted.
RETENTION = timedelta(days=1)
#: No question is asked later than this after its transaction began: its row is still there.
ASKED_WITHIN_SECONDS = RETENTION.total_seconds() / 2
#: The first version with `transaction_timeout`, which also ends who is stuck in a payload.
_BOUNDS_TRANSACTIONS = 17
_KEY = "replaydb_transaction"


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction of one of our connections.

    Attributes:
        connection_uid: Key of the row of the connection in `commit_proof`.
        number: What the transaction has set there; counts the transactions of the connection.
        pid: The server process that runs it.
        began_at: When it began, by the clock of the server. A process that runs a transaction which
            began in another microsecond runs another one.
        asked_by: Time of the event loop after which its row may be gone.
        earlier: Acknowledged commits that it looked for when it began.
    """

    connection_uid: UUID
    number: int
    pid: int
    began_at: datetime
    asked_by: float
    earlier: Mapping[UUID, Commit]


class Commit(NamedTuple):
    """The number and start time of a transaction that is known to be committed."""

    number: int
    began_at: datetime


class Acknowledged:
    """The acknowledged commits that a server must have, by the uid of their connection.

    If a transaction found a commit when it began, that commit precedes its own in the server's log.
    After the transaction is committed, a server that has it also has the earlier commit, so only
    the later one is kept. There are at most as many as transactions that ran at the same time.
    """

    def __init__(self) -> None:
        self.newest: Mapping[UUID, Commit] = {}

    def add(self, transaction: Transaction) -> None:
        """Add a committed transaction, and remove the commits that it found when it began."""
        earlier = transaction.earlier
        kept = {uid: one for uid, one in self.newest.items() if earlier.get(uid) is not one}
        kept[transaction.connection_uid] = Commit(transaction.number, transaction.began_at)
        self.newest = kept


async def begin(connection: AsyncConnection, seconds: float, acknowledged: Acknowledged) -> bool:
    """Begin a transaction, which the server ends if it takes longer than `seconds` and a margin.

    Returns:
        Whether the server has all acknowledged commits. True also if all of them are so old that
        their rows may have been deleted.
    """
    limit = await _limit(connection, seconds)
    earlier = acknowledged.newest
    numbers = list(earlier), [one.number for one in earlier.values()]
    if is_reader(connection):
        if not earlier:  # a role that only reads may have no right to read `commit_proof`
            await connection.run_sync(execute, _look(*limit))
            return True
        row = await _row(connection, _look_back(*limit, *numbers))
        return _has_all(row, earlier)
    known: Transaction | None = connection.info.get(_KEY)
    uid, number = (uuid4(), 1) if known is None else (known.connection_uid, known.number + 1)
    asked_by = asyncio.get_running_loop().time() + ASKED_WITHIN_SECONDS
    row = await _row(connection, _begin(uid, number, *limit, *numbers))
    connection.info[_KEY] = Transaction(uid, number, row.pid, row.began_at, asked_by, earlier)
    if known is None:  # so there are never many more than connections were made in that time
        await connection.run_sync(execute, _delete_unused(RETENTION))
    return _has_all(row, earlier)


def _has_all(row: Any, earlier: Mapping[UUID, Commit]) -> bool:
    return row.num_found == len(earlier) or all(
        row.began_at - one.began_at > RETENTION / 2 for one in earlier.values()
    )


def is_reader(connection: AsyncConnection) -> bool:
    """Whether its transactions cannot write."""
    return bool(connection.sync_engine.get_execution_options().get("postgresql_readonly"))


def transaction_of(connection: AsyncConnection) -> Transaction:
    """The transaction that `begin` began."""
    transaction: Transaction = connection.info[_KEY]
    return transaction


async def was_committed(engine: AsyncEngine, transaction: Transaction, end: float) -> bool:
    """Ask until a server that accepts writes answers.

    A transaction that is still in progress belongs to a session that has lost its client, or will
    wait for it in vain: it is ended.

    Args:
        engine: READ COMMITTED, with connections to whichever server is the primary now.
        transaction: Of a connection that is not used any more.
        end: When to give up, a time of the event loop.

    Raises:
        TimeoutError: No server has answered. Its cause is why, if anything was raised.
    """
    failed: Exception | None = None
    end = min(end, transaction.asked_by)
    try:
        async with asyncio.timeout_at(end):
            while True:
                try:
                    async with engine.connect() as connection:
                        return await _ask(connection, transaction, end)
                except Exception as error:  # it starts, recovers, is a standby, is not there
                    failed = error
                await asyncio.sleep(PAUSE_SECONDS)
    except TimeoutError as error:
        raise error from failed


async def _ask(connection: AsyncConnection, transaction: Transaction, end: float) -> bool:
    limit = await _limit(connection, end - asyncio.get_running_loop().time())
    ended = _end_transaction(transaction.pid, transaction.began_at, *limit)
    await connection.run_sync(execute, ended)
    row = await _row(connection, _lock(transaction.connection_uid))
    await connection.commit()
    return bool(row.transaction_number == transaction.number)


async def _row(connection: AsyncConnection, statement: Bound[Any]) -> Any:
    """The row that a statement returns."""
    rows: Any = await connection.run_sync(execute, statement)
    return rows[0]


async def _limit(connection: AsyncConnection, seconds: float) -> tuple[str, str]:
    """The setting that bounds a transaction, and its value; before version 17 there is none."""
    driver: Any = (await connection.get_raw_connection()).driver_connection
    if driver.get_server_version().major < _BOUNDS_TRANSACTIONS:
        return _IDLENESS
    return "transaction_timeout", str(int(1000 * (max(seconds, 0.0) + SERVER_GRACE_SECONDS)))


_IDLENESS = ("idle_in_transaction_session_timeout", str(1000 * IDLE_IN_TRANSACTION_SECONDS))
#: Of the transaction, not of the session: behind a PgBouncer there is none.
BOUND_IDLENESS = func.set_config(*_IDLENESS, True)
_NEVER = 0


def _num_found(uids: Any, numbers: Any) -> ColumnElement[int]:
    """Count the connections whose number, when the statement begins, is at least the given one."""
    # SQL requires parentheses around a CAST that is indexed; SQLAlchemy does not add them.
    uids, numbers = cast(uids, ARRAY(Uuid)), Grouping(cast(numbers, ARRAY(BigInteger)))
    uid, number = commit_proof.c.connection_uid, commit_proof.c.transaction_number
    found = select(func.count()).where(
        uid == any_(uids),  # a join with `unnest` is planned again for each transaction
        number >= numbers[func.array_position(uids, uid)],
    )
    return found.scalar_subquery().label("num_found")


@prepared
def _begin(uid: Any, number: Any, setting: Any, limit: Any, uids: Any, numbers: Any) -> Insert:
    added = insert(commit_proof).values(
        connection_uid=uid, transaction_number=number, written_at=func.now()
    )
    new = added.excluded
    return added.on_conflict_do_update(
        index_elements=[commit_proof.c.connection_uid],
        set_={"transaction_number": new.transaction_number, "written_at": new.written_at},
    ).returning(
        func.pg_backend_pid().label("pid"),
        func.now().label("began_at"),
        BOUND_IDLENESS,
        func.set_config(setting, limit, True),
        _num_found(uids, numbers),
    )


@prepared
def _look(setting: Any, limit: Any) -> Select[Any]:
    return select(BOUND_IDLENESS, func.set_config(setting, limit, True))


@prepared
def _look_back(setting: Any, limit: Any, uids: Any, numbers: Any) -> Select[Any]:
    look = _look.build(setting, limit)
    return look.add_columns(func.now().label("began_at"), _num_found(uids, numbers))


@prepared
def _lock(uid: Any) -> Insert:
    """Lock the row of a connection, which need not be there, and read the number in it."""
    added = insert(commit_proof).values(
        connection_uid=uid, transaction_number=_NEVER, written_at=func.now()
    )
    return added.on_conflict_do_update(
        index_elements=[commit_proof.c.connection_uid],
        set_={"written_at": added.excluded.written_at},
    ).returning(commit_proof.c.transaction_number)


_ACTIVITY = table("pg_stat_activity", column("pid"), column("xact_start"))


@prepared
def _end_transaction(pid: Any, began_at: Any, setting: Any, limit: Any) -> Select[Any]:
    """End the session that runs it, if any: not one that only has the same process id."""
    ended = select(func.count(func.pg_terminate_backend(_ACTIVITY.c.pid))).where(
        _ACTIVITY.c.pid == pid, _ACTIVITY.c.xact_start == began_at
    )
    return select(BOUND_IDLENESS, func.set_config(setting, limit, True), ended.scalar_subquery())


@prepared
def _delete_unused(age: Any) -> Delete:
    """Delete old rows, except those that are locked: their connections are in use after all."""
    old = commit_proof.c.written_at < func.now() - cast(age, Interval)
    unused = select(commit_proof.c.connection_uid).where(old).with_for_update(skip_locked=True)
    return delete(commit_proof).where(commit_proof.c.connection_uid.in_(unused))
