"""Draws: by exponential keys, or in the order of an index (`docs/sampling.md`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache, cached_property
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Select, bindparam, select, true, tuple_

from replaydb.database.repository import (
    aging,
    groups,
    leases,
    limits,
    lineage,
    ordered_reads,
    tags,
    tasks,
    transitions,
)
from replaydb.database.repository.choosing import (
    Candidates,
    batch_of,
    elapsed_until,
    first,
    num_eligible,
    rates,
    remaining_times,
)
from replaydb.database.repository.draw_request import Contents, Drawn, DrawRequest, Quota
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.taking import Chosen, take
from replaydb.database.repository.tasks import TaskState, waiting_times
from replaydb.database.runtime.prepared import Bound
from replaydb.database.runtime.session import Session
from replaydb.database.statements.candidates import (
    CANDIDATE,
    MEMBERS,
    Order,
    Partition,
    order_of,
    select_among,
    select_first,
    verdict,
)
from replaydb.database.statements.selections import selection
from replaydb.database.tables.records import Facts, Stored, mistyped
from replaydb.database.tables.schema import IS_IDLE, group
from replaydb.database.tables.staleness import staleness_of
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import DrawOutcome
from replaydb.errors import NotEnoughGroupsError

#: A read by key is abandoned for one scan of the eligible groups after this many rows per group
#: wanted (so fewer than about one in ten is eligible), and at least the second number.
KEYS_READ_PER_GROUP = 10
KEYS_READ_AT_LEAST = 200
#: A scan reads this many groups in the time of one lookup by id. If fewer of the first
#: `KEYS_READ_TO_ESTIMATE` rows are eligible, the read is abandoned at once if a tag index has them.
SCANNED_PER_LOOKUP = 16
KEYS_READ_TO_ESTIMATE = 64
#: If a task has more groups, a filter that needs a scan of them is evaluated before the locks.
MOST_SCANNED = 20_000
#: The first reads of up to this many tasks are made in the round trip that locks them.
MOST_FIRST_READS = 8
#: A read by key is also abandoned before the clock would advance further than this, in mean
#: distances between two keys. Setting a clock back rewrites every group of the task, and batches
#: that take tiny weights would need it often.
MAX_CLOCK_ADVANCE = 2.0**-6 * tasks.MAX_CLOCK

_ID = group.id.type


class LongScanError(Exception):
    """Raised by a draw that would scan a large task while it is locked.

    The draw is rolled back, its filters are evaluated without locks, and then it is retried.
    """


def draw(buffer: LockedBuffer, request: DrawRequest) -> Drawn:
    """Take groups of locked tasks, count them and give them new keys.

    Raises:
        LongScanError: Its filters must be evaluated first.
        NotEnoughGroupsError: There are fewer than wanted at least, or none at all; what was done
            is to be rolled back.
        RateLimitedError: The buffer's rate limit does not allow a draw of this size now.
    """
    aging.check_expired(buffer)
    limits.check_draw(buffer, request.count)
    drawing = _Drawing(buffer, request)
    parts = []
    for position, quota in enumerate(request.quotas):
        drawing.settle()  # the next quota reads the new keys
        parts.append(drawing.choose(quota, request.least(position, len(drawing.taken))))
        drawing.taken.extend(parts[-1].ids)
    if not drawing.taken:
        raise NotEnoughGroupsError(request.count, 0)
    drawn = Drawn.concatenate(parts)
    # Before the groups are changed: the changes are then sent with the last statement, and what is
    # archived has its payload yet.
    contents = drawing.read(drawn.ids)
    retired = drawing.retire()
    buffer.row.limited_samples += len(drawing.taken)
    if retired:
        rows, unretired = groups.facts(buffer.session, buffer.id, drawn.ids), contents
        contents = replace(contents, read=lambda: unretired.stored._replace(groups=rows))
    drawn = replace(drawn, contents=contents, lease_id=drawing.lease_id)
    if buffer.settings.record_draws:
        drawn = replace(drawn, draw_id=drawing.record(drawn))
    if buffer.settings.on_evict == "delete":
        transitions.erase(buffer, retired)  # the snapshot of the payloads has them yet
    return drawn


def read_in_snapshot(session: Session, drawn: Drawn, fields: frozenset[str] | None) -> Stored:
    """Return the payloads and texts of the groups of a draw.

    The rows of the groups are not in the snapshot as they are after the draw. On PostgreSQL the
    last statement of the draw reads them at the same time.
    """
    parts = session.read_payloads(drawn.ids, fields)
    return Stored((), parts, groups.transcripts(session, drawn.contents.with_text))


def first_reads(
    buffer_id: int, request: DrawRequest, task_names: Collection[str]
) -> list[Bound[Any]]:
    """Return the statements with which a draw from these tasks begins, unless it has a filter."""
    quota, *others = request.quotas
    if others or quota.eligible is not None or request.statuses != (GroupStatus.COMPLETED,):
        return []
    names = quota.tasks or task_names
    if len(names) > MOST_FIRST_READS:
        return []
    order = order_of(quota.policy)
    partitions = [Partition(buffer_id, name, GroupStatus.COMPLETED.value) for name in sorted(names)]
    if order.clock is not None:
        return [select_by_key(one, order, quota.count, None, None) for one in partitions]
    most = ordered_reads.num_first(order, quota.count)
    return [select_first(one, order, most) for one in partitions]


class _Drawing:
    """One draw in progress: reads candidates, chooses among them, and updates the chosen groups."""

    def __init__(self, buffer: LockedBuffer, request: DrawRequest) -> None:
        self._buffer = buffer
        self._session = buffer.session
        self._request = request
        self._num_bytes = 0
        self._with_text: list[int] = []
        self._chosen: list[Chosen] = []
        self.taken: list[int] = []

    @cached_property
    def lease_id(self) -> int | None:
        """Id of the lease, which is inserted with the first groups; None if they are sampled."""
        terms = self._request.lease
        return None if terms is None else leases.create(self._buffer, terms.owner, terms.ttl)

    def choose(self, quota: Quota, least: int) -> Drawn:
        """Choose the first eligible groups of a quota, over all its tasks. `settle` takes them.

        Raises:
            NotEnoughGroupsError: There are not even `least`.
        """
        order = order_of(quota.policy)
        task_states = [
            task
            for name, task in self._buffer.task_states.items()
            if quota.tasks is None or name in quota.tasks
        ]
        for task in task_states:
            tasks.recompute_weight_if_inexact(self._session, task)
        if order.clock is not None:
            # Among the arrivals of other tasks a clock may be too late that is not for its own.
            rate = sum(task.rate(order.clock) for task in task_states)
            for task in task_states:
                tasks.set_back_if_late(self._session, task, order.clock, rate)
        candidates = self._read_candidates(quota, order, task_states)
        available = num_eligible(candidates)
        if available < quota.count and quota.candidates is not None:
            # Others may have become eligible before the tasks were locked.
            quota = replace(quota, candidates=None)
            candidates = self._read_candidates(quota, order, task_states)
            available = num_eligible(candidates)
        if available < least:
            raise NotEnoughGroupsError(least, available, quota.task_name, quota=quota)
        if available == 0:
            return Drawn.empty()
        chosen = first(candidates, quota.count, newest_first=order.newest_first)
        elapsed = elapsed_until(candidates, chosen)
        drawn = batch_of(quota.policy, task_states, candidates, chosen)
        end = 0
        for part in candidates:
            start, end = end, end + len(part.ids)
            mine = chosen[(chosen >= start) & (chosen < end)] - start
            self._num_bytes += int(part.num_bytes[mine].sum())
            self._with_text += part.ids[mine[part.has_transcript[mine]]].tolist()
            self._chosen.append(Chosen(order, part, mine, elapsed))
        return drawn

    def read(self, ids: Sequence[int]) -> Contents:
        """Take the groups that were chosen last, and read the rows of groups as they are then.

        Read everything stored of them, too, if it is small or cannot be read by another connection.
        """
        buffer, backend = self._buffer, self._buffer.scope.backend
        chosen = {group_id for one in self._chosen for group_id in one.ids}
        now = buffer.now  # not later: the rows may be read by the last statement
        # Of payloads in packs, only the locations are read here.
        in_packs = buffer.row.uses_payload_store
        is_small = in_packs or self._num_bytes <= backend.traits.small_draw_bytes
        is_small &= not self._request.is_large
        loads, fields = self._request.loads, self._request.fields
        in_snapshot = loads and not (is_small or backend.has_one_connection)
        only_rows = in_snapshot or not loads
        if only_rows or (is_small and self._session.sends_together):
            reads = groups.select_stored(buffer.id, ids, fields, only_rows=only_rows)
            later = self._session.read_later(reads)
        else:
            fetched = groups.fetch(self._session, buffer.id, ids, fields)
            later = None

        def read() -> Stored:
            found = fetched if later is None else Stored.of(later())
            rows = (self._changed(row, now) if row["id"] in chosen else row for row in found.groups)
            return found._replace(groups=list(rows))

        self.settle()
        return Contents(read, in_snapshot, self._num_bytes, self._with_text)

    def _changed(self, row: Facts, now: datetime) -> Facts:
        """Return the row of a group as `settle` changes it, if it is sound."""
        if mistyped(row):
            return row
        changed = {
            **row,
            "times_sampled": row["times_sampled"] + 1,
            "first_sampled_at": row["first_sampled_at"] or now,
            "last_sampled_at": now,
        }
        if self.lease_id is None:
            return changed
        return changed | {
            "group_status": GroupStatus.LEASED.value,
            "leased_from": row["group_status"],
            "staleness": staleness_of(row["comparable_version"], self._buffer.row.policy_version),
        }

    def record(self, drawn: Drawn) -> int:
        """Record the draw in the lineage. Return its id."""
        facts = {
            "buffer_id": self._buffer.id,
            "run_id": self._buffer.scope.run.id,
            "step": self._request.step,
            "policy": self._request.policy,
            "created_at": self._buffer.now,
        }
        columns = ("group_id", "probability", "weight", "staleness", "times_replaced")
        values = (
            drawn.ids,
            drawn.probabilities.tolist(),
            drawn.weights.tolist(),
            drawn.staleness,
            drawn.times_replaced,
        )
        outcome = DrawOutcome.SAMPLED if self.lease_id is None else DrawOutcome.LEASED
        common = {"outcome": outcome.value}
        rows = [common | dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
        return lineage.record(self._buffer, facts, rows)

    def retire(self) -> list[int]:
        """Archive groups that have reached `max_times_sampled`; leased ones wait for their ack."""
        settings = self._buffer.settings
        limit = settings.draw_limit
        if limit is None or self.lease_id is not None:
            return []
        rows = groups.scalars(self._session, self._buffer.id, self.taken)
        done = [row for row in rows if row.times_sampled >= limit]
        keep = settings.archived_payload == "keep" or settings.on_evict == "delete"
        reason = f"sampled {limit} times"
        transitions.archive(self._buffer, done, reason, keep_payload=keep)
        return [row.id for row in done]

    def _read_candidates(
        self, quota: Quota, order: Order, task_states: Iterable[TaskState]
    ) -> list[Candidates]:
        return [
            self._candidates(quota, order, task, status)
            for task in task_states
            for status in self._request.statuses
            if status is not GroupStatus.COMPLETED or task.num_available
        ]

    def _candidates(
        self, quota: Quota, order: Order, task: TaskState, status: GroupStatus
    ) -> Candidates:
        eligible = quota.eligible
        known = None if quota.candidates is None else quota.candidates.get(task.task_name, ())
        if self.taken:
            others = ~selection(self._buffer.id, ids=self.taken)
            eligible = others if eligible is None else eligible & others
        partition = Partition(self._buffer.id, task.task_name, status.value)
        if order.clock is None:
            most = _max_lookups_in_order(task.stored_groups, quota.count)
            rows = self._look_up(partition, order, eligible, most, known)
            if rows is None:
                self._check_scan(quota, task)
                rows = ordered_reads.first(self._session, partition, order, quota.count, eligible)
            keys = np.array([ordered_reads.sort_key(order, row) for row in rows], np.float64)
            return Candidates.of(task, status, rows, keys)
        if status is GroupStatus.COMPLETED:  # groups of other statuses have no keys
            found = self._read_by_key(
                partition, order, task, quota.count, eligible, abandons=known is not None
            )
            if found is not None:
                return found
        rows = self._look_up(partition, order, eligible, _max_lookups(task), known)
        if rows is None:
            self._check_scan(quota, task)
            rows = self._session.run(select_eligible(partition, eligible))
        weights = np.array([row.weight for row in rows], np.float64)
        variates = task.exponentials(self._buffer.settings, len(rows))
        keys = waiting_times(variates, rates(order.clock, weights))
        return Candidates.of(task, status, rows, keys)

    def _check_scan(self, quota: Quota, task: TaskState) -> None:
        """Raise if a filter is about to be evaluated for many groups under the locks."""
        is_filtered = quota.eligible is not None and not self._request.is_evaluated
        if is_filtered and task.stored_groups > MOST_SCANNED:
            raise LongScanError

    def _read_by_key(
        self,
        partition: Partition,
        order: Order,
        task: TaskState,
        count: int,
        eligible: ColumnElement[bool] | None,
        *,
        abandons: bool,
    ) -> Candidates | None:
        """Read the groups of a task by key, up to `count` eligible ones and those passed over.

        Returns:
            None if so few are eligible, or their keys are so large, that a scan is faster.
            Also if it `abandons` the read in any case: an earlier attempt was rolled back after it
            had read these keys.
        """
        assert order.clock is not None  # noqa: S101
        time, rate = task.time(order.clock), task.rate(order.clock)
        horizon = MAX_CLOCK_ADVANCE / rate if rate > 0.0 else math.inf
        page = count if eligible is None else 2 * count
        longest = max(KEYS_READ_PER_GROUP * count, KEYS_READ_AT_LEAST)
        rows: list[Any] = []
        found = 0
        judged = False
        while found < count:
            after = (rows[-1].key, rows[-1].id) if rows else None
            statement = select_by_key(partition, order, page, eligible, after)
            more = self._session.run(statement)
            rows.extend(more)
            # What never arrives is not late: it comes when nothing else is left.
            late = [row for row in more if horizon < row.key - time < math.inf]
            found += sum(row.eligible for row in more) - sum(row.eligible for row in late)
            at_end = len(more) < page
            if not judged and found < count and len(rows) >= KEYS_READ_TO_ESTIMATE:
                judged = True
                if found * SCANNED_PER_LOOKUP < len(rows) and self._is_selective(task, eligible):
                    longest = 0
            if found < count and (late or (len(rows) >= longest and not at_end)):
                self._abandon(order, task, rows, horizon)
                return None
            if at_end:
                break
            page = min(2 * page, longest - len(rows))
        if abandons:
            self._abandon(order, task, rows, horizon)
            return None
        keys = remaining_times(task, order.clock, rows)
        verdicts = np.array([bool(row.eligible) for row in rows], np.bool_)
        return Candidates.of(
            task,
            GroupStatus.COMPLETED,
            rows,
            keys,
            eligible=verdicts,
            clock=order.clock,
        )

    def _abandon(self, order: Order, task: TaskState, rows: Sequence[Any], horizon: float) -> None:
        """Abandon a read by key. The reason depends on the keys that were read: none may stay.

        Of those behind the horizon it only says that they are behind it, as the clock will.
        """
        assert order.clock is not None  # noqa: S101
        passed = Candidates.of(
            task,
            GroupStatus.COMPLETED,
            rows,
            remaining_times(task, order.clock, rows),
            eligible=np.zeros(len(rows), np.bool_),
            clock=order.clock,
        )
        elapsed = min(elapsed_until([passed], np.arange(len(rows))), horizon)
        none = np.zeros(0, np.int64)
        take(self._buffer, [Chosen(order, passed, none, elapsed)], self.lease_id)

    def _look_up(
        self,
        partition: Partition,
        order: Order,
        eligible: ColumnElement[bool] | None,
        most: int,
        known: Sequence[int] | None,
    ) -> Sequence[Any] | None:
        """Read every eligible group of a partition by id, as rows of `select_among`.

        Returns:
            None unless its ids are `known`, or a tag index shows that there are up to `most`.
        """
        ids = known
        if ids is None:
            ids = tags.look_up(self._session, self._buffer.row, eligible, most)
        if not ids:
            return None if ids is None else ()
        return self._session.run(select_among(partition, order, ids, eligible))

    def _is_selective(self, task: TaskState, eligible: ColumnElement[bool] | None) -> bool:
        return tags.is_selective(self._session, self._buffer.row, eligible, _max_lookups(task))

    def settle(self) -> None:
        """Take the groups that were chosen last: count or lease them, and set new keys."""
        chosen, self._chosen = self._chosen, []
        if chosen:
            take(self._buffer, chosen, self.lease_id)


def _max_lookups(task: TaskState) -> int:
    """Return how many groups can be looked up by id faster than all of a task are scanned."""
    return max(KEYS_READ_AT_LEAST, task.stored_groups // SCANNED_PER_LOOKUP)


def _max_lookups_in_order(stored: int, count: int) -> int:
    """Return how many groups can be looked up faster than `count` of them are found in an order.

    Of m among n groups, `count` are found after reading about n * count / m rows, each of which
    takes less time than a lookup.
    """
    return min(tags.MAX_LOOKUPS_IN_ORDER, math.isqrt(stored * count) // 4)


def select_by_key(
    partition: Partition,
    order: Order,
    limit: int,
    eligible: ColumnElement[bool] | None,
    after: tuple[float, int] | None,
) -> Bound[Select[Any]]:
    """Select a page of an idle partition by key: columns of `CANDIDATE`, `key` and others."""
    values = partition.values | {"most": limit}
    if after is not None:
        values |= {"after_key": after[0], "after_id": after[1]}
    build = _all_by_key if eligible is None else _by_key
    return Bound(build(order, eligible, after is not None), values, eligible is None)


def _by_key(order: Order, eligible: ColumnElement[bool] | None, later: bool) -> Select[Any]:
    key = order.column
    met = true() if eligible is None else verdict(eligible)
    more = (met.label("eligible"), group.task_name)
    statement = select(*CANDIDATE, key.label("key"), *more)
    statement = statement.where(MEMBERS & IS_IDLE)
    if later:
        after = tuple_(bindparam("after_key", type_=key.type), bindparam("after_id", type_=_ID))
        statement = statement.where(tuple_(key, group.id) > after)
    return statement.order_by(key, group.id).limit(bindparam("most"))


_all_by_key = cache(_by_key)


def select_eligible(
    partition: Partition, eligible: ColumnElement[bool] | None
) -> Bound[Select[Any]]:
    """Select every eligible group of a partition: `CANDIDATE`, in order of ids."""
    statement = select(*CANDIDATE).where(MEMBERS)
    if eligible is not None:
        statement = statement.where(eligible)
    return Bound(statement.order_by(group.id), partition.values, is_cached=False)
