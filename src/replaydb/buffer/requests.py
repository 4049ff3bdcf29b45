"""What a call asks to be drawn, from the arguments it was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement

from replaydb import arguments
from replaydb.database import filters
from replaydb.database.repository.requests import Portion
from replaydb.errors import InvalidInputError
from replaydb.policies import Mix, SamplingPolicy, checked_policy


def describe(policy: SamplingPolicy) -> str:
    """A policy as the lineage names it."""
    if not isinstance(policy, Mix):
        return repr(policy)
    shares = ", ".join(f"{share.weight:g} {describe(share.policy)}" for share in policy.shares)
    return f"Mix({shares})"[:255]


def eligible(
    where: Any, max_staleness: Any, runs: str | Iterable[str] | None
) -> ColumnElement[bool] | None:
    """Every filter of a call as one condition."""
    conditions = [filters.checked(where)]
    if max_staleness is not None:
        limit = arguments.whole_number("max_staleness", max_staleness)
        conditions.append(filters.at_most_stale(limit))
    if (names := arguments.names("runs", runs)) is not None:
        conditions.append(filters.of_runs(sorted(names)))
    return filters.all_of(conditions)


def portions(
    n: int | Mapping[str, int],
    policy: SamplingPolicy,
    tasks: str | Iterable[str] | None,
    eligible: ColumnElement[bool] | None,
) -> tuple[Portion, ...]:
    """The parts of a batch: one, one of each task, or the shares of a mix."""
    checked = checked_policy(policy)
    count, quotas = arguments.quotas(n)
    names = arguments.names("tasks", tasks)
    if quotas is not None and names is not None:
        raise InvalidInputError("tasks", "None where n names the tasks", repr(tasks))
    if isinstance(checked, Mix):
        if quotas is not None:
            raise InvalidInputError("n", "a number, which the Mix divides", repr(n))
        return tuple(_shares(checked, count, names, eligible))
    if quotas is None:
        return (Portion(checked, count, names, eligible),)
    return tuple(
        Portion(checked, quota, frozenset((task_name,)), eligible, task_name)
        for task_name, quota in quotas.items()
    )


def _shares(
    mix: Mix, count: int, names: frozenset[str] | None, eligible: ColumnElement[bool] | None
) -> Iterable[Portion]:
    for share, quota in zip(mix.shares, mix.quotas(count), strict=True):
        own = arguments.names("tasks", share.tasks)
        if names is not None:
            own = names if own is None else own & names
        if quota:
            condition = filters.all_of([eligible, filters.checked(share.where)])
            only = next(iter(own)) if own is not None and len(own) == 1 else None
            yield Portion(share.policy, quota, own, condition, only)
