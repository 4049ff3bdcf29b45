"""Drawing groups: by arrival clocks, or in the order of an index (`docs/sampling.md`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement

from replaydb.database.prepared import execute, execute_many
from replaydb.database.repository import (
    aging,
    groups,
    leases,
    limits,
    lineage,
    orders,
    tags,
    tasks,
    transitions,
)
from replaydb.database.repository.candidates import (
    Candidates,
    batch_of,
    elapsed_until,
    first,
    rates,
    waits,
)
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.portions import Drawn, DrawRequest, Portion
from replaydb.database.repository.tasks import GroupSums, TaskAccount, waiting
from replaydb.database.statements.episode_group import (
    claim_groups,
    mark_leased,
    mark_sampled,
    mark_sampled_and_rekey,
    rekey,
)
from replaydb.database.statements.pools import (
    Order,
    Pool,
    order_of,
    select_among,
    select_arrivals,
    select_eligible,
)
from replaydb.database.statements.selections import UNHELD, selection
from replaydb.episodes import GroupStatus
from replaydb.errors import NotEnoughGroupsError
from replaydb.results import DrawOutcome

#: A walk along a clock gives way to one scan of the eligible groups once it has passed this many
#: rows for every group wanted (so that fewer than about one in ten is eligible), and some.
WALK_PER_GROUP = 10
WALK_AT_LEAST = 200
#: In the time of looking up one group by its id, a scan passes so many. A walk that has met fewer
#: among the rows it takes to judge gives way at once where an index of tags has them.
SCAN_PER_LOOKUP = 16
ENOUGH_TO_JUDGE = 64
#: So it does before the clock would get so late, in times between two arrivals: to set a clock
#: back is to write every group of the task, which batches that take tiny weights would need often.
LONGEST_WALK = 2.0**-6 * tasks.LATEST


def draw(buffer: LockedBuffer, request: DrawRequest) -> Drawn:
    """Take groups of locked tasks, count them and give them new arrivals.

    Raises:
        NotEnoughGroupsError: There are fewer than wanted at least, or none at all; what was done
            is to be rolled back.
        RateLimitedError: The buffer's rate limit does not let so many out now.
    """
    if not request.is_claim:
        aging.check_expired(buffer)
        limits.check_draw(buffer, request.count)
    lease_id = None
    if request.lease is not None:
        lease_id = leases.create(buffer, request.lease.owner, request.lease.ttl)
    drawing = _Drawing(buffer, request, lease_id)
    parts = []
    for position, portion in enumerate(request.portions):
        parts.append(drawing.take(portion, request.least(position, len(drawing.taken))))
        drawing.taken.extend(parts[-1].ids)
    if not drawing.taken:
        raise NotEnoughGroupsError(request.count, 0)
    drawn = replace(Drawn.together(parts), lease_id=lease_id)
    backend, stored = buffer.scope.backend, None
    # Before what is archived loses its payload.
    if backend.has_one_connection or buffer.row.outside:
        stored = groups.fetch(backend, buffer.connection, buffer.id, drawn.ids)
    retired = drawing.retire()
    if not request.is_claim:
        buffer.row.limited_samples += len(drawing.taken)
    rows = groups.facts(buffer.connection, buffer.id, drawn.ids)
    drawn = replace(drawn, rows=rows, stored=stored and stored._replace(groups=rows))
    if stored is None and not retired and drawn.num_bytes <= backend.small_draw_bytes:
        drawn = replace(drawn, stored=groups.stored(backend, buffer.connection, rows))
    if buffer.settings.record_draws and not request.is_claim:
        drawn = replace(drawn, draw_id=drawing.record(drawn))
    if buffer.settings.on_evict == "delete":
        transitions.erase(buffer, retired)  # the snapshot of the payloads has them yet
    return drawn


class _Drawing:
    """One draw under way: reading candidates, choosing among them, and settling the choice."""

    def __init__(self, buffer: LockedBuffer, request: DrawRequest, lease_id: int | None) -> None:
        self._buffer = buffer
        self._connection = buffer.connection
        self._request = request
        self._lease_id = lease_id
        self.taken: list[int] = []

    def take(self, portion: Portion, least: int) -> Drawn:
        """The first eligible groups of a portion, over all its tasks.

        Raises:
            NotEnoughGroupsError: There are not even `least`.
        """
        order = order_of(portion.policy)
        accounts = [
            account
            for name, account in self._buffer.accounts.items()
            if portion.tasks is None or name in portion.tasks
        ]
        for account in accounts:
            tasks.sum_anew_if_rounded(self._connection, account)
        if order.clock is not None:
            # Among the arrivals of other tasks a clock may be too late that is not for its own.
            rate = sum(account.rate(order.clock) for account in accounts)
            for account in accounts:
                tasks.set_back_if_late(self._connection, account, order.clock, rate)
        candidates = [
            self._candidates(portion, order, account, status)
            for account in accounts
            for status in self._request.statuses
            if status is not GroupStatus.COMPLETED or account.num_available
        ]
        available = sum(int(part.eligible.sum()) for part in candidates)
        if available < least:
            raise NotEnoughGroupsError(least, available, portion.task_name, portion=portion)
        if available == 0:
            return Drawn.nothing()
        chosen = first(candidates, portion.count, newest_first=order.newest_first)
        elapsed = elapsed_until(candidates, chosen)
        drawn = batch_of(portion.policy, accounts, candidates, chosen)
        end = 0
        for part in candidates:
            start, end = end, end + len(part.ids)
            mine = chosen[(chosen >= start) & (chosen < end)] - start
            self._settle(order, part, mine, elapsed)
        return drawn

    def record(self, drawn: Drawn) -> int:
        """Enter the draw in the lineage. Returns its id there."""
        facts = {
            "buffer_id": self._buffer.id,
            "run_id": self._buffer.scope.run.id,
            "step": self._request.step,
            "policy": self._request.policy,
            "created_at": self._buffer.now,
        }
        columns = ("group_id", "probability", "weight", "staleness", "times_replaced")
        replaced = {row["id"]: row["times_replaced"] for row in drawn.rows}
        values = (
            drawn.ids,
            drawn.probabilities.tolist(),
            drawn.weights.tolist(),
            drawn.staleness,
            [replaced[group_id] for group_id in drawn.ids],
        )
        outcome = DrawOutcome.SAMPLED if self._lease_id is None else DrawOutcome.LEASED
        common = {"outcome": outcome.value}
        rows = [common | dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
        return lineage.record(self._connection, facts, rows)

    def retire(self) -> list[int]:
        """Archive what has been drawn as often as it may be; what is leased waits for its ack."""
        settings = self._buffer.settings
        limit = settings.draw_limit
        if limit is None or self._lease_id is not None:
            return []
        rows = groups.scalars(self._connection, self._buffer.id, self.taken)
        done = [row for row in rows if row.times_sampled >= limit]
        keep = settings.archived_payload == "keep" or settings.on_evict == "delete"
        reason = f"sampled {limit} times"
        transitions.archive(self._buffer, done, reason, keep_payload=keep)
        return [row.id for row in done]

    def _pool(self, account: TaskAccount, status: GroupStatus) -> Pool:
        return Pool(self._buffer.id, account.task_name, status.value)

    def _candidates(
        self, portion: Portion, order: Order, account: TaskAccount, status: GroupStatus
    ) -> Candidates:
        eligible = portion.eligible
        if self.taken:
            others = ~selection(self._buffer.id, ids=self.taken)
            eligible = others if eligible is None else eligible & others
        if self._request.is_claim:
            eligible = UNHELD if eligible is None else eligible & UNHELD
        pool = self._pool(account, status)
        if order.clock is None:
            few = _few_in_order(account.stored_groups, portion.count)
            rows = self._looked_up(pool, order, eligible, few)
            if rows is None:
                rows = orders.first(self._connection, pool, order, portion.count, eligible)
            keys = np.array([orders.sort_key(order, row) for row in rows], np.float64)
            return Candidates.of(account, status, rows, keys)
        if status is GroupStatus.COMPLETED:
            walked = self._walk(pool, order, account, portion.count, eligible)
            if walked is not None:
                return walked
        # Other statuses keep no arrivals.
        return self._scan(pool, order, account, eligible)

    def _walk(
        self,
        pool: Pool,
        order: Order,
        account: TaskAccount,
        count: int,
        eligible: ColumnElement[bool] | None,
    ) -> Candidates | None:
        """The first arrivals of a task, up to `count` eligible ones, and whom they passed.

        None where so few are eligible, or they arrive so late, that a scan is the shorter way.
        """
        assert order.clock is not None  # noqa: S101
        time, rate = account.time(order.clock), account.rate(order.clock)
        horizon = LONGEST_WALK / rate if rate > 0.0 else math.inf
        page = count if eligible is None else 2 * count
        longest = max(WALK_PER_GROUP * count, WALK_AT_LEAST)
        rows: list[Any] = []
        found = 0
        judged = False
        while found < count:
            after = (rows[-1].key, rows[-1].id) if rows else None
            statement = select_arrivals(pool, order, page, eligible, after)
            more = execute(self._connection, statement)
            rows.extend(more)
            # What never arrives is not late: it comes when nothing else is left.
            late = [row for row in more if horizon < row.key - time < math.inf]
            found += sum(row.eligible for row in more) - sum(row.eligible for row in late)
            at_end = len(more) < page
            if not judged and found < count and len(rows) >= ENOUGH_TO_JUDGE:
                judged = True
                if found * SCAN_PER_LOOKUP < len(rows) and self._are_few(account, eligible):
                    longest = 0
            if found < count and (late or (len(rows) >= longest and not at_end)):
                self._give_up(order, account, rows, horizon)
                return None
            if at_end:
                break
        keys = waits(account, order.clock, rows)
        verdicts = np.array([bool(row.eligible) for row in rows], np.bool_)
        return Candidates.of(
            account,
            GroupStatus.COMPLETED,
            rows,
            keys,
            eligible=verdicts,
            walked=order.clock,
        )

    def _give_up(
        self, order: Order, account: TaskAccount, rows: Sequence[Any], horizon: float
    ) -> None:
        """End a walk. Why it ends says something about the arrivals it saw: none may stay.

        Of those behind the horizon it only says that they are behind it, as the clock will.
        """
        assert order.clock is not None  # noqa: S101
        passed = Candidates.of(
            account,
            GroupStatus.COMPLETED,
            rows,
            waits(account, order.clock, rows),
            eligible=np.zeros(len(rows), np.bool_),
            walked=order.clock,
        )
        elapsed = min(elapsed_until([passed], np.arange(len(rows))), horizon)
        self._settle(order, passed, np.zeros(0, np.int64), elapsed)

    def _scan(
        self,
        pool: Pool,
        order: Order,
        account: TaskAccount,
        eligible: ColumnElement[bool] | None,
    ) -> Candidates:
        """Every eligible group of a pool, with arrivals made for this draw alone."""
        rows = self._looked_up(pool, order, eligible, _few(account))
        if rows is None:
            rows = execute(self._connection, select_eligible(pool, eligible))
        weights = np.array([row.weight for row in rows], np.float64)
        variates = account.exponentials(self._buffer.settings, len(rows))
        keys = waiting(variates, rates(order.clock, weights))
        return Candidates.of(account, GroupStatus(pool.status), rows, keys)

    def _looked_up(
        self, pool: Pool, order: Order, eligible: ColumnElement[bool] | None, most: int
    ) -> Sequence[Any] | None:
        """Every eligible group of a pool, as `select_among` has them.

        None where no index of tags tells that there are so few.
        """
        ids = tags.look_up(self._connection, self._buffer.row, eligible, most)
        if ids is None:
            return None
        return execute(self._connection, select_among(pool, order, ids, eligible))

    def _are_few(self, account: TaskAccount, eligible: ColumnElement[bool] | None) -> bool:
        return tags.are_few(self._connection, self._buffer.row, eligible, _few(account))

    def _settle(
        self, order: Order, part: Candidates, chosen: NDArray[np.int64], elapsed: float
    ) -> None:
        """Count what was chosen of a pool; move its clock, and whoever that clock has passed."""
        account = part.account
        ids = part.ids[chosen].tolist()
        if self._request.is_claim:
            execute(self._connection, claim_groups(ids, self._lease_id))
            return
        account.num_sampled += len(ids)
        if self._lease_id is not None and ids:
            version = self._buffer.row.policy_version
            execute(
                self._connection,
                mark_leased(ids, self._lease_id, self._buffer.now, version),
            )
            sums = GroupSums(len(ids), float(part.weights[chosen].sum()), 0, 0)
            # The sizes stay: what is leased is stored like what can be drawn.
            account.move(part.status, GroupStatus.LEASED, sums)
        elif part.walked is None and ids:
            execute(self._connection, mark_sampled(ids, self._buffer.now))
        if part.walked is None:
            return

        account.advance_clock(part.walked, elapsed)
        tasks.set_back_if_late(self._connection, account, part.walked)
        passed = np.flatnonzero(~part.eligible & (part.keys <= elapsed))
        # What is leased gets its next arrival when it comes back.
        again = passed if self._lease_id is not None else np.concatenate([chosen, passed])
        variates = account.exponentials(self._buffer.settings, len(again))
        arrivals = account.time(part.walked) + waiting(
            variates, rates(part.walked, part.weights[again])
        )
        changes = [
            {"group_id": group_id, "arrival": arrival, "now": self._buffer.now}
            for group_id, arrival in zip(part.ids[again].tolist(), arrivals.tolist(), strict=True)
        ]
        counted = changes[: len(again) - len(passed)]
        skipped = changes[len(counted) :]
        execute_many(self._connection, mark_sampled_and_rekey(order), counted)
        execute_many(self._connection, rekey(order), skipped)


def _few(account: TaskAccount) -> int:
    """How many groups are looked up sooner than all of a task are read."""
    return max(WALK_AT_LEAST, account.stored_groups // SCAN_PER_LOOKUP)


def _few_in_order(stored: int, count: int) -> int:
    """How many eligible groups are looked up sooner than `count` of them are met in an order.

    Of m among n groups those are met after about n * count / m, each read in less time.
    """
    return min(tags.FEW_IN_ORDER, math.isqrt(stored * count) // 4)
