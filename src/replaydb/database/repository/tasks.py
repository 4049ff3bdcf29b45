"""Task states: the clocks and counters of tasks, and the sampling keys of `docs/sampling.md`."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Select, Update, bindparam, func, select, update

from replaydb.database.runtime.prepared import Bound, Write, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.candidates import KEYS, MEMBERS, Clock, Partition
from replaydb.database.tables.schema import episode_group, group, task
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.settings import BufferSettings
from replaydb.errors import DatabaseError

#: Maximum value of a clock, in mean distances between two keys. Its last bit is then up to 2**-16
#: of such a distance.
MAX_CLOCK = 2.0**36
#: A sum of weights is recomputed when its relative rounding error may exceed this.
MAX_SUM_ERROR = 2.0**-20
#: Philox generates four 64-bit words from one value of its counter.
WORDS_PER_COUNT = 4

CLOCKS: tuple[Clock, ...] = get_args(Clock)


@dataclass(slots=True)
class TaskState:
    """A locked row of the `task` table.

    Attributes:
        task_id: Id of the row.
        buffer_id: Id of the buffer.
        task_name: Name of the task.
        max_staleness: Groups staler than this expire; None: never.
        uniform_clock: Key up to which `Uniform` has drawn.
        priority_clock: Key up to which `Prioritized` has drawn.
        random_counter: Position of the seeded stream of exponential variates.
        num_available: Number of samplable groups.
        total_weight: Sum of their weights.
        weight_error: Bound of the rounding error of that sum.
        num_pending: Number of pending groups.
        num_leased: Number of leased groups.
        stored_groups: Number of groups that are not archived.
        stored_tokens: Tokens of these groups.
        stored_bytes: Payload bytes of these groups.
        num_inserted: Number of groups ever put, including those that replaced a stored group.
        num_sampled: Number of groups ever drawn, counted once per draw.
        num_outdated: Number of groups that ever expired because the policy version advanced.
        is_expiring: Whether there may be groups that are too stale and have not expired yet. Until
            they have, nothing is drawn.
        aged_to: Id up to which the column `staleness` of live groups is up to date; None: it is up
            to date for all groups.
        num_replaced: Of `num_inserted`: groups that replaced the content of a stored group.
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
    num_replaced: int

    @property
    def is_behind(self) -> bool:
        """Whether rows of its groups have not been updated to the policy version yet."""
        return self.is_expiring or self.aged_to is not None

    def time(self, clock: Clock) -> float:
        """Return the value of a clock."""
        return self.uniform_clock if clock == "uniform" else self.priority_clock

    def advance_clock(self, clock: Clock, elapsed: float) -> None:
        """Advance one clock by `elapsed`."""
        if clock == "uniform":
            self.uniform_clock += elapsed
        else:
            self.priority_clock += elapsed

    def rate(self, clock: Clock) -> float:
        """Return an upper bound of the sum of the rates of all groups on a clock."""
        if clock == "uniform":
            return float(self.num_available)
        return self.total_weight + self.weight_error

    def exponentials(self, settings: BufferSettings, count: int) -> NDArray[np.float64]:
        """Return the next `count` variates of this task's stream, float64 [count]."""
        if not count:  # for each of many tasks from which a draw takes nothing
            return np.zeros(0)
        variates, self.random_counter = exponentials(
            settings.seed, self.task_name, self.random_counter, count
        )
        return variates

    def waits(
        self, settings: BufferSettings, weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Generate waiting times for groups that become samplable: the keys relative to the clocks.

        The exponential distribution is memoryless, so the times start at the present clocks.

        Returns:
            Times by the uniform and by the priority clock, both float64 [weights].
        """
        uniform, prioritized = self.exponentials(settings, 2 * len(weights)).reshape(2, -1)
        return uniform, waiting_times(prioritized, weights)

    def enter(self, status: str, sums: GroupSums, by: int = 1) -> None:
        """Count groups that get a status, or with `by=-1` groups that leave it."""
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
        """Add to the sum of weights, and to the bound of its rounding error.

        A large weight that is added and removed rounds away digits of the small ones, so `save`
        recomputes the sum before the error becomes visible. A weight that is itself the sum of
        `terms` weights has been rounded that often.
        """
        before = self.total_weight
        self.total_weight += weight
        self.weight_error += terms * math.ulp(max(before, self.total_weight, abs(weight)))
        if self.num_available == 0:
            self.total_weight = self.weight_error = 0.0

    def leave(self, status: str, sums: GroupSums) -> None:
        """Uncount groups that leave a status."""
        self.enter(status, sums, by=-1)

    def move(self, before: str, after: str, sums: GroupSums) -> None:
        """Count groups that change from one status to another."""
        self.leave(before, sums)
        self.enter(after, sums)


@dataclass(frozen=True, slots=True)
class GroupSums:
    """Contribution of some groups to the counters of a task."""

    num_groups: int
    weight: float
    num_tokens: int
    num_bytes: int

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Self:
        """Sum over rows with the scalars of groups."""
        return cls(
            len(rows),
            sum(row.weight for row in rows),
            sum(row.num_tokens for row in rows),
            sum(row.num_bytes for row in rows),
        )


def exponentials(
    seed: int | None, stream: str, counter: int, count: int
) -> tuple[NDArray[np.float64], int]:
    """Generate `count` variates of Exp(1).

    Philox4x64-10 (Salmon et al., 2011) is counter-based: `seed`, `stream` and `counter` alone
    determine the variates, on every machine and either engine. Without a seed its key is entropy
    from the operating system, so forked processes generate different variates. The raw words are
    used, since only these are the same in every version of numpy.

    Returns:
        The variates, float64 [count], and the counter of the next ones.
    """
    if seed is None:
        key = np.frombuffer(os.urandom(16), np.uint64)
    else:
        digest = hashlib.blake2b(stream.encode(), digest_size=8).digest()
        key = np.array([seed, int.from_bytes(digest, "little")], np.uint64)
    words = np.random.Philox(counter=counter, key=key).random_raw(count)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53  # in (0, 1]
    return -np.log(uniform), counter + -(-count // WORDS_PER_COUNT)


def waiting_times(
    variates: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Scale variates of Exp(1) to rates `weights`; infinite if the rate is 0. All are [n]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(weights > 0.0, variates / weights, np.inf)


def read(session: Session, buffer_id: int) -> dict[str, TaskState]:
    """Read all tasks without locking them."""
    return states_of(session.run(select_tasks(buffer_id)))


class _TaskStates(dict[str, TaskState]):
    def __missing__(self, task_name: str) -> TaskState:
        raise DatabaseError(
            f"damaged: a group names the task {task_name!r:.80}, which the buffer does not have"
        )


def states_of(rows: Iterable[Any]) -> dict[str, TaskState]:
    """Return the tasks of rows, by name. A row without a task is omitted."""
    task_states = _TaskStates()
    for row in rows:
        if row.task_id is not None:
            task_states[row.task_name] = TaskState(*_VALUES(row))
    return task_states


_VALUES = attrgetter(*(field.name for field in fields(TaskState)))


def set_back_if_late(
    session: Session, task: TaskState, clock: Clock, rate: float | None = None
) -> None:
    """Set a clock back to 0, and shift all its keys, if its value is too large to add to.

    Keys are `1 / rate` apart on average; the resolution of a clock is its last bit. A clock that
    is too coarse must be set back *before* a key is computed from it, since shifting does not
    restore rounded digits. Call this when the counters include all groups that get keys, and every
    key computed so far is in the table.

    Args:
        session: The transaction in which the task is locked.
        task: The task.
        clock: One of its clocks.
        rate: Total rate of the keys that must be distinguished; by default the task's own.
    """
    time = task.time(clock)
    if time * (task.rate(clock) if rate is None else rate) > MAX_CLOCK:
        partition = Partition(task.buffer_id, task.task_name, GroupStatus.COMPLETED.value)
        session.run(shift_keys(partition, clock, time))
        task.advance_clock(clock, -time)


def recompute_weight_if_inexact(session: Session, task: TaskState) -> None:
    """Recompute the sum of weights of a task if its rounding error may be too large."""
    if task.weight_error > MAX_SUM_ERROR * task.total_weight:
        statement = select_total_weight(task.buffer_id, task.task_name)
        [(total,)] = session.run(statement)
        task.total_weight, task.weight_error = total or 0.0, 0.0


# Without the name: it is a parent key, so updating it would make SQLite read every group of the
# task.
_SAVED = [field.name for field in fields(TaskState) if field.name not in ("buffer_id", "task_name")]


def save(session: Session, task_states: Sequence[TaskState]) -> None:
    """Write task states back."""
    for state in task_states:
        recompute_weight_if_inexact(session, state)
    rows = [{name: getattr(task, name) for name in _SAVED} for task in task_states]
    session.postpone(Write(update_tasks(), rows))


def shift_keys(partition: Partition, clock: Clock, time: float) -> Bound[Update]:
    """Shift all keys of a partition as its clock is set back from `time` to 0."""
    key = KEYS[clock]
    statement = update(episode_group).where(MEMBERS).values({key: key - time})
    return Bound(statement, partition.values, is_cached=False)


@prepared
def select_tasks(buffer_id: Any) -> Select[Any]:
    """Select all tasks in the same order, without locks."""
    others = (column for column in task.c if column is not task.c.id)
    every = select(task.c.id.label("task_id"), *others)
    return every.where(task.c.buffer_id == buffer_id).order_by(task.c.id)


def select_total_weight(buffer_id: int, task_name: str) -> Select[float]:
    """Select the sum of the weights of the samplable groups of a task."""
    return select(func.sum(group.weight)).where(
        group.buffer_id == buffer_id,
        group.task_name == task_name,
        group.group_status == GroupStatus.COMPLETED.value,
    )


@cache
def update_tasks() -> Update:
    """Update tasks, given as dicts of `task_id` and the columns to change."""
    return update(task).where(task.c.id == bindparam("task_id"))
