"""Selection among the candidate rows of a draw: arithmetic only, no SQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replaydb.database.repository.draw_request import Drawn
from replaydb.database.repository.tasks import TaskState
from replaydb.database.statements.candidates import Clock
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.policies import Prioritized, SimplePolicy, Uniform


@dataclass(frozen=True, slots=True)
class Candidates:
    """Rows of one partition in the order of the sampling strategy; arrays are [rows].

    Attributes:
        task: Their task.
        status: Their status.
        ids: Group ids.
        staleness: Their staleness.
        keys: Sort keys, smallest first: `ordered_reads.sort_key`, or the exponential key minus the
            task's clock.
        weights: Sampling weights.
        num_bytes: Sizes of their payloads.
        times_replaced: How often each has been replaced.
        has_transcript: Whether each has text.
        eligible: False: the group is passed over.
        clock: The clock whose stored keys were read: groups that are taken or passed over need new
            ones. None: the keys are of a column, or were generated for this draw.
    """

    task: TaskState
    status: GroupStatus
    ids: NDArray[np.int64]
    staleness: Sequence[int | None]
    keys: NDArray[np.float64]
    weights: NDArray[np.float64]
    num_bytes: NDArray[np.int64]
    times_replaced: Sequence[int]
    has_transcript: NDArray[np.bool_]
    eligible: NDArray[np.bool_]
    clock: Clock | None

    @classmethod
    def of(
        cls,
        task: TaskState,
        status: GroupStatus,
        rows: Sequence[Any],
        keys: NDArray[np.float64],
        *,
        eligible: NDArray[np.bool_] | None = None,
        clock: Clock | None = None,
    ) -> Candidates:
        """Convert rows; by default all are eligible."""
        return cls(
            task,
            status,
            np.array([row.id for row in rows], np.int64),
            [row.staleness for row in rows],
            keys,
            np.array([row.weight for row in rows], np.float64),
            np.array([row.num_bytes for row in rows], np.int64),
            [row.times_replaced for row in rows],
            np.array([bool(row.has_transcript) for row in rows], np.bool_),
            np.ones(len(rows), np.bool_) if eligible is None else eligible,
            clock,
        )


def first(candidates: Sequence[Candidates], count: int, *, newest_first: bool) -> NDArray[np.int64]:
    """Return the positions of the first eligible rows, in order, among all rows concatenated."""
    eligible = np.flatnonzero(np.concatenate([part.eligible for part in candidates]))
    keys = np.concatenate([part.keys for part in candidates])[eligible]
    ids = np.concatenate([part.ids for part in candidates])[eligible]
    return eligible[np.lexsort((-ids if newest_first else ids, keys))][:count]


def num_eligible(candidates: Iterable[Candidates]) -> int:
    """Return the number of eligible rows."""
    return sum(int(part.eligible.sum()) for part in candidates)


def elapsed_until(candidates: Iterable[Candidates], chosen: NDArray[np.int64]) -> float:
    """Return the largest finite key of the rows chosen; keys of groups of weight 0 are infinite."""
    keys = np.concatenate([part.keys for part in candidates])[chosen]
    finite = keys[np.isfinite(keys)]
    return float(finite.max(initial=0.0))


def probabilities_and_weights(
    policy: SimplePolicy, task_states: Sequence[TaskState], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the probabilities and importance weights of groups of these sampling weights."""
    ones = np.ones(len(weights))
    match policy:
        case Uniform():
            return ones / max(1, sum(task.num_available for task in task_states)), ones
        case Prioritized():
            total = sum(task.total_weight for task in task_states)
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
    task_states: Sequence[TaskState],
    candidates: Sequence[Candidates],
    chosen: NDArray[np.int64],
) -> Drawn:
    """Return the rows chosen, given their positions among all rows concatenated."""
    ids = np.concatenate([part.ids for part in candidates])[chosen].tolist()
    task_names = [part.task.task_name for part in candidates for _ in part.ids]
    staleness = [value for part in candidates for value in part.staleness]
    times_replaced = [value for part in candidates for value in part.times_replaced]
    weights = np.concatenate([part.weights for part in candidates])[chosen]
    return Drawn(
        ids,
        [task_names[i] for i in chosen],
        [staleness[i] for i in chosen],
        [times_replaced[i] for i in chosen],
        *probabilities_and_weights(policy, task_states, weights),
    )


def remaining_times(task: TaskState, clock: Clock, rows: Sequence[Any]) -> NDArray[np.float64]:
    """Return the key of each row minus the value of the clock."""
    return np.array([row.key for row in rows], np.float64) - task.time(clock)


def rates(clock: Clock | None, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rates of the exponential keys of groups of these weights."""
    return weights if clock == "priority" else np.ones(len(weights))
