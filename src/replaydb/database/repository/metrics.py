"""Metrics of a buffer for experiment loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from sqlalchemy import Connection

from replaydb.database.repository import buffers
from replaydb.database.runtime.protocol import Backend
from replaydb.database.runtime.reads import read_together
from replaydb.database.statements.buffer import select_buffer
from replaydb.database.statements.statistics import (
    EPOCH,
    STALENESS_BINS,
    select_task_counters,
    sum_by_status,
    sum_last_draws,
)
from replaydb.domain.episodes import GroupStatus

_Rows = Sequence[Mapping[str, Any]]

#: Statuses of groups that were generated but will not be trained on.
_DROPPED = (GroupStatus.EXPIRED, GroupStatus.FAILED, GroupStatus.FILTERED)


def collect(
    backend: Backend,
    connection: Connection,
    buffer_id: int,
    buffer_name: str,
    num_draws: int,
    *,
    sums: bool,
) -> dict[str, float]:
    """Return the metrics of a buffer by name; `docs/training.md` lists them.

    Args:
        backend: Backend of the database.
        connection: A snapshot.
        buffer_id: Id of the buffer.
        buffer_name: Name of the buffer.
        num_draws: Number of the last draws that count as recent.
        sums: Whether to include sums over all groups.

    Raises:
        UnknownBufferError: The buffer was deleted.
    """
    reads = [
        select_buffer(buffer_id),
        select_task_counters(buffer_id),
        sum_last_draws(buffer_id, num_draws),
    ]
    if sums:
        reads.append(sum_by_status(buffer_id, num_draws))
    found, counters, [last], *of_groups = read_together(connection, reads)
    state = buffers.checked(found, buffer_name)
    now = state.time(backend, connection)
    drawn = last._asdict()
    tasks = [row._asdict() | {"num_added": row.num_inserted - row.num_replaced} for row in counters]
    rows = [_aged(row._asdict(), now) for row in chain.from_iterable(of_groups)]
    numbers = {
        **(_generated(rows) | _stored(rows, tasks) if sums else {}),
        **_from_counters(tasks),
        "buffer/policy_version": state.policy_version,
        **_replayed(drawn, tasks),
        **_trained(drawn),
        **_cumulative(tasks),
    }
    return {name: float(number) for name, number in numbers.items() if number is not None}


def _aged(row: dict[str, Any], now: datetime) -> dict[str, Any]:
    """Return a row of `sum_by_status` with ages at a time."""
    elapsed = (now - EPOCH).total_seconds()
    ages = {"age_sum": row["age_sum"] + row["num_groups"] * elapsed}
    return row | ages | {"age_max": row["age_max"] + elapsed}


def _from_counters(tasks: _Rows) -> dict[str, Any]:
    return {
        "gen/groups": _sum(tasks, "num_added"),
        "gen/replaced": _sum(tasks, "num_replaced"),
        "buffer/groups": _sum(tasks, "num_groups"),
        "buffer/tokens": _sum(tasks, "num_tokens"),
        "buffer/bytes": _sum(tasks, "num_bytes"),
        "buffer/starved_tasks": sum(1 for task in tasks if not task["num_available"]),
    }


def _generated(rows: _Rows) -> dict[str, Any]:
    rewarded = _sum(rows, "num_new_rewarded")
    return {
        "gen/recent_groups": _sum(rows, "num_new"),
        "gen/reward_mean": _ratio(_sum(rows, "new_reward_sum"), rewarded),
        "gen/reward_std": _ratio(_sum(rows, "new_reward_std_sum"), rewarded),
        "gen/uninformative": _ratio(_sum(rows, "num_new_even"), rewarded),
    }


def _stored(rows: _Rows, tasks: _Rows) -> dict[str, Any]:
    unarchived = [row for row in rows if row["group_status"] != GroupStatus.ARCHIVED]
    completed = [row for row in rows if row["group_status"] == GroupStatus.COMPLETED]
    dropped = [row for row in rows if row["group_status"] in _DROPPED]
    total = _sum(rows, "num_groups")
    numbers = {
        "buffer/episodes": _sum(unarchived, "num_episodes"),
        "buffer/dropped": _sum(dropped, "num_groups"),
        "buffer/deleted": max(0, _sum(tasks, "num_added") - total),
        "buffer/unsampled": _sum(completed, "num_unsampled"),
        "buffer/age_mean": _ratio(_sum(completed, "age_sum"), _sum(completed, "num_groups")),
        "buffer/age_max": _max(completed, "age_max"),
        "buffer/wait_mean": _ratio(_sum(rows, "wait_sum"), _sum(rows, "num_waited")),
        "buffer/wait_max": _max(rows, "wait_max"),
        "buffer/reward_mean": _ratio(
            _sum(completed, "reward_sum"), _sum(completed, "num_rewarded")
        ),
        "buffer/staleness_mean": _ratio(
            _sum(completed, "staleness_sum"), _sum(completed, "num_known_staleness")
        ),
        "buffer/staleness_max": _max(completed, "staleness_max"),
    }
    for name, *_ in STALENESS_BINS:
        numbers[f"buffer/staleness/{name}"] = _sum(completed, f"staleness_{name}")
    for status in GroupStatus:
        mine = [row for row in rows if row["group_status"] == status]
        numbers[f"buffer/status/{status.value}"] = _sum(mine, "num_groups")
    for row in rows:
        numbers[f"buffer/task/{row['task_name']}/{row['group_status']}"] = row["num_groups"]
    return numbers


def _replayed(drawn: Mapping[str, Any], tasks: _Rows) -> dict[str, Any]:
    return {
        "replay/groups": drawn["num_replayed"],
        "replay/deleted": drawn["num_replayed_deleted"],
        "replay/share": _ratio(drawn["num_replayed"], drawn["num_groups"]),
        "replay/samples_per_insert": _ratio(_sum(tasks, "num_sampled"), _sum(tasks, "num_added")),
        "replay/reward_mean": drawn["replayed_reward_mean"],
        "replay/staleness_mean": drawn["replayed_staleness_mean"],
    }


def _trained(drawn: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {
        "train/draws": drawn["num_draws"],
        "train/groups": drawn["num_groups"],
        "train/deleted": drawn["num_deleted"],
        "train/tokens": drawn["num_tokens"] or 0,
        "train/unique": _ratio(drawn["num_distinct"], drawn["num_groups"]),
        "train/reward_mean": drawn["reward_mean"],
        "train/reward_std": drawn["reward_std"],
        "train/staleness_mean": drawn["staleness_mean"],
        "train/staleness_max": drawn["staleness_max"],
    }
    for name, *_ in STALENESS_BINS:
        numbers[f"train/staleness/{name}"] = drawn[f"staleness_{name}"]
    return numbers


def _cumulative(tasks: _Rows) -> dict[str, Any]:
    """Return the counters that never decrease, in total and by task."""
    numbers = {"train/drawn": _sum(tasks, "num_sampled")}
    for task in tasks:
        numbers[f"gen/task/{task['task_name']}"] = task["num_added"]
        numbers[f"train/task/{task['task_name']}"] = task["num_sampled"]
    return numbers


def _sum(rows: _Rows, name: str) -> Any:
    return sum(row[name] or 0 for row in rows)


def _max(rows: _Rows, name: str) -> Any:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def _ratio(total: Any, count: Any) -> float | None:
    return float(total) / float(count) if count else None
