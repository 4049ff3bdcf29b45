"""The accounts of tasks: clocks, counters, and the right to change them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row

from replaydb.database.prepared import execute, execute_many
from replaydb.database.repository.arrivals import exponentials
from replaydb.database.statements.pools import Clock, Pool, set_arrivals_back
from replaydb.database.statements.task import (
    lock_aging_tasks,
    lock_all_tasks,
    lock_expiring_tasks,
    lock_leased_tasks,
    lock_tasks,
    select_tasks,
    select_total_weight,
    update_tasks,
)
from replaydb.episodes import GroupStatus
from replaydb.errors import DatabaseError
from replaydb.settings import BufferSettings

#: The latest that a clock may show, in times between two arrivals: its last bit is up to 2**-16 of
#: such a time then.
LATEST = 2.0**36
#: A sum of weights is made anew when rounding may have changed it by this part.
LARGEST_SUM_ERROR = 2.0**-20

CLOCKS: tuple[Clock, ...] = get_args(Clock)


@dataclass(slots=True)
class TaskAccount:
    """A locked row of the `task` table.

    Attributes:
        task_id: Its row.
        buffer_id: Its buffer.
        task_name: Its name.
        max_staleness: Groups staler than this expire; None: never.
        uniform_clock: Time of the last arrival taken by `Uniform`.
        priority_clock: Time of the last arrival taken by `Prioritized`.
        random_counter: Where the seeded stream of exponentials goes on.
        num_available: Samplable groups.
        total_weight: Sum of their weights.
        weight_error: Bound of what rounding has done to that sum.
        num_pending: Groups whose episodes still arrive.
        num_leased: Groups that somebody holds.
        stored_groups: Groups that are not archived; so the next two.
        stored_tokens: Their tokens.
        stored_bytes: Bytes of their payloads.
        num_inserted: Groups ever put.
        num_sampled: Groups ever drawn, counted once a draw.
        num_outdated: Groups that the policy has left behind, ever.
        is_expiring: Whether groups may be left that are too stale: nothing is drawn until then.
        aged_to: Up to this id the column `staleness` of live groups is up to date; None: of all.
    """

    task_id: int
    buffer_id: int
    task_name: str
    max_staleness: int | None
    uniform_clock: float
    priority_clock: float
    random_counter: int
    num_available: int
    total_weight: float
    weight_error: float
    num_pending: int
    num_leased: int
    stored_groups: int
    stored_tokens: int
    stored_bytes: int
    num_inserted: int
    num_sampled: int
    num_outdated: int
    is_expiring: bool
    aged_to: int | None

    @property
    def is_behind(self) -> bool:
        """Whether its groups have not followed the policy yet."""
        return self.is_expiring or self.aged_to is not None

    def time(self, clock: Clock) -> float:
        """What a clock shows."""
        return self.uniform_clock if clock == "uniform" else self.priority_clock

    def advance_clock(self, clock: Clock, elapsed: float) -> None:
        """Let time pass on one clock."""
        if clock == "uniform":
            self.uniform_clock += elapsed
        else:
            self.priority_clock += elapsed

    def rate(self, clock: Clock) -> float:
        """How many groups arrive on a clock in a unit of its time, at most."""
        if clock == "uniform":
            return float(self.num_available)
        return self.total_weight + self.weight_error

    def exponentials(self, settings: BufferSettings, count: int) -> NDArray[np.float64]:
        """The next `count` variates of this task's stream."""
        variates, self.random_counter = exponentials(
            settings.seed, self.task_name, self.random_counter, count
        )
        return variates

    def waits(
        self, settings: BufferSettings, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How long, by the uniform and the priority clock, groups wait that become samplable.

        The exponential is memoryless, so a group that comes now waits from now.
        """
        uniform, prioritized = self.exponentials(settings, 2 * len(weights)).reshape(2, -1)
        return uniform, waiting(prioritized, weights)

    def enter(self, status: str, sums: GroupSums, by: int = 1) -> None:
        """Groups came to have a status; `by=-1`: they no longer have it."""
        match status:
            case GroupStatus.COMPLETED:
                self.num_available += by * sums.num_groups
                self.add_weight(by * sums.weight, sums.num_groups)
            case GroupStatus.PENDING:
                self.num_pending += by * sums.num_groups
            case GroupStatus.LEASED:
                self.num_leased += by * sums.num_groups
        if status != GroupStatus.ARCHIVED:
            self.stored_groups += by * sums.num_groups
            self.stored_tokens += by * sums.num_tokens
            self.stored_bytes += by * sums.num_bytes

    def add_weight(self, weight: float, terms: int = 1) -> None:
        """The sum of weights changes, in a way that rounding cannot spoil for long.

        A large weight that comes and goes takes the digits of the small ones with it, so `save`
        sums anew when the error could be seen. A weight that is itself a sum of several `terms`
        was rounded as often.
        """
        before = self.total_weight
        self.total_weight += weight
        self.weight_error += terms * math.ulp(max(before, self.total_weight, abs(weight)))
        if self.num_available == 0:
            self.total_weight = self.weight_error = 0.0

    def leave(self, status: str, sums: GroupSums) -> None:
        """Groups no longer have a status."""
        self.enter(status, sums, by=-1)

    def move(self, before: str, after: str, sums: GroupSums) -> None:
        """Groups have another status."""
        self.leave(before, sums)
        self.enter(after, sums)


@dataclass(frozen=True, slots=True)
class GroupSums:
    """What some groups add to an account."""

    num_groups: int
    weight: float
    num_tokens: int
    num_bytes: int

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Self:
        """Of rows that have the scalars of a group each."""
        return cls(
            len(rows),
            sum(row.weight for row in rows),
            sum(row.num_tokens for row in rows),
            sum(row.num_bytes for row in rows),
        )


def waiting(variates: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Waiting times of Poisson processes of these rates; infinite where the rate is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(weights > 0.0, variates / weights, np.inf)


def lock(
    connection: Connection, buffer_id: int, names: Collection[str] | None = None
) -> dict[str, TaskAccount]:
    """Lock some or all tasks until the transaction ends; those that do not exist are left out."""
    statement = lock_all_tasks(buffer_id) if names is None else lock_tasks(buffer_id, sorted(names))
    return _accounts(execute(connection, statement))


def read(connection: Connection, buffer_id: int) -> dict[str, TaskAccount]:
    """All tasks as they are, to look at only."""
    return _accounts(execute(connection, select_tasks(buffer_id)))


def lock_leased(connection: Connection, buffer_id: int, lease_id: int) -> dict[str, TaskAccount]:
    """Lock the tasks of which a lease holds groups."""
    return _accounts(execute(connection, lock_leased_tasks(buffer_id, lease_id)))


def lock_some_behind(
    connection: Connection, buffer_id: int, most: int, *, expiring: bool
) -> dict[str, TaskAccount]:
    """Lock some of the tasks that are expiring, or of those whose column is behind the policy."""
    statement = lock_expiring_tasks if expiring else lock_aging_tasks
    return _accounts(execute(connection, statement(buffer_id, most)))


class _Accounts(dict[str, TaskAccount]):
    def __missing__(self, task_name: str) -> TaskAccount:
        raise DatabaseError(
            f"damaged: a group names the task {task_name!r:.80}, which the buffer does not have"
        )


def _accounts(rows: Iterable[Row[Any]]) -> dict[str, TaskAccount]:
    accounts = _Accounts()
    for row in rows:
        facts = row._asdict()
        accounts[row.task_name] = TaskAccount(task_id=facts.pop("id"), **facts)
    return accounts


def set_back_if_late(
    connection: Connection, account: TaskAccount, clock: Clock, rate: float | None = None
) -> None:
    """Set a clock back to 0, with all its arrivals, where it shows too late a time to add to.

    Arrivals are `1 / rate` apart, on a clock that ticks in units of its last bit. A clock that
    ticks too coarsely for that must be set back *before* an arrival is computed from it: what
    rounding has taken is not there to be set back. To be called when the account counts whatever
    is to arrive, and every arrival that was computed is in the table.

    Args:
        connection: Of the transaction in which the task is locked.
        account: Of the task.
        clock: Which of its clocks.
        rate: Of the arrivals that are told apart; by default of the task's own.
    """
    time = account.time(clock)
    if time * (account.rate(clock) if rate is None else rate) > LATEST:
        pool = Pool(account.buffer_id, account.task_name, GroupStatus.COMPLETED.value)
        execute(connection, set_arrivals_back(pool, clock, time))
        account.advance_clock(clock, -time)


def sum_anew_if_rounded(connection: Connection, account: TaskAccount) -> None:
    """Sum the weights of a task again where rounding may have spoilt the sum that is kept."""
    if account.weight_error > LARGEST_SUM_ERROR * account.total_weight:
        statement = select_total_weight(account.buffer_id, account.task_name)
        [(total,)] = execute(connection, statement)
        account.total_weight, account.weight_error = total or 0.0, 0.0


# Not its name, which as a parent key would make SQLite look at every group of the task.
_SAVED = [
    field.name for field in fields(TaskAccount) if field.name not in ("buffer_id", "task_name")
]


def save(connection: Connection, accounts: Iterable[TaskAccount]) -> None:
    """Write accounts back."""
    rows = []
    for account in accounts:
        sum_anew_if_rounded(connection, account)
        rows.append({name: getattr(account, name) for name in _SAVED})
    execute_many(connection, update_tasks(), rows)
