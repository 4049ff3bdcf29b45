"""Random call sequences compared with a model of a buffer that is a dict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replaydb as rdb
from replaydb import Buffer, SamplingPolicy, Store
from support.examples import examples
from support.groups import group
from support.invariants import check_invariants

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
                    ["completed", "completed", "completed", "aborted", "expired", "failed"]
                ),
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda one: one[0],
        ),
        st.sampled_from(["error", "ignore", "replace"]),
    ),
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
)


@dataclass
class Row:
    id: int
    task: str
    priority: float
    version: int | None
    status: str
    times_sampled: int = 0


@dataclass
class Model:
    """A buffer modelled in memory, without a database."""

    rows: dict[str, Row] = field(default_factory=dict)
    version: int = 0
    limit: Any = None

    def limit_of(self, task: str) -> int | None:
        limit: int | None = self.limit.get(task) if isinstance(self.limit, dict) else self.limit
        return limit

    def expire(self) -> int:
        expired = 0
        for row in self.rows.values():
            limit = self.limit_of(row.task)
            if row.status not in ("completed", "aborted") or None in (limit, row.version):
                continue
            if self.version - (row.version or 0) > (limit or 0):
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


async def put(buffer: Buffer, model: Model, rows: list[Any], on_duplicate: Any) -> None:
    groups = [
        group(uid, task, priority=priority, version=version, status=status)
        for uid, task, priority, version, status in rows
    ]
    if on_duplicate == "error" and any(uid in model.rows for uid, *_ in rows):
        with pytest.raises(rdb.DuplicateGroupError):
            await buffer.put(groups)
        return
    stored = [model.rows[uid] for uid, *_ in rows if uid in model.rows]
    if on_duplicate == "replace" and any(row.status == "archived" for row in stored):
        with pytest.raises(rdb.ConsumedGroupError):
            await buffer.put(groups, on_duplicate=on_duplicate)
        return
    ids = await buffer.put(groups, on_duplicate=on_duplicate)
    for group_id, (uid, task, priority, version, status) in zip(ids, rows, strict=True):
        known = model.rows.get(uid)
        assert known is None or known.id == group_id
        if known is None or on_duplicate == "replace":
            model.rows[uid] = Row(group_id, task, priority, version, status)
    assert len({row.id for row in model.rows.values()}) == len(model.rows)
    model.expire()


async def sample(
    buffer: Buffer,
    model: Model,
    most: int,
    spare: int,
    policy: SamplingPolicy,
    task: str | None,
    limit: Any,
) -> None:
    rows = model.eligible(task, limit)
    n = min(most, len(rows))
    arguments: dict[str, Any] = {"tasks": task, "max_staleness": limit}
    arguments["at_least"] = max(0, most - spare)
    if n < arguments["at_least"]:
        with pytest.raises(rdb.NotEnoughGroupsError) as caught:
            await buffer.sample(most, policy, **arguments)
        assert caught.value.available == len(rows)
        return
    batch = await buffer.sample(most, policy, **arguments)
    expected = in_order(rows, policy)
    if expected is None:
        assert len(set(batch.ids)) == n
        assert set(batch.ids) <= {row.id for row in rows}
    else:
        assert batch.ids == expected[:n]
    if policy == rdb.Prioritized():
        alive = {row.id for row in rows if row.priority > 0}
        assert len(alive.intersection(batch.ids)) == min(n, len(alive))
    for row in rows:
        row.times_sampled += row.id in batch.ids


async def update(
    buffer: Buffer, model: Model, chosen: list[str], status: str, priority: float | None
) -> None:
    rows = [model.rows[uid] for uid in chosen if uid in model.rows]
    changed = await buffer.update(uids=chosen, status=status, priority=priority)
    assert changed == len(rows)
    for row in rows:
        row.status = status
        row.priority = row.priority if priority is None else priority
    model.expire()


async def apply(buffer: Buffer, model: Model, operation: tuple[Any, ...]) -> None:
    match operation:
        case ("put", rows, on_duplicate):
            await put(buffer, model, rows, on_duplicate)
        case ("sample", most, spare, policy, task, limit):
            await sample(buffer, model, most, spare, policy, task, limit)
        case ("reweigh", uid, priority):
            row = model.rows.get(uid)
            ids = [row.id] if row else [10**9]
            assert await buffer.update_priorities(ids, [priority]) == (row is not None)
            if row:
                row.priority = priority
        case ("update", chosen, status, priority):
            await update(buffer, model, chosen, status, priority)
        case ("delete", uid):
            deleted = await buffer.delete(where=rdb.col.group_uid == uid)
            assert deleted == (model.rows.pop(uid, None) is not None)
        case ("advance", step):
            model.version += step
            assert await buffer.advance_policy(model.version) == model.expire()
        case ("limit", limit):
            model.limit = limit
            await buffer.update_settings(max_staleness=limit)
            model.expire()
        case ("exponent", exponent):
            await buffer.update_settings(priority_exponent=exponent)


async def check(buffer: Buffer, model: Model) -> None:
    assert await buffer.count() == len(model.rows)
    found = await buffer.get([row.id for row in model.rows.values()])
    for stored, (uid, row) in zip(found, model.rows.items(), strict=True):
        assert stored.group_uid == uid
        assert (stored.task_name, stored.status.value) == (row.task, row.status)
        assert (stored.priority, stored.times_sampled) == (row.priority, row.times_sampled)
        assert stored.min_policy_version == row.version
        if row.status in ("completed", "aborted"):
            expected = None if row.version is None else model.version - row.version
            assert stored.staleness == expected
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


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(history=st.lists(operations, min_size=4, max_size=20))
async def test_any_history(store: Store, url: str, history: list[tuple[Any, ...]]) -> None:
    buffer = await store.buffer(f"buffer-{len(await store.buffers())}")
    model = Model()
    await put(buffer, model, AT_FIRST, "error")
    for operation in history:
        await apply(buffer, model, operation)
    await check(buffer, model)
    await check_invariants(url)
