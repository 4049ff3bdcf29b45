"""What a call asks to be drawn, from the arguments it was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement

from replaydb import checks
from replaydb.database import filters
from replaydb.database.repository.portions import Portion
from replaydb.errors import InvalidInputError
from replaydb.policies import Mix, SamplingPolicy, checked_policy

Conditions = Mapping[str, ColumnElement[bool]]


def describe(policy: SamplingPolicy) -> str:
    """A policy as the lineage names it."""
    if not isinstance(policy, Mix):
        return repr(policy)
    shares = ", ".join(f"{share.weight:g} {describe(share.policy)}" for share in policy.shares)
    return f"Mix({shares})"[:255]


def eligible(where: Any, max_staleness: Any, runs: str | Iterable[str] | None) -> Conditions:
    """Every filter of a call, by what it is to say of the groups that do not meet it."""
    conditions = {}
    if (names := checks.names("runs", runs)) is not None:
        conditions["of_other_runs"] = filters.of_runs(sorted(names))
    if max_staleness is not None:
        limit = checks.whole_number("max_staleness", max_staleness)
        conditions["too_stale"] = filters.at_most_stale(limit)
    if (condition := filters.checked(where)) is not None:
        conditions["filtered_out"] = condition
    return conditions


def portions(
    n: int | Mapping[str, int],
    policy: SamplingPolicy,
    tasks: str | Iterable[str] | None,
    conditions: Conditions,
) -> tuple[Portion, ...]:
    """The parts of a batch: one, one of each task, or the shares of a mix."""
    checked = checked_policy(policy)
    count, quotas = checks.quotas("n", n)
    names = checks.names("tasks", tasks)
    if quotas is not None and names is not None:
        raise InvalidInputError("tasks", "None where n names the tasks", repr(tasks))
    if isinstance(checked, Mix):
        if quotas is not None:
            raise InvalidInputError("n", "a number, which the Mix divides", repr(n))
        return tuple(_shares(checked, count, names, conditions))
    condition = filters.all_of(conditions.values())
    if quotas is None:
        return (Portion(checked, count, names, condition, None, conditions),)
    return tuple(
        Portion(checked, quota, frozenset((task_name,)), condition, task_name, conditions)
        for task_name, quota in quotas.items()
    )


def _shares(
    mix: Mix, count: int, names: frozenset[str] | None, conditions: Conditions
) -> Iterable[Portion]:
    for share, quota in zip(mix.shares, mix.quotas(count), strict=True):
        own = checks.names("tasks", share.tasks)
        if names is not None:
            own = names if own is None else own & names
        if quota:
            mine = dict(conditions)
            own_filter = filters.all_of([mine.get("filtered_out"), filters.checked(share.where)])
            if own_filter is not None:
                mine["filtered_out"] = own_filter
            condition = filters.all_of(mine.values())
            only = next(iter(own)) if own is not None and len(own) == 1 else None
            yield Portion(share.policy, quota, own, condition, only, mine)
