"""Recomputation of task counters from the stored groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from replaydb.database.prepared import execute
from replaydb.database.repository import buffers, tasks
from replaydb.database.repository.tasks import TaskState
from replaydb.database.statements.recount import recount_tasks
from replaydb.database.statements.task import lock_buffer_and_tasks

#: Columns of a task that can be computed from its groups.
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

#: Wrong counters of a task, by column: the stored value and the right one.
Wrong = dict[str, tuple[Any, Any]]


def wrong_counters(connection: Connection, buffer_id: int) -> dict[str, Wrong]:
    """Return the wrong counters of each task. The connection must be a snapshot."""
    task_states = tasks.read(connection, buffer_id)
    return {name: wrong for name, (_, wrong) in _wrong(connection, buffer_id, task_states).items()}


def repair_counters(connection: Connection, buffer_id: int, buffer_name: str) -> int:
    """Correct the counters of tasks, with the buffer and its tasks locked.

    Returns:
        The number of tasks that had wrong counters.
    """
    found, task_states = tasks.lock(connection, lock_buffer_and_tasks(buffer_id, False, False))
    buffers.checked(found, buffer_name)
    wrong = _wrong(connection, buffer_id, task_states)
    tasks.save(connection, [task for task, _ in wrong.values()])
    return len(wrong)


def _wrong(
    connection: Connection, buffer_id: int, task_states: Mapping[str, TaskState]
) -> dict[str, tuple[TaskState, Wrong]]:
    """Return the tasks with wrong counters: their corrected states, and the differences."""
    counted = {
        row.task_name: row._asdict() for row in execute(connection, recount_tasks(buffer_id))
    }
    found = {}
    for name, task in task_states.items():
        right = {each: counted.get(name, _NOTHING)[each] for each in COUNTED}
        pairs = {each: (getattr(task, each), right[each]) for each in COUNTED}
        if wrong := {each: pair for each, pair in pairs.items() if not _agree(*pair)}:
            found[name] = (replace(task, **right, weight_error=_error_of(right)), wrong)
    return found


def _error_of(counted: Mapping[str, Any]) -> float:
    """Return a bound of the rounding error of a sum of weights."""
    return float(counted["num_available"] * math.ulp(counted["total_weight"]))


def _agree(stored: Any, found: Any) -> bool:
    """Compare counters. Sums of weights may differ by the rounding of earlier additions."""
    return math.isclose(stored, found, rel_tol=1e-9, abs_tol=1e-9)
