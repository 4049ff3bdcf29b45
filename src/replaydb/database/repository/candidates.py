"""Choosing among the rows that a draw has read: arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaydb.database.repository.portions import Drawn
from replaydb.database.repository.tasks import TaskAccount
from replaydb.database.statements.pools import Clock
from replaydb.episodes import GroupStatus
from replaydb.policies import Prioritized, SimplePolicy, Uniform


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one pool in the order of the policy; arrays are [rows].

    Attributes:
        account: Their task.
        status: Their status.
        ids: Group ids.
        staleness: Their staleness.
        keys: What the policy sorts by, the smallest first: `orders.sort_key`, or the time from the
            task's clock to arrival.
        weights: Sampling weights.
        eligible: False: to be passed over.
        walked: The clock whose stored arrivals the keys are: what is taken or passed needs new
            ones. None: the keys are of a column, or were made for this draw.
    """

    account: TaskAccount
    status: GroupStatus
    ids: NDArray[np.int64]
    staleness: Sequence[int | None]
    keys: NDArray[np.float64]
    weights: NDArray[np.float64]
    eligible: NDArray[np.bool_]
    walked: Clock | None

    @classmethod
    def of(
        cls,
        account: TaskAccount,
        status: GroupStatus,
        rows: Sequence[Any],
        keys: NDArray[np.float64],
        *,
        eligible: NDArray[np.bool_] | None = None,
        walked: Clock | None = None,
    ) -> Candidates:
        """From rows that were read."""
        return cls(
            account,
            status,
            np.array([row.id for row in rows], np.int64),
            [row.staleness for row in rows],
            keys,
            np.array([row.weight for row in rows], np.float64),
            np.ones(len(rows), np.bool_) if eligible is None else eligible,
            walked,
        )


def first(candidates: Sequence[Candidates], count: int, *, newest_first: bool) -> NDArray[np.int64]:
    """Positions, in all rows laid end to end, of the first eligible ones, in order."""
    eligible = np.flatnonzero(np.concatenate([part.eligible for part in candidates]))
    keys = np.concatenate([part.keys for part in candidates])[eligible]
    ids = np.concatenate([part.ids for part in candidates])[eligible]
    return eligible[np.lexsort((-ids if newest_first else ids, keys))][:count]


def elapsed_until(candidates: Iterable[Candidates], chosen: NDArray[np.int64]) -> float:
    """Time until the last of the arrivals chosen; groups of weight 0 never arrive."""
    keys = np.concatenate([part.keys for part in candidates])[chosen]
    finite = keys[np.isfinite(keys)]
    return float(finite.max(initial=0.0))


def odds(
    policy: SimplePolicy, accounts: Sequence[TaskAccount], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probabilities and importance weights of groups of these sampling weights."""
    ones = np.ones(len(weights))
    match policy:
        case Uniform():
            return ones / max(1, sum(account.num_available for account in accounts)), ones
        case Prioritized():
            total = sum(account.total_weight for account in accounts)
            drawable = weights > 0.0
            if not drawable.any():
                return np.zeros(len(weights)), ones
            smallest = weights[drawable].min()
            relative = np.where(drawable, weights / smallest, 1.0)
            probabilities = np.minimum(weights / max(total, smallest), 1.0)
            return probabilities, relative**-policy.beta
        case _:
            return ones, ones


def batch_of(
    policy: SimplePolicy,
    accounts: Sequence[TaskAccount],
    candidates: Sequence[Candidates],
    chosen: NDArray[np.int64],
) -> Drawn:
    """What was chosen, by positions in all rows laid end to end."""
    ids = np.concatenate([part.ids for part in candidates])[chosen].tolist()
    staleness = [value for part in candidates for value in part.staleness]
    weights = np.concatenate([part.weights for part in candidates])[chosen]
    return Drawn(ids, [staleness[i] for i in chosen], *odds(policy, accounts, weights))


def waits(account: TaskAccount, clock: Clock, rows: Sequence[Any]) -> NDArray[np.float64]:
    """From what the clock shows to the arrival of each row."""
    return np.array([row.key for row in rows], np.float64) - account.time(clock)


def rates(clock: Clock | None, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """At which rates groups of these weights arrive on a clock."""
    return weights if clock == "priority" else np.ones(len(weights))
