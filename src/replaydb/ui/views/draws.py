"""Draws and the groups that they took, as several pages show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from replaydb.database.tables.views import TRAINED
from replaydb.domain.results import DrawInfo, DrawOutcome, GroupInfo


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A group of a draw.

    Attributes:
        draw_id: Id of the draw.
        group_id: Id of the group.
        probability: Probability with which the group was drawn.
        weight: Weight of the group in the batch.
        staleness: Staleness at the draw; None if unknown.
        outcome: Outcome; None if it was not recorded.
        reason: Reason of the outcome.
        outcome_at: Time of the outcome.
        task_name: Task of the group, as drawn; None if that is unknown. So are the following then.
        prompt_uid: Prompt of the group.
        reward_mean: Mean reward of the group.
        run_name: Run that put the group.
        min_policy_version: Oldest policy version in the group.
        is_stored: Whether there is a group of this id.
        change: "deleted" or "replaced" if it was since, else None.
    """

    draw_id: int
    group_id: int
    probability: float
    weight: float
    staleness: int | None
    outcome: DrawOutcome | None
    reason: str | None
    outcome_at: datetime | None
    task_name: str | None
    prompt_uid: str | None
    reward_mean: float | None
    run_name: str | None
    min_policy_version: int | None
    is_stored: bool
    change: str | None

    @property
    def trained(self) -> bool:
        """Whether its outcome counts as trained on."""
        return self.outcome in TRAINED

    @property
    def outcome_name(self) -> str:
        """Name of the outcome."""
        return "unknown" if self.outcome is None else self.outcome.value


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A row of a table of draws.

    Attributes:
        info: The record of the draw.
        staleness: Mean staleness at the draw; None if unknown.
        outcomes: Number of groups by outcome.
    """

    info: DrawInfo
    staleness: float | None
    outcomes: Mapping[str, int]


def draw_row(info: DrawInfo) -> DrawRow:
    """Return the row of a draw."""
    counts = Counter("unknown" if it is None else it.value for it in info.outcomes)
    return DrawRow(info, mean(info.staleness), dict(sorted(counts.items())))


def drawn_group(draw: DrawInfo, i: int, info: GroupInfo | None) -> DrawnGroup:
    """Return the group at position `i` of a draw.

    Args:
        draw: The draw.
        i: Position in the batch.
        info: The stored group of this id; None if there is none.
    """
    task_name, change = draw.task_names[i], None
    if info is None:
        change = "deleted" if task_name is None else "replaced"
    elif info.times_replaced != draw.times_replaced[i]:
        change = "replaced"
    return DrawnGroup(
        draw.id,
        draw.group_ids[i],
        draw.probabilities[i],
        draw.weights[i],
        draw.staleness[i],
        draw.outcomes[i],
        draw.outcome_reasons[i],
        draw.outcome_times[i],
        task_name,
        draw.prompt_uids[i],
        draw.reward_means[i],
        draw.group_run_names[i],
        draw.min_policy_versions[i],
        info is not None,
        change,
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
