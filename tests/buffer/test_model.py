"""Random call sequences compared with a model of a buffer that is a dict."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, TypeVar

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import replaydb as rdb
from replaydb import Buffer, Capacity, Keep, SamplingPolicy, Store
from replaydb.domain.settings import Eviction, OnEvict
from support.clock import Clock
from support.examples import examples
from support.groups import episode, group
from support.invariants import check_invariants

T = TypeVar("T")

UIDS = [f"uid-{i}" for i in range(6)]
TASKS = ["gsm8k", "code"]
POLICIES: list[SamplingPolicy] = [
    rdb.Fifo(),
    rdb.Lifo(),
    rdb.StalestFirst(),
    rdb.FreshestFirst(),
    rdb.TopPriority(),
    rdb.LeastSampled(),
    rdb.Uniform(),
    rdb.Prioritized(),
]

uids = st.sampled_from(UIDS)
priorities = st.sampled_from([0.0, 0.5, 1.0, 3.0])
IDLE = ("completed", "aborted")
#: They are evicted first, and no other group is evicted for them.
UNSAMPLABLE = ("expired", "failed", "filtered")
EVICTIONS: list[Eviction] = [
    "oldest",
    "newest",
    "stalest",
    "lowest_priority",
    "most_sampled",
    "least_recently_sampled",
    "uniform",
]

bounds: dict[str, st.SearchStrategy[Any]] = {
    "capacity": st.none() | st.builds(Capacity, groups=st.integers(1, 4)),
    "task_capacity": st.none() | st.just({"code": Capacity(groups=1)}),
    "eviction": st.sampled_from(EVICTIONS),
    "on_evict": st.sampled_from(["delete", "archive"]),
    "time_to_live": st.sampled_from([100.0, None]),
    "keep_archived": st.sampled_from([None, Keep(seconds=100), Keep(count=1)]),
}
limits = st.none() | st.integers(0, 3) | st.just({"code": 1})

operations = st.one_of(
    st.tuples(
        st.just("put"),
        st.lists(
            st.tuples(
                uids,
                st.sampled_from(TASKS),
                priorities,
                st.none() | st.integers(0, 6),
                st.sampled_from(
                    ["completed", "completed", "aborted", "expired", "failed", "archived"]
                ),
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda one: one[0],
        ),
        st.sampled_from(["error", "ignore", "replace", "renew"]),
    ),
    st.tuples(
        st.just("open"),
        uids,
        st.sampled_from(TASKS),
        st.sampled_from([None, 50]),
        st.sampled_from([None, 1]),
    ),
    st.tuples(st.just("add"), uids, st.none() | st.integers(0, 6)),
    st.tuples(st.just("wait"), st.sampled_from([120, 60])),
    st.tuples(
        st.just("sample"),
        st.integers(1, 4),
        st.integers(0, 4),
        st.sampled_from(POLICIES),
        st.sampled_from([None, "code"]),
        st.none() | st.integers(0, 2),
    ),
    st.tuples(st.just("reweigh"), uids, priorities),
    st.tuples(
        st.just("update"),
        st.lists(uids, min_size=1, max_size=3, unique=True),
        st.sampled_from(["completed", "completed", "archived", "aborted", "expired", "filtered"]),
        st.none() | priorities,
    ),
    st.tuples(st.just("delete"), uids),
    st.tuples(st.just("advance"), st.integers(0, 2)),
    st.tuples(st.just("limit"), limits),
    st.tuples(st.just("exponent"), st.sampled_from([1.0, 0.5, 0.0, 2.0])),
    st.tuples(st.just("bounds"), st.fixed_dictionaries({}, optional=bounds)),
)

#: Reads of a group by which it is evicted, and whether the highest value comes first. None is last.
ORDERS: dict[Eviction, tuple[Callable[[Row], Any], bool]] = {
    "oldest": (lambda row: row.id, False),
    "newest": (lambda row: row.id, True),
    "stalest": (lambda row: row.version, False),
    "lowest_priority": (lambda row: row.priority, False),
    "most_sampled": (lambda row: row.times_sampled, True),
    "least_recently_sampled": (lambda row: row.last_draw, False),
}


class Refused(Exception):
    """A call fails with an error of this type, None if it returns nothing.

    Maintenance that it has done is rolled back, unless it `keeps` that.
    """

    def __init__(self, error: type[Exception] | None, *, keeps: bool = False) -> None:
        super().__init__(error)
        self.error = error
        self.keeps = keeps


@dataclass
class Row:
    id: int
    task: str
    priority: float
    version: int | None
    status: str
    created: int
    times_sampled: int = 0
    last_draw: int | None = None
    is_gone: bool = False  # its payload
    versions: list[int | None] | None = None  # of the episodes of an open group
    least: int = 2  # of them that are enough at the deadline
    deadline: int | None = None


@dataclass
class Model:
    """A buffer modelled in memory, without a database.

    Attributes:
        rows: Its groups, by uid.
        version: The policy version.
        limit: The setting `max_staleness`.
        now: The time in seconds.
        draws: Number of draws.
        victims: Ids of groups in the order in which random evictions choose them.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    version: int = 0
    limit: Any = None
    capacity: Capacity | None = None
    task_capacity: dict[str, Capacity] | None = None
    eviction: Eviction = "oldest"
    on_evict: OnEvict = "archive"
    time_to_live: float | None = None
    keep_archived: Keep | None = None
    now: int = 0
    draws: int = 0
    victims: Sequence[int] = ()

    def limit_of(self, task: str) -> int | None:
        limit: int | None = self.limit.get(task) if isinstance(self.limit, dict) else self.limit
        return limit

    def is_too_stale(self, task: str, version: int | None) -> bool:
        limit = self.limit_of(task)
        return limit is not None and version is not None and self.version - version > limit

    def locked(self, tasks: Collection[str]) -> Collection[str]:
        """Return the tasks that a call locks: all if the buffer has a capacity."""
        return TASKS if self.capacity is not None else tasks

    def retire(self, uid: str) -> None:
        """Evict a group."""
        if self.on_evict == "delete":
            del self.rows[uid]
        else:
            self.rows[uid].status, self.rows[uid].is_gone = "archived", True

    def complete(self, row: Row) -> None:
        row.status = "expired" if self.is_too_stale(row.task, row.version) else "completed"

    def maintain(self, tasks: Collection[str]) -> None:
        """Process deadlines and `time_to_live`."""
        for uid, row in list(self.rows.items()):
            if row.task not in tasks:
                continue
            if row.status == "pending" and row.deadline is not None and row.deadline <= self.now:
                if len(row.versions or ()) >= row.least:
                    self.complete(row)
                else:
                    row.status = "failed"
            if row.status in (*IDLE, *UNSAMPLABLE) and self.is_old(row, self.time_to_live):
                self.retire(uid)

    def is_old(self, row: Row, seconds: float | None) -> bool:
        return seconds is not None and self.now - row.created > seconds

    def trim(
        self, tasks: Collection[str], added: Collection[str] = (), kept: Iterable[Row] = ()
    ) -> None:
        """Delete archived groups as `keep_archived` requires, at the end of a call.

        Args:
            tasks: The tasks that the call has locked.
            added: Those into which it has put groups.
            kept: Groups that it reports as stored.
        """
        keep = self.keep_archived or Keep(count=10**9)
        for task in tasks:
            archived = [
                (row.id, uid)
                for uid, row in self.rows.items()
                if (row.task, row.status) == (task, "archived")
            ]
            newest = sorted(archived, reverse=True)[: keep.count if task in added else None]
            for group_id, uid in archived:
                is_beyond = (group_id, uid) not in newest
                if (is_beyond or self.is_old(self.rows[uid], keep.seconds)) and not any(
                    group_id == one.id for one in kept
                ):
                    del self.rows[uid]

    def limits(self, tasks: Iterable[str]) -> Iterator[tuple[list[str], int]]:
        """Yield the capacities of these tasks and that of the buffer, with their tasks."""
        for task in tasks:
            if self.task_capacity is not None and task in self.task_capacity:
                yield [task], self.task_capacity[task].groups or 0
        if self.capacity is not None:
            yield TASKS, self.capacity.groups or 0

    def victim(self, tasks: Collection[str], protected: Collection[str]) -> str | None:
        """Return the group to evict next."""
        mine = {
            uid: row for uid, row in self.rows.items() if row.task in tasks and uid not in protected
        }
        if dead := [uid for uid, row in mine.items() if row.status in UNSAMPLABLE]:
            return min(dead, key=lambda uid: mine[uid].id)
        idle = [uid for uid, row in mine.items() if row.status in IDLE]
        if self.eviction == "uniform":
            order = {group_id: position for position, group_id in enumerate(self.victims)}
            idle.sort(key=lambda uid: order.get(mine[uid].id, len(order)))
        else:
            value, highest = ORDERS[self.eviction]
            known = [uid for uid in idle if value(mine[uid]) is not None]
            known.sort(key=lambda uid: mine[uid].id)
            known.sort(key=lambda uid: value(mine[uid]), reverse=highest)
            unknown = sorted(set(idle) - set(known), key=lambda uid: mine[uid].id)
            idle = [*known, *unknown]
        return idle[0] if idle else None

    def fit(
        self,
        tasks: Collection[str],
        most: int,
        incoming: int = 0,
        protected: Collection[str] = (),
        rivals: Collection[str] = (),
    ) -> None:
        """Evict groups until new ones fit."""
        if incoming > most:
            raise Refused(rdb.InvalidInputError)
        refused = False
        while self.stored(tasks) + incoming > most:
            uid = self.victim(tasks, protected)
            if uid is None and not incoming:
                break
            if uid is None:
                kept = {uid for uid in protected if self.rows[uid].task in tasks}
                idle = [uid for uid in kept if self.rows[uid].status in (*IDLE, *UNSAMPLABLE)]
                would_never_fit = len(idle) + incoming > most
                raise Refused(rdb.InvalidInputError if would_never_fit else rdb.BufferFullError)
            refused = refused or uid in rivals
            self.retire(uid)
        if refused and not any(
            row.status in IDLE for row in self.rows.values() if row.task in tasks
        ):
            raise Refused(rdb.BufferFullError)

    def stored(self, tasks: Collection[str]) -> int:
        """Return the number of groups that count against a capacity."""
        return sum(row.task in tasks and row.status != "archived" for row in self.rows.values())

    def evict_surplus(self, tasks: Collection[str]) -> None:
        """Evict groups beyond capacities that were lowered."""
        for limited, most in self.limits(tasks):
            while self.stored(limited) > most and (uid := self.victim(limited, ())) is not None:
                self.retire(uid)

    def put(self, new: dict[str, Row], on_duplicate: str) -> None:
        """Put groups, given with the ids that they have got; 0 if the call has failed."""
        names: Collection[str] = {row.task for row in new.values()}
        if on_duplicate in ("replace", "renew") and new.keys() & self.rows.keys():
            names = TASKS
        names = self.locked(names)
        self.maintain(names)
        self.evict_surplus(names)
        known = {uid: self.rows[uid] for uid in new if uid in self.rows}
        if known and on_duplicate == "error":
            raise Refused(rdb.DuplicateGroupError)
        consumed = [one for one in known.values() if one.status == "archived" and not one.is_gone]
        if consumed and on_duplicate == "replace":
            raise Refused(rdb.ConsumedGroupError)
        renewed = {
            uid for uid, old in known.items() if self.is_renewed(old, new[uid], on_duplicate)
        }
        for i, (uid, row) in enumerate(new.items()):
            keeps_id = uid in known and uid not in renewed
            row.id = row.id or (known[uid].id if keeps_id else 10**9 + i)
            assert (uid in known and row.id == known[uid].id) == keeps_id
        accepted = new
        if on_duplicate == "ignore":
            accepted = {uid: row for uid, row in new.items() if uid not in known}
        for uid in known if accepted is new else ():
            del self.rows[uid]
        ids = {row.id for row in self.rows.values()}
        assert ids.isdisjoint(row.id for row in accepted.values())
        for uid in accepted.keys() & known.keys() - renewed:
            accepted[uid].created = known[uid].created
        if accepted:
            self.insert(accepted, names, known if on_duplicate == "ignore" else ())
        returned = [self.rows[uid] for uid in new if uid in self.rows]
        self.trim(names, {row.task for row in accepted.values()}, returned)

    def is_renewed(self, old: Row, new: Row, on_duplicate: str) -> bool:
        """Return whether a group gets a new id when it is overwritten."""
        if on_duplicate != "replace":
            return on_duplicate == "renew"
        if new.status == "archived":
            return old.is_gone or self.keep_archived is not None
        return old.is_gone or self.is_old(old, self.time_to_live)

    def insert(
        self, new: dict[str, Row], locked: Collection[str], protected: Collection[str]
    ) -> None:
        """Add groups, and evict others for them."""
        unused = (*UNSAMPLABLE, "archived")
        usable = {uid: row for uid, row in new.items() if row.status not in unused}
        rivals = [
            uid
            for uid, row in usable.items()
            if self.eviction == "lowest_priority" and row.status != "pending"
        ]
        incoming = Counter(row.task for uid, row in usable.items() if uid not in rivals)
        for limited, most in self.limits(incoming):
            self.fit(limited, most, sum(incoming[task] for task in limited), protected)
        self.rows |= new
        for limited, most in self.limits(locked):
            self.fit(limited, most, rivals=rivals)

    def add(self, uid: str, version: int | None) -> None:
        """Add an episode to an open group."""
        names = self.locked([self.rows[uid].task] if uid in self.rows else ())
        self.maintain(names)
        row = self.rows.get(uid)
        if row is None or row.status != "pending":
            self.trim(names)
            error = rdb.UnknownGroupError if row is None else rdb.GroupClosedError
            raise Refused(error, keeps=True)
        self.evict_surplus(names)
        for limited, most in self.limits([row.task]):
            self.fit(limited, most)
        assert row.versions is not None
        row.versions.append(version)
        known = [one for one in row.versions if one is not None]
        row.version = min(known) if len(known) == len(row.versions) else None
        if len(row.versions) == 2:
            self.complete(row)
        self.trim(names)

    def update(self, chosen: Iterable[str], status: str, priority: float | None) -> list[Row]:
        """Set the status of groups, and perhaps their priority."""
        self.maintain(TASKS)
        rows = {uid: self.rows[uid] for uid in chosen if uid in self.rows}
        if status != "archived":
            empty = [row for row in rows.values() if row.versions == []]
            if any(
                row.is_gone or (row in empty and row.status == "archived") for row in rows.values()
            ):
                raise Refused(rdb.PayloadGoneError)
            if empty and status == "completed":
                raise Refused(rdb.InvalidInputError)
        archived = [row for row in rows.values() if row.status == "archived" != status]
        incoming = Counter(
            row.task
            for row in archived
            if status in IDLE and not self.is_too_stale(row.task, row.version)
        )
        for limited, most in self.limits(incoming) if incoming else ():
            self.fit(limited, most, sum(incoming[task] for task in limited), rows)
        for row in rows.values():
            row.status = status
            row.priority = row.priority if priority is None else priority
        self.expire()
        for limited, most in self.limits(TASKS) if archived else ():
            self.fit(limited, most)
        self.trim(TASKS, kept=rows.values())
        return list(rows.values())

    def expire(self) -> int:
        expired = 0
        for row in self.rows.values():
            if row.status in IDLE and self.is_too_stale(row.task, row.version):
                row.status = "expired"
                expired += 1
        return expired

    def eligible(self, task: str | None, max_staleness: int | None) -> list[Row]:
        return [
            row
            for row in sorted(self.rows.values(), key=lambda row: row.id)
            if row.status == "completed"
            and task in (None, row.task)
            and (
                max_staleness is None
                or (row.version is not None and self.version - row.version <= max_staleness)
            )
        ]


def in_order(rows: list[Row], policy: SamplingPolicy) -> list[int] | None:
    """Return ids in the order of the strategy; None if it is random."""
    unknown = [row for row in rows if row.version is None]
    known = [row for row in rows if row.version is not None]
    match policy:
        case rdb.Fifo():
            ordered = rows
        case rdb.Lifo():
            ordered = rows[::-1]
        case rdb.StalestFirst():
            ordered = sorted(known, key=lambda row: (row.version, row.id)) + unknown
        case rdb.FreshestFirst():
            newest = sorted(known, key=lambda row: (row.version, row.id))[::-1]
            ordered = newest + unknown[::-1]
        case rdb.TopPriority():
            ordered = sorted(rows, key=lambda row: (-row.priority, row.id))
        case rdb.LeastSampled():
            ordered = sorted(rows, key=lambda row: (row.times_sampled, row.id))
        case _:
            return None
    return [row.id for row in ordered]


async def compared(
    buffer: Buffer, model: Model, call: Awaitable[T], simulate: Callable[[Model, T | None], object]
) -> None:
    """Make a call, and compare its effect on the buffer with that on the model.

    The function gets a copy of the model, which replaces it unless the call is refused, and the
    result of the call; None if it failed.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = await call
    except rdb.ReplayDBError as failure:
        error = failure
    stored = {one.id for one in await buffer.find() if one.status != "archived"}
    for victims in possible_victims(model, stored, error):
        trial = copy.deepcopy(model)
        trial.victims = victims
        refusal: Refused | None = None
        difference: AssertionError | None = None
        try:
            simulate(trial, result)
        except Refused as refused:
            refusal = refused
        except AssertionError as found:  # perhaps of these victims only
            difference = found
        after = trial if refusal is None or refusal.keeps else model
        is_same = (error and type(error)) is (refusal and refusal.error)
        if difference is None and is_same and stored == with_payload(after):
            break
    else:
        raise difference or AssertionError(f"the model says {refusal!r}") from error
    vars(model).update(vars(after))


def with_payload(model: Model) -> set[int]:
    return {row.id for row in model.rows.values() if row.status != "archived"}


def possible_victims(
    model: Model, stored: set[int], error: Exception | None
) -> Iterable[Sequence[int]]:
    """Return the orders in which a call may have evicted random groups: those that are missing.

    If it failed, it may have evicted any of them before it was rolled back.
    """
    if model.eviction != "uniform":
        return [()]
    return permutations(with_payload(model) if error else with_payload(model) - stored)


async def put(buffer: Buffer, model: Model, rows: list[Any], on_duplicate: Any) -> None:
    groups = [
        group(uid, task, priority=priority, version=version, status=status)
        for uid, task, priority, version, status in rows
    ]

    def simulate(model: Model, ids: list[int] | None) -> None:
        new = {}
        for i, (uid, task, priority, version, status) in enumerate(rows):
            group_id = 0 if ids is None else ids[i]
            if status in IDLE and model.is_too_stale(task, version):
                status = "expired"
            new[uid] = Row(group_id, task, priority, version, status, model.now)
        model.put(new, on_duplicate)

    await compared(
        buffer, model, buffer.put(groups, on_duplicate=on_duplicate, timeout=0), simulate
    )


async def open_group(
    buffer: Buffer, model: Model, uid: str, task: str, deadline: int | None, least: int | None
) -> None:
    def simulate(model: Model, group_id: int | None) -> None:
        row = Row(group_id or 0, task, 1.0, None, "pending", model.now, versions=[])
        row.least = least or 2
        row.deadline = None if deadline is None else model.now + deadline
        model.put({uid: row}, "error")

    opening = buffer.open_group(task, uid, 2, deadline=deadline, min_episodes=least, timeout=0)
    await compared(buffer, model, opening, simulate)


async def sample(
    buffer: Buffer,
    model: Model,
    most: int,
    spare: int,
    policy: SamplingPolicy,
    task: str | None,
    limit: Any,
) -> None:
    least = max(0, most - spare)

    def simulate(model: Model, batch: rdb.Batch | None) -> None:
        before = copy.deepcopy(model.rows)
        names = model.locked(TASKS if task is None else [task])
        model.maintain(names)
        rows = model.eligible(task, limit)
        n = min(most, len(rows))
        if n < least:
            model.maintain(TASKS)
            if model.rows != before:
                model.trim(TASKS)
            raise Refused(rdb.NotEnoughGroupsError, keeps=True)
        if n == 0:
            raise Refused(None)
        assert batch is not None
        expected = in_order(rows, policy)
        if expected is None:
            assert len(set(batch.ids)) == n
            assert set(batch.ids) <= {row.id for row in rows}
        else:
            assert batch.ids == expected[:n]
        if policy == rdb.Prioritized():
            alive = {row.id for row in rows if row.priority > 0}
            assert len(alive.intersection(batch.ids)) == min(n, len(alive))
        model.draws += 1
        for row in rows:
            if row.id in batch.ids:
                row.times_sampled += 1
                row.last_draw = model.draws
        model.trim(names)

    drawing = buffer.sample(most, policy, tasks=task, max_staleness=limit, at_least=least)
    await compared(buffer, model, drawing, simulate)


async def update(
    buffer: Buffer, model: Model, chosen: list[str], status: str, priority: float | None
) -> None:
    def simulate(model: Model, changed: int | None) -> None:
        assert changed in (None, len(model.update(chosen, status, priority)))

    updating = buffer.update(uids=chosen, status=status, priority=priority)
    await compared(buffer, model, updating, simulate)


async def apply(  # noqa: C901
    buffer: Buffer, model: Model, clock: Clock, operation: tuple[Any, ...]
) -> None:
    match operation:
        case ("put", rows, on_duplicate):
            await put(buffer, model, rows, on_duplicate)
        case ("open", uid, task, deadline, least):
            await open_group(buffer, model, uid, task, deadline, least)
        case ("add", uid, version):
            adding = buffer.add_episode(uid, episode(version=version), timeout=0)
            await compared(buffer, model, adding, lambda model, _: model.add(uid, version))
        case ("wait", seconds):
            model.now += seconds
            clock.jump(seconds)
        case ("bounds", bounds):
            await buffer.update_settings(**bounds)
            vars(model).update(bounds)
            model.trim(TASKS)
        case ("sample", most, spare, policy, task, limit):
            await sample(buffer, model, most, spare, policy, task, limit)
        case ("reweigh", uid, priority):
            row = model.rows.get(uid)
            ids = [row.id] if row else [10**9]
            assert await buffer.update_priorities(ids, [priority]) == (row is not None)
            if row:
                row.priority = priority
            model.trim(TASKS, kept=[row] if row else ())
        case ("update", chosen, status, priority):
            await update(buffer, model, chosen, status, priority)
        case ("delete", uid):
            deleted = await buffer.delete(where=rdb.col.group_uid == uid)
            assert deleted == (model.rows.pop(uid, None) is not None)
            model.trim(TASKS)
        case ("advance", step):
            model.version += step
            assert await buffer.advance_policy(model.version) == model.expire()
            model.trim(TASKS)
        case ("limit", limit):
            model.limit = limit
            await buffer.update_settings(max_staleness=limit)
            model.expire()
            model.trim(TASKS)
        case ("exponent", exponent):
            await buffer.update_settings(priority_exponent=exponent)
            model.trim(TASKS)


async def check(buffer: Buffer, model: Model) -> None:
    rows = dict(sorted(model.rows.items(), key=lambda item: item[1].id))
    for stored, (uid, row) in zip(await buffer.find(), rows.items(), strict=True):
        assert (stored.group_uid, stored.id) == (uid, row.id)
        assert (stored.task_name, stored.status.value) == (row.task, row.status)
        assert (stored.priority, stored.times_sampled) == (row.priority, row.times_sampled)
        assert stored.min_policy_version == row.version
        if row.status in (*IDLE, "pending"):
            expected = None if row.version is None else model.version - row.version
            assert stored.staleness == expected
    kept = [row.id for row in rows.values() if not row.is_gone and row.versions != []]
    assert [one.id for one in await buffer.get(kept)] == kept
    completed = [row for row in model.rows.values() if row.status == "completed"]
    counters = {one.task_name: one.num_available for one in (await buffer.stats()).tasks}
    for task in TASKS:
        assert counters.get(task, 0) == sum(row.task == task for row in completed)


#: Enough initial groups for most operations to find some.
AT_FIRST = [
    ("uid-0", "gsm8k", 1.0, 0, "completed"),
    ("uid-1", "gsm8k", 0.0, None, "completed"),
    ("uid-2", "code", 3.0, 1, "completed"),
    ("uid-3", "gsm8k", 0.5, 2, "completed"),
]


def of(uid: str, status: str = "completed") -> list[Any]:
    """Return the groups of a put: one."""
    return [(uid, "gsm8k", 1.0, 0, status)]


#: Bounds, and operations that show a rule which random ones rarely do.
RULES: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "an evicted group is replaced": (
        {"capacity": Capacity(groups=3)},
        [("put", of("uid-5"), "error"), ("put", of("uid-0"), "replace")],
    ),
    "an old open group is replaced": (
        {"time_to_live": 100.0},
        [("open", "uid-4", "gsm8k", None, None), ("wait", 120), ("put", of("uid-4"), "replace"),
         ("put", of("uid-5"), "error")],
    ),
    "content is put into the archive": (
        {"keep_archived": Keep(seconds=100)},
        [("wait", 120), ("put", of("uid-0", "archived"), "replace"), ("put", of("uid-5"), "error")],
    ),
    "a put finds groups that are too old for the archive": (
        {"keep_archived": Keep(seconds=100)},
        [("update", ["uid-0", "uid-1"], "archived", None), ("wait", 120),
         ("put", of("uid-0"), "ignore")],
    ),
    "a put finds groups beyond the archive": (
        {"keep_archived": Keep(count=1)},
        [("update", ["uid-0", "uid-1", "uid-3"], "archived", None),
         ("put", [*of("uid-0"), *of("uid-5")], "ignore")],
    ),
    "groups are updated that are too old for the archive": (
        {"keep_archived": Keep(seconds=100)},
        [("wait", 120), ("update", ["uid-0"], "archived", None), ("reweigh", "uid-0", 3.0)],
    ),
    "more groups are put into the archive than it keeps": (
        {"keep_archived": Keep(count=1)},
        [("put", [*of("uid-4", "archived"), *of("uid-5", "archived")], on_duplicate)
         for on_duplicate in ("error", "renew", "ignore")],
    ),
    "more groups are refused than the archive keeps": (
        {"keep_archived": Keep(count=1), "capacity": Capacity(groups=1)},
        [("update", ["uid-0", "uid-1", "uid-3"], "completed", None),
         ("put", [*of("uid-4", "failed"), *of("uid-5", "failed")], "error")],
    ),
    "random groups are evicted for a put that is refused": (
        {"capacity": Capacity(groups=2), "eviction": "uniform", "on_evict": "delete"},
        [("put", of(uid), "error") for uid in ("uid-0", "uid-1", "uid-2", "uid-3")],
    ),
    "a random group is evicted that a put ignores": (
        {"capacity": Capacity(groups=3), "eviction": "uniform"},
        [("put", [*of("uid-5"), *of("uid-3")], "ignore")],
    ),
    "a draw that fails removes groups from the archive": (
        {"time_to_live": 100.0, "keep_archived": Keep(seconds=100)},
        [("wait", 120), ("sample", 1, 0, rdb.Fifo(), None, None)],
    ),
    "an empty group is updated together with one that was evicted": (
        {"capacity": Capacity(groups=4)},
        [("open", "uid-5", "gsm8k", None, None), ("update", ["uid-5", "uid-0"], "completed", None)],
    ),
    "open groups exceed a lowered capacity": (
        {},
        [("open", "uid-4", "gsm8k", None, None), ("open", "uid-5", "gsm8k", None, None),
         ("bounds", {"capacity": Capacity(groups=1)}), ("add", "uid-4", 0), ("add", "uid-4", 0)],
    ),
}  # fmt: skip


def shown(test: Any) -> Any:
    """Add the `RULES` to the examples of a test."""
    for bounds, operations in RULES.values():
        test = example(first=bounds, history=operations)(test)
    return test


@shown
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    first=st.fixed_dictionaries(bounds),
    history=st.lists(operations, min_size=4, max_size=20),
)
async def test_any_history(
    store: Store,
    url: str,
    clock: Clock,
    first: dict[str, Any],
    history: list[tuple[Any, ...]],
) -> None:
    buffer = await store.buffer(f"buffer-{len(await store.buffers())}")
    model = Model()
    await put(buffer, model, AT_FIRST, "error")
    for operation in [("bounds", first), *history]:
        await apply(buffer, model, clock, operation)
    await check(buffer, model)
    await check_invariants(url)
