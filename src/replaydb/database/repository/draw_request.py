"""Request and result types of a draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement

from replaydb.database.statements.candidates import order_of
from replaydb.database.tables.records import Stored
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.policies import SimplePolicy


@dataclass(frozen=True, slots=True)
class Quota:
    """A part of a batch that is drawn on its own.

    Attributes:
        policy: Sampling strategy.
        count: Number of groups.
        tasks: Tasks to draw from; None: every task of the buffer.
        eligible: Only groups that meet this condition.
        task_name: The task that the quota is for, in errors.
        conditions: The conditions that `eligible` combines, by the name under which an error
            counts the groups that do not meet them.
        candidates: Ids of the groups that met `eligible` before the tasks were locked, by task; if
            the order is that of a column, of the first of them. None: unknown.
    """

    policy: SimplePolicy
    count: int
    tasks: frozenset[str] | None
    eligible: ColumnElement[bool] | None
    task_name: str | None = None
    conditions: Mapping[str, ColumnElement[bool]] = field(default_factory=dict)
    candidates: Mapping[str, Sequence[int]] | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether groups are taken in the order of a column, not at random."""
        return order_of(self.policy).clock is None


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Owner of the lease on the groups drawn, and its duration in seconds."""

    owner: str
    ttl: float


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """Arguments of a draw.

    Attributes:
        quotas: The parts of the batch, in order; no group is in two of them.
        policy: Name of the sampling strategy in the lineage.
        at_least: Minimum number of groups in total; with fewer, the draw fails.
        step: The trainer step that the batch is for.
        statuses: Statuses to draw from.
        lease: Terms of the lease on the groups; None: they are not leased.
        loads: Whether the groups are read, or only their rows.
        fields: Names of the extras to read; None: all.
        is_large: Whether they are too large to be read by the last statement of the transaction.
        is_evaluated: Whether filters were evaluated before the tasks were locked.
    """

    quotas: tuple[Quota, ...]
    policy: str
    at_least: int
    step: int | None = None
    statuses: tuple[GroupStatus, ...] = (GroupStatus.COMPLETED,)
    lease: LeaseTerms | None = None
    loads: bool = True
    fields: frozenset[str] | None = None
    is_large: bool = False
    is_evaluated: bool = False

    @property
    def has_ordered_filter(self) -> bool:
        """Whether some quota has a filter and takes groups in the order of a column."""
        return any(quota.eligible is not None and quota.is_ordered for quota in self.quotas)

    @property
    def count(self) -> int:
        """Total number of groups."""
        return sum(quota.count for quota in self.quotas)

    @property
    def may_suffice(self) -> bool:
        """Whether the candidates of its quotas, where they are known, are enough."""
        return self.at_least <= sum(
            quota.count
            if quota.candidates is None
            else min(quota.count, sum(map(len, quota.candidates.values())))
            for quota in self.quotas
        )

    def least(self, position: int, taken: int) -> int:
        """Return the minimum number of groups of a quota.

        Args:
            position: Its position among the quotas.
            taken: Groups drawn for the quotas before it. The later ones are assumed to be filled.
        """
        return self.at_least - taken - sum(later.count for later in self.quotas[position + 1 :])

    @property
    def tasks(self) -> frozenset[str] | None:
        """All tasks that the quotas draw from; None: every task of the buffer."""
        named: set[str] = set()
        for quota in self.quotas:
            if quota.tasks is None:
                return None
            named |= quota.tasks
        return frozenset(named)


@dataclass(frozen=True)
class Contents:
    """What a draw reads of its groups.

    Attributes:
        read: Returns it. On PostgreSQL the last statement of the transaction reads it.
        in_snapshot: Whether the payloads are read in a snapshot, on another connection.
        num_bytes: Total size of the payloads.
        with_text: Ids of the groups that have text.
    """

    read: Callable[[], Stored]
    in_snapshot: bool = False
    num_bytes: int = 0
    with_text: Sequence[int] = ()

    @cached_property
    def stored(self) -> Stored:
        """The rows of the groups after the draw, in any order, with payloads and transcripts.

        Without these two if they are read in a snapshot, or the request does not load them.
        Available once the transaction has ended.
        """
        return self.read()


@dataclass(frozen=True, slots=True)
class Drawn:
    """Result of a draw: groups in the order in which they were drawn.

    Attributes:
        ids: Their ids [n].
        task_names: Their tasks [n].
        staleness: Their staleness [n]; None if unknown.
        times_replaced: How often each has been replaced [n].
        probabilities: Probability of each group to be the next one drawn, float64 [n]; 1 if the
            sampling strategy is deterministic.
        weights: Importance weights, float64 [n]; the largest of each quota is 1.
        contents: What was read of the groups.
        draw_id: Id of the record of the draw, if it is recorded.
        lease_id: Id of the lease on the groups, if they are leased.
    """

    ids: list[int]
    task_names: list[str]
    staleness: list[int | None]
    times_replaced: list[int]
    probabilities: NDArray[np.float64]
    weights: NDArray[np.float64]
    contents: Contents = Contents(partial(Stored, ()))
    draw_id: int | None = None
    lease_id: int | None = None

    @classmethod
    def concatenate(cls, parts: Sequence[Drawn]) -> Drawn:
        """Combine the groups of several quotas into one batch."""
        return cls(
            [group_id for part in parts for group_id in part.ids],
            [name for part in parts for name in part.task_names],
            [staleness for part in parts for staleness in part.staleness],
            [times for part in parts for times in part.times_replaced],
            np.concatenate([part.probabilities for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )

    @classmethod
    def empty(cls) -> Drawn:
        """Return a result without groups."""
        return cls([], [], [], [], np.zeros(0), np.zeros(0))

    @property
    def num_tokens(self) -> dict[int, int]:
        """Number of tokens of each group, by id, in the order of the draw."""
        found = {row["id"]: row["num_tokens"] for row in self.contents.stored.groups}
        return {one: found[one] for one in self.ids}
