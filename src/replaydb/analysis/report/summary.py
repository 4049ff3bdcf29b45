"""What a report says, in numbers: sums over all groups and draws, read a page at a time."""

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
from replaydb.database.group_columns import col
from replaydb.database.views import TRAINED
from replaydb.errors import CorruptPayloadError, PayloadGoneError
from replaydb.results import GroupInfo

#: Points of a line, bars of a histogram.
MOST_BINS = 256

#: Groups that are shown as the best, and as the worst.
SHOWN_GROUPS = 5

#: Signs of a text that are shown.
SHOWN_SIGNS = 4000


class Bins:
    """Counts and sums by a whole number, in bins that double as there come to be too many.

    Attributes:
        width: Of a bin.
        counts: By the first number of a bin.
        sums: So too.
    """

    def __init__(self) -> None:
        self.width = 1
        self.counts: Counter[int] = Counter()
        self.sums: Counter[int] = Counter()

    def add(self, number: int, count: int, total: Any = 0) -> None:
        """Count something, and add to a sum."""
        start = number - number % self.width
        self.counts[start] += count
        self.sums[start] += total
        while len(self.counts) > MOST_BINS:
            self.width *= 2
            self.counts, self.sums = self._wider(self.counts), self._wider(self.sums)

    def means(self) -> dict[int, float]:
        """Mean of each bin, in order."""
        return {start: self.sums[start] / count for start, count in self.items()}

    def items(self) -> list[tuple[int, int]]:
        """Counts of the bins, in order."""
        return sorted(self.counts.items())

    def padded(self) -> dict[int, int]:
        """Counts of the bins in order, and of the empty ones beside them."""
        beside = {start + side for start in self.counts for side in (-self.width, self.width)}
        return {start: self.counts[start] for start in sorted({*self.counts, *beside})}

    def total(self) -> int:
        """All that was counted."""
        return self.counts.total()

    def _wider(self, numbers: Counter[int]) -> Counter[int]:
        wider: Counter[int] = Counter()
        for start, number in numbers.items():
            wider[start - start % self.width] += number
        return wider


@dataclass(slots=True)
class TaskSummary:
    """The groups of a task.

    Attributes:
        groups: How many.
        tokens: Their tokens.
        statuses: How many of each status.
        rewarded: How many have a reward.
        reward: Sum of their mean rewards.
        informative: How many have rewards that differ.
        uses: Sum of the draws that took them.
        unused: How many no draw has taken.
        trained: Draws of its groups that were trained on.
        rewards: Mean rewards by the oldest policy version.
    """

    groups: int = 0
    tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    rewarded: int = 0
    reward: float = 0.0
    informative: int = 0
    uses: int = 0
    unused: int = 0
    trained: int = 0
    rewards: Bins = field(default_factory=Bins)


@dataclass(frozen=True, slots=True)
class Sample:
    """A group, and the text of its best or its worst episode, if there is one."""

    group: GroupInfo
    reward: float | None
    text: str | None


@dataclass(slots=True)
class Summary:
    """A buffer in numbers.

    Attributes:
        buffer: Its name.
        policy_version: Its policy version.
        at: When it was read.
        tasks: By name. Draws of groups that are gone have no task.
        put: Groups put, by second.
        trained: Draws of groups that were trained on, by second.
        aged: Those of them whose staleness is known, by second, and the sum of it.
        staleness: Draws of groups that were trained on, by staleness, where that is known.
        uses: Groups by the draws that took them.
        priorities: Groups by ten times the decimal logarithm of their priority, rounded down;
            None: those of priority 0.
        best: Groups of the highest rewards.
        worst: Groups of the lowest rewards.
    """

    buffer: str
    policy_version: int
    at: datetime
    tasks: dict[str, TaskSummary] = field(default_factory=dict)
    put: Bins = field(default_factory=Bins)
    trained: Bins = field(default_factory=Bins)
    aged: Bins = field(default_factory=Bins)
    staleness: Bins = field(default_factory=Bins)
    uses: Bins = field(default_factory=Bins)
    priorities: Counter[int | None] = field(default_factory=Counter)
    best: list[Sample] = field(default_factory=list)
    worst: list[Sample] = field(default_factory=list)

    def task(self, name: str) -> TaskSummary:
        """What there is of a task, made when it is new."""
        return self.tasks.setdefault(name, TaskSummary())


def summary_of(
    url: str | URL, buffer: str, progress: Callable[[int], object] | None = None
) -> Summary:
    """A buffer in numbers; see `write_report`."""
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
    rows = rows.append_column("informative", pc.greater(rows["reward_std"], 0))
    rows = rows.append_column("unused", pc.equal(rows["times_sampled"], 0))
    sums = [(name, "sum") for name in ("num_tokens", "reward_mean", "informative")]
    sums += [(name, "sum") for name in ("times_sampled", "unused")]
    for row in _summed(rows, ["task_name", "group_status"], [*sums, ("reward_mean", "count")]):
        task = found.task(row["task_name"])
        task.groups += row["count_all"]
        task.tokens += row["num_tokens_sum"]
        task.statuses[row["group_status"]] += row["count_all"]
        task.rewarded += row["reward_mean_count"]
        task.reward += row["reward_mean_sum"] or 0.0
        task.informative += row["informative_sum"] or 0
        task.uses += row["times_sampled_sum"]
        task.unused += row["unused_sum"]
    known = rows.filter(
        pc.and_(pc.is_valid(rows["reward_mean"]), pc.is_valid(rows["min_policy_version"]))
    )
    for row in _summed(known, ["task_name", "min_policy_version"], [("reward_mean", "sum")]):
        rewards = found.task(row["task_name"]).rewards
        rewards.add(row["min_policy_version"], row["count_all"], row["reward_mean_sum"])
    for row in _summed(rows, ["second"]):
        found.put.add(row["second"], row["count_all"])
    for row in _summed(rows, ["times_sampled"]):
        found.uses.add(row["times_sampled"], row["count_all"])
    for row in _summed(rows, ["priority"]):
        priority = row["priority"]
        place = math.floor(round(10 * math.log10(priority), 9)) if priority > 0 else None
        found.priorities[place] += row["count_all"]


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
    """Groups of rows, with how many they are and some sums."""
    yield from rows.group_by(by).aggregate([([], "count_all"), *(sums or [])]).to_pylist()


def _seconds(times: Any) -> Any:
    """Since 1970."""
    return pc.divide(pc.cast(times, pa.int64()), 1_000_000)


def _samples(buffer: blocking.Buffer, *, best: bool) -> list[Sample]:
    """Groups of the highest, or of the lowest rewards."""
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
    if text is not None and len(text) > SHOWN_SIGNS:
        text = f"{text[:SHOWN_SIGNS]} ..."
    return Sample(info, one.reward, text)
