"""Statistics of a sample of groups for the overview. Their cost is independent of buffer size."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from statistics import fmean, pvariance

from replaydb.buffer import Buffer
from replaydb.database.filters.group_columns import col
from replaydb.database.statements.statistics import STALENESS_BINS
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import GroupInfo
from replaydb.ui.charts import Chart, axis, label
from replaydb.ui.readable import find

#: Groups of a sample, spread evenly over the ids, and ids that are looked up for it: many ids may
#: belong to groups of other buffers.
SAMPLED, TRIED = 1000, 10_000
#: Number of recent groups.
NEWEST = 100
#: Maximum number of points of a line, and of lines of a chart.
MAX_POINTS, MAX_LINES = 50, 6
#: Minimum number of groups in a fifth to estimate the noise of its mean.
MIN_FIFTH = 4
#: Maximum number of versions that each get a tick.
MAX_TICKS = 12


@dataclass(frozen=True, slots=True)
class RecentGroups:
    """Statistics of the recent groups of a task.

    Attributes:
        num_groups: Number of recent groups with rewards.
        reward_mean: Mean of their mean rewards.
        reward_std: Mean of the standard deviations within the groups.
        zero_variance: Share of zero-variance groups (all rewards equal) among the groups with
            several episodes; None without such groups.
        num_tokens: Mean number of tokens of a group.
    """

    num_groups: int
    reward_mean: float
    reward_std: float
    zero_variance: float | None
    num_tokens: float


@dataclass(frozen=True, slots=True)
class Trend:
    """Rewards of a task over time.

    Attributes:
        oldest: Mean reward of the oldest fifth of its groups.
        newest: Mean reward of the newest fifth.
        noise: Differences up to this are not significant (two standard errors); None if there are
            too few groups.
    """

    oldest: float
    newest: float
    noise: float | None

    @property
    def direction(self) -> str | None:
        """The direction of the trend; None if there are too few groups."""
        if self.noise is None:
            return None
        if abs(self.newest - self.oldest) <= self.noise:
            return "level"
        return "↑ rising" if self.newest > self.oldest else "↓ falling"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes of the sampled groups of a task.

    Attributes:
        num_groups: Number of sampled groups.
        statuses: Number of groups by status.
        num_drawn: Number of groups that were drawn.
        num_replayed: Number of groups that were drawn more than once.
    """

    num_groups: int
    statuses: Counter[str]
    num_drawn: int
    num_replayed: int


@dataclass(frozen=True, slots=True)
class Learning:
    """Statistics of a sample of groups.

    Attributes:
        num_sampled: Number of groups in the sample. The sample is the recent groups if an even
            sample would not be larger.
        is_all: Whether the sample is all stored groups.
        newest_at: When the newest group was added.
        num_newest: Number of recent groups.
        recent: Statistics of the recent groups, by task.
        trends: Reward trends by task, the task with the most groups first.
        num_of_others: Number of groups whose policy versions belong to another lineage than the
            one that the buffer follows.
        outcomes: Outcomes of the groups, by task.
        statuses: The statuses that occur.
        charts: Charts of rewards, added groups and staleness.
        unreadable: Ids of groups that are omitted because their columns are damaged.
        problem: Why there are no statistics; None if there are.
    """

    num_sampled: int = 0
    is_all: bool = True
    newest_at: datetime | None = None
    num_newest: int = 0
    recent: Mapping[str, RecentGroups] = field(default_factory=dict)
    trends: Mapping[str, Trend] = field(default_factory=dict)
    num_of_others: int = 0
    outcomes: Mapping[str, Outcomes] = field(default_factory=dict)
    statuses: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    unreadable: Sequence[int] = ()
    problem: str | None = None


async def learning(buffer: Buffer) -> Learning:
    """Read the recent groups and a sample of all stored groups, and compute their statistics."""
    unreadable: set[int] = set()
    newest = await find(buffer, unreadable, order_by=col.id.desc(), limit=NEWEST)
    if not newest:
        problem = "No group can be read." if unreadable else "No groups yet."
        return Learning(unreadable=sorted(unreadable), problem=problem)
    numbers = await buffer.metrics(totals=False)
    num_added = numbers["gen/groups"]
    sample, step, is_all = newest, 1, len(newest) < NEWEST
    if not is_all and num_added <= SAMPLED:
        sample, is_all = await find(buffer, unreadable, limit=SAMPLED), True
    elif not is_all and (oldest := await find(buffer, unreadable, limit=1)):
        first, last = oldest[0].id, newest[0].id
        ids = last - first + 1
        interval = math.ceil(max(min(num_added, ids) / SAMPLED, ids / TRIED))
        spread = await find(buffer, unreadable, ids=_spread_ids(first, last, interval))
        if len(spread) > len(newest):  # may be fewer if most ids belong to other buffers
            sample, step, is_all = spread, interval, interval == 1
    charts = [
        _reward_chart(sample),
        _added_chart(sample, step),
        _staleness_chart(sample, numbers),
    ]
    return Learning(
        len(sample),
        is_all,
        newest[0].created_at,
        len(newest),
        _recent(newest),
        _trends(sample),
        sum(it.min_policy_version is not None and it.comparable_version is None for it in sample),
        _outcomes(sample),
        sorted({it.status.value for it in sample}),
        [chart for chart in charts if chart is not None],
        sorted(unreadable),
    )


def _recent(newest: Iterable[GroupInfo]) -> dict[str, RecentGroups]:
    by_task: dict[str, list[GroupInfo]] = defaultdict(list)
    for group in newest:
        if group.reward_mean is not None:
            by_task[group.task_name].append(group)
    return {
        name: RecentGroups(
            len(mine),
            fmean(it.reward_mean or 0.0 for it in mine),
            fmean(it.reward_std or 0.0 for it in mine),
            _zero_variance(mine),
            fmean(it.num_tokens for it in mine),
        )
        for name, mine in sorted(by_task.items())
    }


def _zero_variance(groups: Iterable[GroupInfo]) -> float | None:
    several = [it for it in groups if it.num_episodes > 1]
    return fmean(it.reward_min == it.reward_max for it in several) if several else None


def _trends(sample: Iterable[GroupInfo]) -> dict[str, Trend]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in sorted(sample, key=lambda it: it.id):
        if group.reward_mean is not None:
            rewards[group.task_name].append(group.reward_mean)
    return {
        task: _trend(rewards[task]) for task in sorted(rewards, key=lambda it: -len(rewards[it]))
    }


def _trend(rewards: Sequence[float]) -> Trend:
    """Return the trend of rewards that are in the order of time."""
    number = max(1, len(rewards) // 5)
    first, last = rewards[:number], rewards[-number:]
    spread = (pvariance(first) + pvariance(last)) / number
    noise = 2 * math.sqrt(spread) if number >= MIN_FIFTH else None
    return Trend(fmean(first), fmean(last), noise)


def _outcomes(sample: Iterable[GroupInfo]) -> dict[str, Outcomes]:
    by_task: dict[str, list[GroupInfo]] = defaultdict(list)
    for group in sample:
        by_task[group.task_name].append(group)
    return {
        name: Outcomes(
            len(mine),
            Counter(it.status.value for it in mine),
            sum(it.times_sampled > 0 for it in mine),
            sum(it.times_sampled > 1 for it in mine),
        )
        for name, mine in sorted(by_task.items())
    }


def _reward_chart(sample: Iterable[GroupInfo]) -> Chart | None:
    """Plot rewards by policy version, one line for each of the tasks with the most groups.

    Groups whose versions belong to another lineage than the buffer's are omitted.
    """
    known = [
        (it.task_name, it.comparable_version, it.reward_mean)
        for it in sample
        if it.comparable_version is not None and it.reward_mean is not None
    ]
    if not known:
        return None
    versions = [version for _, version, _ in known]
    most = max(versions)
    width = _width(min(versions), most)
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for task, version, reward in known:
        sums[task][version - version % width].append(reward)
    by_size = [task for task, _ in Counter(it[0] for it in known).most_common()]
    tasks = by_size[:MAX_LINES]
    means = {task: {x: fmean(sums[task][x]) for x in sorted(sums[task])} for task in tasks}
    ends = {x: min(x + width - 1, most) for task in tasks for x in means[task]}
    main = list(means[tasks[0]].values())
    return Chart(
        title="Reward by policy version"
        + (f", {len(tasks)} of {len(by_size)} tasks" if len(by_size) > len(tasks) else ""),
        summary=f"{tasks[0]} went from {main[0]:.3g} to {main[-1]:.3g}",
        headings=["policy version", *tasks],
        rows=[
            [
                str(x) if width == 1 else f"{x} to {ends[x]}",
                *(means[task].get(x) for task in tasks),
            ]
            for x in sorted(ends)
        ],
        traces=[
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(task),
                "x": [(x + ends[x]) / 2 for x in means[task]],
                "y": list(means[task].values()),
            }
            for task in tasks
        ],
        layout={
            "xaxis": {
                "title": {
                    "text": "oldest policy version of the group"
                    + (f", {width} per point" if width > 1 else "")
                },
                "dtick": 1 if len(ends) <= MAX_TICKS and width == 1 else None,
            },
            "yaxis": axis("mean reward"),
        },
    )


def _added_chart(sample: Sequence[GroupInfo], step: int) -> Chart | None:
    """Plot the rate of added groups over time, from the groups that are still stored."""
    times = [it.created_at.timestamp() for it in sample]
    start, seconds = min(times), max(times) - min(times)
    if seconds <= 0:
        return None
    width = seconds / MAX_POINTS
    counts = Counter(min(int((it - start) / width), MAX_POINTS - 1) for it in times)
    middles = [datetime.fromtimestamp(start + (i + 0.5) * width, UTC) for i in range(MAX_POINTS)]
    rates = [counts[i] * step / width for i in range(MAX_POINTS)]
    return Chart(
        title="Groups put over time",
        summary=f"between {min(rates):.3g} and {max(rates):.3g} per second",
        headings=["around (UTC)", "groups per second"],
        rows=[[f"{at:%Y-%m-%d %H:%M:%S}", rate] for at, rate in zip(middles, rates, strict=True)],
        traces=[
            {
                "type": "scatter",
                "mode": "lines",
                "x": [f"{at:%Y-%m-%d %H:%M:%S.%f}" for at in middles],
                "y": rates,
            }
        ],
        layout={"yaxis": {**axis("groups per second"), "rangemode": "tozero"}},
    )


def _staleness_chart(sample: Iterable[GroupInfo], numbers: Mapping[str, float]) -> Chart | None:
    """Plot the distribution of the staleness of completed and of recently trained groups."""
    completed = [it.staleness for it in sample if it.status == GroupStatus.COMPLETED]
    known = [it for it in completed if it is not None]
    available = [sum(least <= it <= most for it in known) for _, least, most in STALENESS_BINS]
    trained = [int(numbers[f"train/staleness/{name}"]) for name, *_ in STALENESS_BINS]
    counts = {
        "completed": [*available, len(completed) - len(known)],
        "recently trained": [*trained, int(numbers["train/groups"]) - sum(trained)],
    }
    if not any(any(it[:-1]) for it in counts.values()):
        return None
    shares = {name: [it / sum(ns) for it in ns] for name, ns in counts.items() if any(ns)}
    words = [
        name.replace("below_", "< ").replace("above_", "> ").replace("_", "-")
        for name, *_ in STALENESS_BINS
    ]
    if any(it[-1] for it in shares.values()):
        words.append("unknown")
    return Chart(
        title="Staleness",
        summary="; ".join(
            f"most {name} groups: {words[it.index(max(it))]}" for name, it in shares.items()
        ),
        headings=["policy versions behind", *shares],
        rows=[[word, *(f"{it[i]:.1%}" for it in shares.values())] for i, word in enumerate(words)],
        traces=[
            {"type": "bar", "name": name, "x": words, "y": it[: len(words)]}
            for name, it in shares.items()
        ],
        layout={
            "barmode": "group",
            "xaxis": {"title": {"text": "policy versions behind"}, "type": "category"},
            "yaxis": {"title": {"text": "share of groups"}, "tickformat": ".0%"},
        },
    )


def _spread_ids(first: int, last: int, step: int) -> list[int]:
    """Return a random id of each interval of `step` ids, the same ids for the same `step`.

    Ids at fixed distances would miss tasks whose groups alternate.
    """
    intervals = range(first // step, last // step + 1)
    return [it * step + Random(it).randrange(step) for it in intervals]  # noqa: S311


def _width(least: int, most: int) -> int:
    return max(1, math.ceil((most - least + 1) / MAX_POINTS))
