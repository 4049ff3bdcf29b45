"""Choosing groups as a draw does, without drawing them: nothing is locked or written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection

from replaydb.database.prepared import execute
from replaydb.database.repository import groups, orders, tasks
from replaydb.database.repository.arrivals import exponentials
from replaydb.database.repository.candidates import Candidates, batch_of, first, rates
from replaydb.database.repository.portions import Drawn, DrawRequest, Portion
from replaydb.database.repository.tasks import TaskAccount, waiting
from replaydb.database.statements.pools import Clock, Pool, order_of, select_page_of_eligible
from replaydb.database.statements.selections import selection
from replaydb.episodes import GroupStatus
from replaydb.errors import NotEnoughGroupsError

#: Groups whose arrivals are compared at once.
PAGE = 8192


def look(connection: Connection, buffer_id: int, request: DrawRequest) -> Drawn:
    """Groups that a draw might take now, of a snapshot.

    For random policies arrivals are made for this look alone. The stored ones say whom the next
    draw takes: whoever knew them, and changed groups accordingly, would bias that draw.

    Raises:
        NotEnoughGroupsError: There are fewer than wanted at least.
    """
    accounts = tasks.read(connection, buffer_id)
    parts: list[Drawn] = []
    for position, portion in enumerate(request.portions):
        seen = [group_id for part in parts for group_id in part.ids]
        parts.append(_portion(connection, buffer_id, accounts.values(), portion, seen))
        available, least = len(parts[-1].ids), request.least(position, len(seen))
        if available < least:
            raise NotEnoughGroupsError(least, available, portion.task_name, portion=portion)
    found = Drawn.together(parts)
    return replace(found, rows=groups.facts(connection, buffer_id, found.ids))


def _portion(
    connection: Connection,
    buffer_id: int,
    accounts: Iterable[TaskAccount],
    portion: Portion,
    seen: Sequence[int],
) -> Drawn:
    order = order_of(portion.policy)
    eligible = portion.eligible
    if seen:
        others = ~selection(buffer_id, ids=seen)
        eligible = others if eligible is None else eligible & others
    mine = [
        account
        for account in accounts
        if portion.tasks is None or account.task_name in portion.tasks
    ]
    candidates = []
    for account in mine:
        pool = Pool(buffer_id, account.task_name, GroupStatus.COMPLETED.value)
        if order.clock is None:
            rows = orders.first(connection, pool, order, portion.count, eligible)
            keys = np.array([orders.sort_key(order, row) for row in rows], np.float64)
        else:
            rows, keys = _arrivals(connection, pool, order.clock, portion.count, eligible)
        candidates.append(Candidates.of(account, GroupStatus.COMPLETED, rows, keys))
    if not any(len(part.ids) for part in candidates):
        return Drawn.nothing()
    chosen = first(candidates, portion.count, newest_first=order.newest_first)
    return batch_of(portion.policy, mine, candidates, chosen)


def _arrivals(
    connection: Connection,
    pool: Pool,
    clock: Clock,
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
        weights = np.array([row.weight for row in page], np.float64)
        variates, _ = exponentials(None, pool.task_name, 0, len(page))
        best.extend(page)
        times = np.concatenate([times, waiting(variates, rates(clock, weights))])
        kept = np.argsort(times, kind="stable")[:count]
        best, times = [best[i] for i in kept], times[kept]
        if len(page) < PAGE:
            return best, times
        last = page[-1].id
