"""Statistics of a report: sums over all groups and draws, read page by page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import URL

from replaydb import blocking
from replaydb.analysis import draws, groups
from replaydb.database.filters.group_columns import col
from replaydb.database.tables.views import TRAINED
from replaydb.domain.results import GroupInfo
from replaydb.errors import CorruptPayloadError, PayloadGoneError

#: Maximum number of points of a line or bars of a histogram.
MOST_BINS = 256

#: Number of best and of worst groups that are shown.
SHOWN_GROUPS = 5

#: Maximum number of characters of a text that are shown.
SHOWN_CHARACTERS = 4000


class Bins:
    """Counts and sums by integer, in bins whose width doubles when there are too many.

    Attributes:
        width: Width of a bin.
        counts: Counts by the first integer of a bin.
        sums: Sums by the first integer of a bin.
    """

    def __init__(self) -> None:
        self.width = 1
        self.counts: Counter[int] = Counter()
        self.sums: Counter[int] = Counter()

    def add(self, number: int, count: int, total: Any = 0) -> None:
        """Add to the count and the sum of the bin of `number`."""
        start = number - number % self.width
        self.counts[start] += count
        self.sums[start] += total
        while len(self.counts) > MOST_BINS:
            self.width *= 2
            self.counts, self.sums = self._wider(self.counts), self._wider(self.sums)

    def means(self) -> dict[int, float]:
        """Return the mean of each bin, in order."""
        return {start: self.sums[start] / count for start, count in self.items()}

    def items(self) -> list[tuple[int, int]]:
        """Return the count of each bin, in order."""
        return sorted(self.counts.items())

    def padded(self) -> dict[int, int]:
        """Return the count of each bin and of adjacent empty bins, in order."""
        beside = {start + side for start in self.counts for side in (-self.width, self.width)}
        return {start: self.counts[start] for start in sorted({*self.counts, *beside})}

    def total(self) -> int:
        """Return the sum of all counts."""
        return self.counts.total()

    def _wider(self, numbers: Counter[int]) -> Counter[int]:
        wider: Counter[int] = Counter()
        for start, number in numbers.items():
            wider[start - start % self.width] += number
        return wider


@dataclass(slots=True)
class TaskSummary:
    """Statistics of a task.

    Attributes:
        groups: Number of groups.
        tokens: Number of tokens.
        statuses: Number of groups by status.
        rewarded: Number of groups with a reward.
        reward: Sum of the mean rewards of groups.
        varied: Number of groups whose rewards have a variance above 0.
        draws: Number of times that groups were drawn.
        undrawn: Number of groups that were never drawn.
        trained: Number of times that groups were trained on.
        rewards: Mean rewards of groups by their oldest policy version.
    """

    groups: int = 0
    tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    rewarded: int = 0
    reward: float = 0.0
    varied: int = 0
    draws: int = 0
    undrawn: int = 0
    trained: int = 0
    rewards: Bins = field(default_factory=Bins)


@dataclass(frozen=True, slots=True)
class Sample:
    """A group with the reward and text of its best or worst episode; None if unavailable."""

    group: GroupInfo
    reward: float | None
    text: str | None


@dataclass(slots=True)
class Summary:
    """Statistics of a buffer.

    Attributes:
        buffer: Name of the buffer.
        policy_version: Policy version of the buffer.
        at: Time of the report.
        tasks: Statistics by task. Draws of deleted groups have no task.
        put: Number of groups put, by second.
        trained: Number of groups trained on, by second of the draw.
        aged: Number and total staleness of groups trained on with known staleness, by second.
        staleness: Number of groups trained on, by staleness, if it is known.
        draws: Number of groups, by how often they were drawn.
        priorities: Number of groups by ten times the decimal logarithm of their priority, rounded
            down; None for priority 0.
        best: Groups with the highest rewards.
        worst: Groups with the lowest rewards.
    """

    buffer: str
    policy_version: int
    at: datetime
    tasks: dict[str, TaskSummary] = field(default_factory=dict)
    put: Bins = field(default_factory=Bins)
    trained: Bins = field(default_factory=Bins)
    aged: Bins = field(default_factory=Bins)
    staleness: Bins = field(default_factory=Bins)
    draws: Bins = field(default_factory=Bins)
    priorities: Counter[int | None] = field(default_factory=Counter)
    best: list[Sample] = field(default_factory=list)
    worst: list[Sample] = field(default_factory=list)

    def task(self, name: str) -> TaskSummary:
        """Return the statistics of a task, created on first use."""
        return self.tasks.setdefault(name, TaskSummary())


def summary_of(
    url: str | URL, buffer: str, progress: Callable[[int], object] | None = None
) -> Summary:
    """Compute the statistics of a buffer; see `write_report`."""
    with blocking.Store.open(url, read_only=True) as store:
        opened = store.buffer(buffer, create=False)
        found = Summary(buffer, opened.stats().policy_version, datetime.now(UTC))
        found.best = _samples(opened, best=True)
        found.worst = _samples(opened, best=False)
    num_rows = 0
    for rows, add in (
        (groups(url, buffer=buffer), _add_groups),
        (draws(url, buffer=buffer), _add_draws),
    ):
        for batch in rows.reader():
            add(found, pa.Table.from_batches([batch]))
            num_rows += batch.num_rows
            if progress is not None:
                progress(num_rows)
    return found


def _add_groups(found: Summary, rows: pa.Table) -> None:
    rows = rows.append_column("second", _seconds(rows["created_at"]))
    rows = rows.append_column("varied", pc.greater(rows["reward_std"], 0))
    rows = rows.append_column("undrawn", pc.equal(rows["times_sampled"], 0))
    sums = [(name, "sum") for name in ("num_tokens", "reward_mean", "varied")]
    sums += [(name, "sum") for name in ("times_sampled", "undrawn")]
    for row in _summed(rows, ["task_name", "group_status"], [*sums, ("reward_mean", "count")]):
        task = found.task(row["task_name"])
        task.groups += row["count_all"]
        task.tokens += row["num_tokens_sum"]
        task.statuses[row["group_status"]] += row["count_all"]
        task.rewarded += row["reward_mean_count"]
        task.reward += row["reward_mean_sum"] or 0.0
        task.varied += row["varied_sum"] or 0
        task.draws += row["times_sampled_sum"]
        task.undrawn += row["undrawn_sum"]
    known = rows.filter(
        pc.and_(pc.is_valid(rows["reward_mean"]), pc.is_valid(rows["min_policy_version"]))
    )
    for row in _summed(known, ["task_name", "min_policy_version"], [("reward_mean", "sum")]):
        rewards = found.task(row["task_name"]).rewards
        rewards.add(row["min_policy_version"], row["count_all"], row["reward_mean_sum"])
    for row in _summed(rows, ["second"]):
        found.put.add(row["second"], row["count_all"])
    for row in _summed(rows, ["times_sampled"]):
        found.draws.add(row["times_sampled"], row["count_all"])
    for row in _summed(rows, ["priority"]):
        priority = row["priority"]
        start = math.floor(round(10 * math.log10(priority), 9)) if priority > 0 else None
        found.priorities[start] += row["count_all"]


def _add_draws(found: Summary, rows: pa.Table) -> None:
    used = pc.is_in(rows["outcome"], pa.array([outcome.value for outcome in TRAINED]))
    rows = rows.filter(used)
    rows = rows.append_column("second", _seconds(rows["drawn_at"]))
    for row in _summed(rows, ["second"]):
        found.trained.add(row["second"], row["count_all"])
    for row in _summed(rows, ["task_name"]):
        if row["task_name"] is not None:
            found.task(row["task_name"]).trained += row["count_all"]
    known = rows.filter(pc.is_valid(rows["staleness"]))
    for row in _summed(known, ["second"], [("staleness", "sum")]):
        found.aged.add(row["second"], row["count_all"], row["staleness_sum"])
    for row in _summed(known, ["staleness"]):
        found.staleness.add(row["staleness"], row["count_all"])


def _summed(
    rows: pa.Table, by: list[str], sums: list[tuple[str, str]] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield counts and sums of rows, grouped by columns."""
    yield from rows.group_by(by).aggregate([([], "count_all"), *(sums or [])]).to_pylist()


def _seconds(times: Any) -> Any:
    """Return seconds since 1970."""
    return pc.divide(pc.cast(times, pa.int64()), 1_000_000)


def _samples(buffer: blocking.Buffer, *, best: bool) -> list[Sample]:
    """Return the groups with the highest or lowest mean rewards."""
    order = col.reward_mean.desc() if best else col.reward_mean
    found = buffer.find(where=col.reward_mean.is_not(None), order_by=order, limit=SHOWN_GROUPS)
    return [_sample(buffer, info, best=best) for info in found]


def _sample(buffer: blocking.Buffer, info: GroupInfo, *, best: bool) -> Sample:
    try:
        [group] = buffer.get([info.id])
    except (CorruptPayloadError, PayloadGoneError):
        return Sample(info, None, None)
    rewarded = [one for one in group.episodes if one.reward is not None]
    one = (max if best else min)(rewarded, key=lambda one: one.reward or 0.0)
    text = one.text
    if text is not None and len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]} ..."
    return Sample(info, one.reward, text)
