"""Proof of whether a PostgreSQL transaction was committed, if the answer to its COMMIT was lost.

Each connection that writes has a row in the table `commit_proof`. The first statement of each of
its transactions sets the number of the transaction in that row. So the number is committed if and
only if the transaction is. When the answer to a COMMIT is lost, another connection locks the row
and compares the number. The number that it finds is final:

- A COMMIT is sent only after the first statement was answered. On the server that it was sent to,
  the transaction therefore holds the lock of the row or has ended. `INSERT ... ON CONFLICT` waits
  for that lock, even if the row itself is not committed yet, and under READ COMMITTED it then reads
  the newest number.
- The proof does not depend on which server answers. A server that took over, or that recovered from
  a crash or a backup, has the number exactly if it has the rest of the transaction. Such a
  server accepts writes only after it has replayed all of the old log that it can get. A standby,
  which may still receive the COMMIT, refuses to lock rows.
- The query that reads the outcome also writes, and is committed after the transaction in question.
  When its own COMMIT is answered, both transactions are as durable as any other commit. If
  the server waits for a synchronous standby, both are on that standby.

Transaction ids prove less: after a crash that lost them, a server assigns them again, and so does a
standby that is promoted without them.

The same rows reveal whether a server has lost commits. This happens if a backup was restored, or if
a standby without the newest commits was promoted. Such a server generates the ids of the lost rows
again. A process that still has those ids would act on rows of others. Therefore the first statement
of each transaction also looks for the newest commits that were acknowledged to the same store. If
one of them is missing, the transaction is refused.
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

#: The server ends a transaction this long after the deadline of the call that began it.
SERVER_GRACE_SECONDS = 5.0
#: After this time the server ends a transaction whose client has stalled.
IDLE_IN_TRANSACTION_SECONDS = 60
#: Pause between attempts to read an outcome.
PAUSE_SECONDS = 0.05
#: Rows of connections that have written nothing for this long are deleted.
RETENTION = timedelta(days=1)
#: An outcome is read at most this long after its transaction began, while its row still exists.
READABLE_SECONDS = RETENTION.total_seconds() / 2
#: The first version with `transaction_timeout`, which also ends a client that stalls while it sends
#: or receives a payload.
_BOUNDS_TRANSACTIONS = 17
_KEY = "replaydb_transaction"
_IDLENESS = "idle_in_transaction_session_timeout"
_IDLE_MILLISECONDS = str(1000 * IDLE_IN_TRANSACTION_SECONDS)


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction of one of our connections.

    Attributes:
        connection_uid: Key of the row of the connection in `commit_proof`.
        number: Number that it has set in the row, counted per connection.
        pid: The server process that runs it.
        began_at: When it began, by the clock of the server, in microseconds. If the same server
            process runs a transaction with another start time, that is a different one.
        readable_until: Time of the event loop until which the row is sure to exist.
        earlier: Acknowledged commits that the server had to have when the transaction began.
    """

    connection_uid: UUID
    number: int
    pid: int
    began_at: datetime
    readable_until: float
    earlier: Mapping[UUID, Commit]


class Commit(NamedTuple):
    """The number and start time of a transaction that is known to be committed."""

    number: int
    began_at: datetime


class Acknowledged:
    """The acknowledged commits that a server must have, by the uid of their connection.

    When a transaction begins, it checks that the earlier commits are there. These precede its own
    commit in the server's log.
    After the transaction is committed, a server that has it also has the earlier commit, so only
    the later one is stored here. The number of stored commits is at most the number of transactions
    that ran concurrently.
    """

    def __init__(self) -> None:
        self.newest: Mapping[UUID, Commit] = {}

    def add(self, transaction: Transaction) -> None:
        """Add a committed transaction, and remove the commits that it found when it began."""
        earlier = transaction.earlier
        kept = {uid: one for uid, one in self.newest.items() if earlier.get(uid) is not one}
        kept[transaction.connection_uid] = Commit(transaction.number, transaction.began_at)
        self.newest = kept


async def begin(
    connection: AsyncConnection,
    seconds: float,
    acknowledged: Acknowledged,
    *,
    frozen_seconds: float = IDLE_IN_TRANSACTION_SECONDS,
) -> bool:
    """Begin a transaction, which the server ends if it takes longer than `seconds` and a margin.

    It also ends the transaction if its client sends nothing for `frozen_seconds`, or 60 s if the
    transaction only reads. 0: it waits without limit.

    Returns:
        Whether the server has all acknowledged commits. True also if all of them are so old that
        their rows may have been deleted.
    """
    earlier = acknowledged.newest
    numbers = list(earlier), [one.number for one in earlier.values()]
    if is_reader(connection):
        limit = await _limit(connection, seconds)
        if not earlier:  # a read-only role may not be allowed to read `commit_proof`
            await connection.run_sync(execute, _set_limits(*limit))
            return True
        row = await _row(connection, _find_commits(*limit, *numbers))
        return _has_all(row, earlier)
    known: Transaction | None = connection.info.get(_KEY)
    uid, number = (uuid4(), 1) if known is None else (known.connection_uid, known.number + 1)
    readable_until = asyncio.get_running_loop().time() + READABLE_SECONDS
    idle = _idleness(seconds, frozen_seconds)
    limit = await _limit(connection, seconds, idle)
    row = await _row(connection, _begin(uid, number, idle, *limit, *numbers))
    connection.info[_KEY] = Transaction(uid, number, row.pid, row.began_at, readable_until, earlier)
    if known is None:  # a new row: delete old ones, so that their number stays limited
        await connection.run_sync(execute, _delete_unused(RETENTION))
    return _has_all(row, earlier)


def _has_all(row: Any, earlier: Mapping[UUID, Commit]) -> bool:
    return row.num_found == len(earlier) or all(
        row.began_at - one.began_at > RETENTION / 2 for one in earlier.values()
    )


def is_reader(connection: AsyncConnection) -> bool:
    """Whether the transactions of a connection are read-only."""
    return bool(connection.sync_engine.get_execution_options().get("postgresql_readonly"))


def transaction_of(connection: AsyncConnection) -> Transaction:
    """Return the transaction that `begin` began."""
    transaction: Transaction = connection.info[_KEY]
    return transaction


async def was_committed(engine: AsyncEngine, transaction: Transaction, end: float) -> bool:
    """Return whether a transaction was committed. Retry until a server that accepts writes answers.

    If the transaction is still in progress, its session has lost its client. Terminate that
    session.

    Args:
        engine: A READ COMMITTED engine that connects to the current primary.
        transaction: A transaction of a connection that is no longer used.
        end: Deadline, a time of the event loop.

    Raises:
        TimeoutError: No server has answered. Its cause is the last error, if there was one.
    """
    failed: Exception | None = None
    end = min(end, transaction.readable_until)
    try:
        async with asyncio.timeout_at(end):
            while True:
                try:
                    async with engine.connect() as connection:
                        return await _read_outcome(connection, transaction, end)
                except Exception as error:  # it is unreachable, starting, recovering or a standby
                    failed = error
                await asyncio.sleep(PAUSE_SECONDS)
    except TimeoutError as error:
        raise error from failed


async def _read_outcome(connection: AsyncConnection, transaction: Transaction, end: float) -> bool:
    limit = await _limit(connection, end - asyncio.get_running_loop().time())
    ended = _end_transaction(transaction.pid, transaction.began_at, *limit)
    await connection.run_sync(execute, ended)
    row = await _row(connection, _lock(transaction.connection_uid))
    await connection.commit()
    return bool(row.transaction_number == transaction.number)


async def _row(connection: AsyncConnection, statement: Bound[Any]) -> Any:
    """Return the row that a statement returns."""
    rows: Any = await connection.run_sync(execute, statement)
    return rows[0]


def _idleness(seconds: float, frozen_seconds: float) -> str:
    """Return the limit of idle time, in milliseconds, of a call that may write for `seconds`.

    A call that may take an hour may also compute for longer between two statements.
    """
    longest = min(seconds / 60, IDLE_IN_TRANSACTION_SECONDS)
    return str(int(1000 * max(frozen_seconds, longest))) if frozen_seconds else "0"


async def _limit(
    connection: AsyncConnection, seconds: float, idle: str = _IDLE_MILLISECONDS
) -> tuple[str, str]:
    """Return the setting that limits a transaction, and its value.

    Servers before version 17 have no such setting. For them, return the limit on idle time, which
    every transaction sets.
    """
    driver: Any = (await connection.get_raw_connection()).driver_connection
    if driver.get_server_version().major < _BOUNDS_TRANSACTIONS:
        return _IDLENESS, idle
    return "transaction_timeout", str(int(1000 * (max(seconds, 0.0) + SERVER_GRACE_SECONDS)))


#: Set for the transaction, because a client has no session of its own behind PgBouncer.
BOUND_IDLENESS = func.set_config(_IDLENESS, _IDLE_MILLISECONDS, True)
_NEVER = 0


def _num_found(uids: Any, numbers: Any) -> ColumnElement[int]:
    """Count the connections whose number is at least the given one when the statement begins."""
    # SQL requires parentheses around a CAST that is indexed; SQLAlchemy does not add them.
    uids, numbers = cast(uids, ARRAY(Uuid)), Grouping(cast(numbers, ARRAY(BigInteger)))
    uid, number = commit_proof.c.connection_uid, commit_proof.c.transaction_number
    found = select(func.count()).where(
        uid == any_(uids),  # a join with `unnest` is planned again for each transaction
        number >= numbers[func.array_position(uids, uid)],
    )
    return found.scalar_subquery().label("num_found")


@prepared
def _begin(
    uid: Any, number: Any, idle: Any, setting: Any, limit: Any, uids: Any, numbers: Any
) -> Insert:
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
        func.set_config(_IDLENESS, idle, True),
        func.set_config(setting, limit, True),
        _num_found(uids, numbers),
    )


@prepared
def _set_limits(setting: Any, limit: Any) -> Select[Any]:
    return select(BOUND_IDLENESS, func.set_config(setting, limit, True))


@prepared
def _find_commits(setting: Any, limit: Any, uids: Any, numbers: Any) -> Select[Any]:
    set_limits = _set_limits.build(setting, limit)
    return set_limits.add_columns(func.now().label("began_at"), _num_found(uids, numbers))


@prepared
def _lock(uid: Any) -> Insert:
    """Lock the row of a connection, inserting it if it does not exist, and read its number."""
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
    """Terminate the session that runs a transaction, but no other with the same process id."""
    ended = select(func.count(func.pg_terminate_backend(_ACTIVITY.c.pid))).where(
        _ACTIVITY.c.pid == pid, _ACTIVITY.c.xact_start == began_at
    )
    return select(BOUND_IDLENESS, func.set_config(setting, limit, True), ended.scalar_subquery())


@prepared
def _delete_unused(age: Any) -> Delete:
    """Delete old rows, except locked ones, whose connections are still in use."""
    old = commit_proof.c.written_at < func.now() - cast(age, Interval)
    unused = select(commit_proof.c.connection_uid).where(old).with_for_update(skip_locked=True)
    return delete(commit_proof).where(commit_proof.c.connection_uid.in_(unused))
