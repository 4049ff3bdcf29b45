"""Accounts of tasks against the groups that there are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from replaydb.database.prepared import execute
from replaydb.database.repository import buffers, tasks
from replaydb.database.repository.tasks import TaskAccount
from replaydb.database.statements.recount import count_anew

#: What of an account follows from the groups there are.
COUNTED = (
    "num_available",
    "total_weight",
    "num_pending",
    "num_leased",
    "stored_groups",
    "stored_tokens",
    "stored_bytes",
)

_NOTHING: Mapping[str, Any] = dict.fromkeys(COUNTED, 0) | {"total_weight": 0.0}

#: What an account says, and what there is, by the name of what differs.
Wrong = dict[str, tuple[Any, Any]]


def wrong_accounts(connection: Connection, buffer_id: int) -> dict[str, Wrong]:
    """Which accounts of tasks are wrong, in a snapshot."""
    accounts = tasks.read(connection, buffer_id)
    return {name: wrong for name, (_, wrong) in _wrong(connection, buffer_id, accounts).items()}


def repair_accounts(connection: Connection, buffer_id: int, buffer_name: str) -> int:
    """Correct wrong accounts, under the lock of the buffer and its tasks. Returns how many."""
    buffers.state(connection, buffer_id, buffer_name, lock=True)
    wrong = _wrong(connection, buffer_id, tasks.lock(connection, buffer_id))
    tasks.save(connection, [account for account, _ in wrong.values()])
    return len(wrong)


def _wrong(
    connection: Connection, buffer_id: int, accounts: Mapping[str, TaskAccount]
) -> dict[str, tuple[TaskAccount, Wrong]]:
    """Accounts that are wrong, as they should be, and what is wrong with them."""
    counted = {row.task_name: row._asdict() for row in execute(connection, count_anew(buffer_id))}
    found = {}
    for name, account in accounts.items():
        right = {each: counted.get(name, _NOTHING)[each] for each in COUNTED}
        pairs = {each: (getattr(account, each), right[each]) for each in COUNTED}
        if wrong := {each: pair for each, pair in pairs.items() if not _agree(*pair)}:
            found[name] = (replace(account, **right, weight_error=_error_of(right)), wrong)
    return found


def _error_of(counted: Mapping[str, Any]) -> float:
    """What rounding may have done to a sum of weights."""
    return float(counted["num_available"] * math.ulp(counted["total_weight"]))


def _agree(said: Any, found: Any) -> bool:
    """Sums of weights are rounded, in the order in which groups came and went."""
    return math.isclose(said, found, rel_tol=1e-9, abs_tol=1e-9)
