"""Proof of whether a PostgreSQL transaction was committed, if the answer to its COMMIT was lost.

Each connection that writes has a row in the table `commit_proof`. The last statement of each of its
transactions sets the number of the transaction in that row. So the number is committed if and only
if the transaction is. When the answer to a COMMIT is lost, another connection locks the row and
compares the number. The number that it finds is final:

- A COMMIT is sent only after the last statement was answered. On the server that it was sent to,
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
again. A process that still has those ids would act on rows of others. Therefore the same statement,
and the first one of a read, also look for the newest commits that were acknowledged to the same
store. If one of them is missing, the transaction is refused. A connection of which all of them are
known to be there is not asked again: as long as it lasts, its server loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
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
from sqlalchemy.sql.elements import Grouping
from sqlalchemy.util import greenlet_spawn

from replaydb.database.postgresql import limits
from replaydb.database.postgresql.connecting import WRITING, Connection
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.runtime.prepared import prepared
from replaydb.database.tables.schema import commit_proof

#: Pause between attempts to read an outcome.
PAUSE_SECONDS = 0.05
#: Rows of connections that have written nothing for this long are deleted.
RETENTION = timedelta(days=1)
#: An outcome is read at most this long after its transaction began, while its row still exists.
READABLE_SECONDS = RETENTION.total_seconds() / 2


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
        earlier: Acknowledged commits that the server had to have before this one.
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

    The last statement of a transaction checks that the earlier commits are there. These precede its
    own commit in the server's log. After the transaction is committed, a server that has it also
    has the earlier commits, so only the later one is stored here. The number of stored commits is
    at most the number of transactions that ran concurrently.
    """

    def __init__(self) -> None:
        self.newest: Mapping[UUID, Commit] = {}

    def add(self, transaction: Transaction) -> None:
        """Add a committed transaction, and remove the commits that it found."""
        earlier = transaction.earlier
        kept = {uid: one for uid, one in self.newest.items() if earlier.get(uid) is not one}
        kept[transaction.connection_uid] = Commit(transaction.number, transaction.began_at)
        self.newest = kept


def prove(session: PostgresqlSession, acknowledged: Acknowledged) -> bool:
    """Write the number of the open transaction, in one statement with its last writes.

    Returns:
        Whether the server has all acknowledged commits, as in `has_all`.
    """
    earlier, known = acknowledged.newest, session.driver.proof
    uid, number = (uuid4(), 1) if known is None else (known.connection_uid, known.number + 1)
    readable_until = asyncio.get_running_loop().time() + READABLE_SECONDS
    [row] = session.send(_prove(uid, number, *_keys(earlier)))
    session.driver.proof = Transaction(uid, number, row.pid, row.began_at, readable_until, earlier)
    if known is None:  # a new row: delete old ones, so that their number stays limited
        session.run(_delete_unused(RETENTION))
    return _has_all(row, earlier)


def has_all(
    session: PostgresqlSession, earlier: Mapping[UUID, Commit], *, through_pgbouncer: bool = False
) -> bool:
    """Return whether the server has the commits that were acknowledged earlier.

    True also if all of them are so old that their rows may have been deleted. A connection that
    does not lead through PgBouncer is asked about the same commits only once.
    """
    if not earlier:  # a read-only role may not be allowed to read `commit_proof`
        return True
    if not through_pgbouncer and _is_known_to_have(session.driver, earlier):
        return True
    [row] = session.run(_find_commits(*_keys(earlier)))
    found = _has_all(row, earlier)
    session.driver.checked = earlier if found else None
    return found


def _is_known_to_have(connection: Connection, earlier: Mapping[UUID, Commit]) -> bool:
    mine = connection.proof
    is_own = mine is not None and list(earlier) == [mine.connection_uid]
    return is_own or connection.checked is earlier


def _keys(commits: Mapping[UUID, Commit]) -> tuple[list[UUID], list[int]]:
    return list(commits), [one.number for one in commits.values()]


def _has_all(row: Any, earlier: Mapping[UUID, Commit]) -> bool:
    return row.num_found == len(earlier) or all(
        row.began_at - one.began_at > RETENTION / 2 for one in earlier.values()
    )


async def was_committed(
    connected: Callable[[], AbstractAsyncContextManager[Connection]],
    transaction: Transaction,
    end: float,
) -> bool:
    """Return whether a transaction was committed. Retry until a server that accepts writes answers.

    If the transaction is still in progress, its session has lost its client. Terminate that
    session.

    Args:
        connected: Connects to the current primary.
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
                    async with connected() as connection:
                        return await _read_outcome(connection, transaction, end)
                except Exception as error:  # it is unreachable, starting, recovering or a standby
                    failed = error
                await asyncio.sleep(PAUSE_SECONDS)
    except TimeoutError as error:
        raise error from failed


async def _read_outcome(connection: Connection, transaction: Transaction, end: float) -> bool:
    seconds = end - asyncio.get_running_loop().time()
    idle_seconds = limits.IDLE_IN_TRANSACTION_SECONDS
    limit = limits.text(connection, seconds, idle_seconds, is_local=True)
    await connection.begin(f"{WRITING}; {limit}")

    def work(session: PostgresqlSession) -> int:
        session.run(_end_transaction(transaction.pid, transaction.began_at))
        [(number,)] = session.run(_lock(transaction.connection_uid))
        return int(number)

    number = await greenlet_spawn(work, PostgresqlSession(connection))
    await connection.commit()
    return number == transaction.number


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
def _prove(uid: Any, number: Any, uids: Any, numbers: Any) -> Insert:
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
        _num_found(uids, numbers),
    )


@prepared
def _find_commits(uids: Any, numbers: Any) -> Select[datetime, int]:
    return select(func.now().label("began_at"), _num_found(uids, numbers))


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
def _end_transaction(pid: Any, began_at: Any) -> Select[Any]:
    """Terminate the session that runs a transaction, but no other with the same process id."""
    return select(func.count(func.pg_terminate_backend(_ACTIVITY.c.pid))).where(
        _ACTIVITY.c.pid == pid, _ACTIVITY.c.xact_start == began_at
    )


@prepared
def _delete_unused(age: Any) -> Delete:
    """Delete old rows, except locked ones, whose connections are still in use."""
    old = commit_proof.c.written_at < func.now() - cast(age, Interval)
    unused = select(commit_proof.c.connection_uid).where(old).with_for_update(skip_locked=True)
    return delete(commit_proof).where(commit_proof.c.connection_uid.in_(unused))
