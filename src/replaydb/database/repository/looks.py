"""Choosing groups as a draw does, without drawing them: nothing is locked or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, or_

from replaydb.database import filters
from replaydb.database.prepared import execute
from replaydb.database.repository import aging, buffers, groups, orders, tasks
from replaydb.database.repository.arrivals import exponentials
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.candidates import Candidates, batch_of, first, rates
from replaydb.database.repository.portions import Drawn, DrawRequest, Portion
from replaydb.database.repository.tags import FEW, FEW_IN_ORDER, look_up_now
from replaydb.database.repository.tasks import GroupSums, TaskAccount, waiting
from replaydb.database.statements.episode_group import select_sums
from replaydb.database.statements.pools import (
    Order,
    Pool,
    order_of,
    select_among,
    select_page_of_eligible,
)
from replaydb.database.statements.selections import selection
from replaydb.episodes import GroupStatus
from replaydb.errors import NotEnoughGroupsError

#: Groups whose arrivals are compared at once.
PAGE = 8192


def look(connection: Connection, seen: BufferRow, request: DrawRequest) -> Drawn:
    """Groups that a draw might take now, of a snapshot of a buffer as this process last saw it.

    For random policies arrivals are made for this look alone. The stored ones say whom the next
    draw takes: whoever knew them, and changed groups accordingly, would bias that draw.

    Raises:
        NotEnoughGroupsError: There are fewer than wanted at least.
    """
    accounts = tasks.read(connection, seen.id)
    fresh = _fresh(connection, seen, accounts)
    parts: list[Drawn] = []
    for position, portion in enumerate(request.portions):
        taken = [group_id for part in parts for group_id in part.ids]
        of_fresh = replace(portion, eligible=filters.all_of([portion.eligible, fresh]))
        parts.append(_portion(connection, seen, accounts.values(), of_fresh, taken))
        available, least = len(parts[-1].ids), request.least(position, len(taken))
        if available < least:
            raise NotEnoughGroupsError(least, available, portion.task_name, portion=portion)
    found = Drawn.together(parts)
    return replace(found, rows=groups.facts(connection, seen.id, found.ids))


def _fresh(
    connection: Connection, seen: BufferRow, accounts: Mapping[str, TaskAccount]
) -> ColumnElement[bool] | None:
    """The groups that have not to expire before a draw. Accounts do not count the others then."""
    expiring = [account for account in accounts.values() if account.is_expiring]
    if not expiring:
        return None
    row = buffers.state(connection, seen.id, seen.name)
    stale = [aging.has_to_expire(row, account) for account in expiring]
    for sums in execute(connection, select_sums(or_(*stale))):
        left = GroupSums(sums.num_groups, sums.weight, sums.num_tokens, sums.num_bytes)
        accounts[sums.task_name].move(sums.group_status, GroupStatus.EXPIRED, left)
    return ~or_(*stale)


def _portion(
    connection: Connection,
    seen: BufferRow,
    accounts: Iterable[TaskAccount],
    portion: Portion,
    taken: Sequence[int],
) -> Drawn:
    order = order_of(portion.policy)
    eligible = portion.eligible
    if taken:
        others = ~selection(seen.id, ids=taken)
        eligible = others if eligible is None else eligible & others
    mine = [
        account
        for account in accounts
        if portion.tasks is None or account.task_name in portion.tasks
    ]
    most = FEW_IN_ORDER if order.clock is None else FEW
    ids = look_up_now(connection, seen, portion.eligible, most)
    candidates = []
    for account in mine:
        pool = Pool(seen.id, account.task_name, GroupStatus.COMPLETED.value)
        if ids is not None:
            rows = execute(connection, select_among(pool, order, ids, eligible))
            keys = _keys(order, rows, pool)
        elif order.clock is None:
            rows = orders.first(connection, pool, order, portion.count, eligible)
            keys = _keys(order, rows, pool)
        else:
            rows, keys = _arrivals(connection, pool, order, portion.count, eligible)
        candidates.append(Candidates.of(account, GroupStatus.COMPLETED, rows, keys))
    if not any(len(part.ids) for part in candidates):
        return Drawn.nothing()
    chosen = first(candidates, portion.count, newest_first=order.newest_first)
    return batch_of(portion.policy, mine, candidates, chosen)


def _keys(order: Order, rows: Sequence[Any], pool: Pool) -> NDArray[np.float64]:
    """By which rows come: arrivals made for this look, or what the order sorts by."""
    if order.clock is None:
        return np.array([orders.sort_key(order, row) for row in rows], np.float64)
    weights = np.array([row.weight for row in rows], np.float64)
    variates, _ = exponentials(None, pool.task_name, 0, len(rows))
    return waiting(variates, rates(order.clock, weights))


def _arrivals(
    connection: Connection,
    pool: Pool,
    order: Order,
    count: int,
    eligible: ColumnElement[bool] | None,
) -> tuple[list[Any], NDArray[np.float64]]:
    """The first of all eligible groups of a pool to arrive, and when."""
    best: list[Any] = []
    times = np.zeros(0)
    last = 0
    while True:
        statement = select_page_of_eligible(pool, eligible, last, PAGE)
        page = execute(connection, statement)
        best.extend(page)
        times = np.concatenate([times, _keys(order, page, pool)])
        kept = np.argsort(times, kind="stable")[:count]
        best, times = [best[i] for i in kept], times[kept]
        if len(page) < PAGE:
            return best, times
        last = page[-1].id
