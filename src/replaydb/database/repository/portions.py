"""What is asked of a draw, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement

from replaydb.database.records import Facts, Stored
from replaydb.episodes import GroupStatus
from replaydb.policies import SimplePolicy


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a batch.

    Attributes:
        policy: How it is drawn.
        count: Groups of it.
        tasks: Tasks to draw from; None: every task of the buffer.
        eligible: Only groups that meet this.
        task_name: The task it is a quota of, for errors.
        conditions: What `eligible` is made of, for errors: each by what it is to say of groups.
    """

    policy: SimplePolicy
    count: int
    tasks: frozenset[str] | None
    eligible: ColumnElement[bool] | None
    task_name: str | None = None
    conditions: Mapping[str, ColumnElement[bool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Who wants to hold what is drawn, and for how many seconds."""

    owner: str
    ttl: float


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """What to draw.

    Attributes:
        portions: The parts of the batch, in order; no group is in two of them.
        policy: How the draw is named in the lineage.
        at_least: Groups in all without which there is no draw.
        step: The trainer step it is for.
        statuses: Statuses to draw from.
        lease: Hold the groups exclusively.
    """

    portions: tuple[Portion, ...]
    policy: str
    at_least: int
    step: int | None = None
    statuses: tuple[GroupStatus, ...] = (GroupStatus.COMPLETED,)
    lease: LeaseTerms | None = None

    @property
    def is_claim(self) -> bool:
        """Whether it takes groups to work on, which still arrive: that is no draw."""
        return self.statuses == (GroupStatus.PENDING,)

    @property
    def count(self) -> int:
        """Groups in all."""
        return sum(portion.count for portion in self.portions)

    def least(self, position: int, taken: int) -> int:
        """What a portion must give, when those before it gave so many and later ones give all."""
        return self.at_least - taken - sum(later.count for later in self.portions[position + 1 :])

    @property
    def tasks(self) -> frozenset[str] | None:
        """Every task that any portion draws from; None: all of the buffer."""
        named: set[str] = set()
        for portion in self.portions:
            if portion.tasks is None:
                return None
            named |= portion.tasks
        return frozenset(named)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Groups taken, in the order of the draw.

    Attributes:
        ids: Their ids [n].
        staleness: Their staleness [n]; None where it is unknown.
        probabilities: Chance of each to be the next one drawn, float64 [n]; 1 where the policy
            leaves nothing to chance.
        weights: Importance weights, float64 [n], the largest of each portion being 1.
        rows: The groups as the draw leaves them, in any order.
        stored: Everything stored of them, if the draw was to read that.
        draw_id: Where the draw is recorded, if it is.
        lease_id: The lease that holds the groups, if one was asked for.
    """

    ids: list[int]
    staleness: list[int | None]
    probabilities: NDArray[np.float64]
    weights: NDArray[np.float64]
    rows: Sequence[Facts] = ()
    stored: Stored | None = None
    draw_id: int | None = None
    lease_id: int | None = None

    @classmethod
    def together(cls, parts: Sequence[Drawn]) -> Drawn:
        """Portions as one batch."""
        return cls(
            [group_id for part in parts for group_id in part.ids],
            [staleness for part in parts for staleness in part.staleness],
            np.concatenate([part.probabilities for part in parts]),
            np.concatenate([part.weights for part in parts]),
        )

    @classmethod
    def nothing(cls) -> Drawn:
        """A portion of which there is none."""
        return cls([], [], np.zeros(0), np.zeros(0))

    @property
    def num_bytes(self) -> int:
        """Size of their payloads."""
        return sum(row["num_bytes"] for row in self.rows)
