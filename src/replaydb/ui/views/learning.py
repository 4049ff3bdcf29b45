"""What a sample of the groups says about a buffer: cheap however many there are."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from statistics import fmean, pvariance

from replaydb.buffer import Buffer
from replaydb.database.group_columns import col
from replaydb.database.statements.statistics import STALENESS_BINS
from replaydb.episodes import GroupStatus
from replaydb.results import GroupInfo
from replaydb.ui.charts import Chart, axis, label
from replaydb.ui.readable import find

#: Groups of a sample, spread evenly over the ids, and ids that are tried for them: most may be of
#: groups of other buffers.
SAMPLED, TRIED = 1000, 10_000
#: Groups that are the newest.
NEWEST = 100
#: Points of a line, and lines of a chart.
MOST_POINTS, MOST_LINES = 50, 6
#: Groups of a fifth whose deviation says something.
LEAST_FIFTH = 4
#: Versions each of which has its own tick.
MOST_TICKS = 12


@dataclass(frozen=True, slots=True)
class Lately:
    """The newest groups of a task.

    Attributes:
        num_groups: How many of them have rewards.
        reward_mean: Mean of their mean rewards.
        reward_std: Mean of the deviations within the groups.
        even: Share of those with several episodes whose rewards are all equal: they teach nothing.
        num_tokens: Mean tokens of a group.
    """

    num_groups: int
    reward_mean: float
    reward_std: float
    even: float | None
    num_tokens: float


@dataclass(frozen=True, slots=True)
class Trend:
    """Rewards of a task over time.

    Attributes:
        before: Mean of the oldest fifth of its groups.
        lately: Mean of the newest fifth.
        noise: How far these may be apart by chance; None where that is not known.
    """

    before: float
    lately: float
    noise: float | None

    @property
    def direction(self) -> str | None:
        """Where it goes; None where that cannot be told."""
        if self.noise is None:
            return None
        if abs(self.lately - self.before) <= self.noise:
            return "level"
        return "↑ rising" if self.lately > self.before else "↓ falling"

    @property
    def kind(self) -> str:
        """The class that colours it."""
        return {"↑ rising": "good", "↓ falling": "bad"}.get(self.direction or "", "")


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of the groups of a task.

    Attributes:
        num_groups: How many were looked at.
        statuses: How many have which.
        num_drawn: How many were drawn.
        num_replayed: How many were drawn more than once.
    """

    num_groups: int
    statuses: Counter[str]
    num_drawn: int
    num_replayed: int

    def said(self, number: int, *, is_all: bool) -> str:
        """So many of them; of a sample only the share means something."""
        return f"{number:,}" if is_all else f"{number / self.num_groups:.1%}"


@dataclass(frozen=True, slots=True)
class Learning:
    """What a sample says.

    Attributes:
        num_sampled: Groups of the sample; where it is no larger than the newest it is these.
        is_all: Whether these are all that there are.
        newest_at: When the newest group was put.
        num_newest: Groups that `lately` is about.
        lately: The newest groups, by task.
        trends: Rewards of every task, the one with the most groups first.
        num_of_others: Groups of the sample whose policy versions are of other lineages than the
            buffer follows.
        fates: What became of groups, by task.
        statuses: Those that groups have.
        charts: Rewards, puts, staleness.
        unreadable: Ids of groups that would be among them, whose columns are damaged.
        problem: Why there is nothing to see; None where there is.
    """

    num_sampled: int = 0
    is_all: bool = True
    newest_at: datetime | None = None
    num_newest: int = 0
    lately: Mapping[str, Lately] = field(default_factory=dict)
    trends: Mapping[str, Trend] = field(default_factory=dict)
    num_of_others: int = 0
    fates: Mapping[str, Fate] = field(default_factory=dict)
    statuses: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    unreadable: Sequence[int] = ()
    problem: str | None = None


async def learning(buffer: Buffer) -> Learning:
    """Read the newest groups, and some of all."""
    unreadable: set[int] = set()
    newest = await find(buffer, unreadable, order_by=col.id.desc(), limit=NEWEST)
    if not newest:
        problem = "No group can be read." if unreadable else "Nothing has been put yet."
        return Learning(unreadable=sorted(unreadable), problem=problem)
    numbers = await buffer.metrics(totals=False)
    put = numbers["gen/groups"]
    sample, step, is_all = newest, 1, len(newest) < NEWEST
    if not is_all and put <= SAMPLED:
        sample, is_all = await find(buffer, unreadable, limit=SAMPLED), True
    elif not is_all and (oldest := await find(buffer, unreadable, limit=1)):
        first, last = oldest[0].id, newest[0].id
        ids = last - first + 1
        stretch = math.ceil(max(min(put, ids) / SAMPLED, ids / TRIED))
        spread = await find(buffer, unreadable, ids=_spread(first, last, stretch))
        if len(spread) > len(newest):  # fewer are among many of other buffers
            sample, step, is_all = spread, stretch, stretch == 1
    charts = [
        _rewards(sample),
        _puts(sample, step),
        _staleness(sample, numbers),
    ]
    return Learning(
        len(sample),
        is_all,
        newest[0].created_at,
        len(newest),
        _lately(newest),
        _trends(sample),
        sum(it.min_policy_version is not None and it.comparable_version is None for it in sample),
        _fates(sample),
        sorted({it.status.value for it in sample}),
        [chart for chart in charts if chart is not None],
        sorted(unreadable),
    )


def _lately(newest: Iterable[GroupInfo]) -> dict[str, Lately]:
    by_task: dict[str, list[GroupInfo]] = defaultdict(list)
    for group in newest:
        if group.reward_mean is not None:
            by_task[group.task_name].append(group)
    return {
        name: Lately(
            len(mine),
            fmean(it.reward_mean or 0.0 for it in mine),
            fmean(it.reward_std or 0.0 for it in mine),
            _even(mine),
            fmean(it.num_tokens for it in mine),
        )
        for name, mine in sorted(by_task.items())
    }


def _even(groups: Iterable[GroupInfo]) -> float | None:
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
    """Of rewards in the order of time; two standard errors count as chance."""
    number = max(1, len(rewards) // 5)
    first, last = rewards[:number], rewards[-number:]
    spread = (pvariance(first) + pvariance(last)) / number
    noise = 2 * math.sqrt(spread) if number >= LEAST_FIFTH else None
    return Trend(fmean(first), fmean(last), noise)


def _fates(sample: Iterable[GroupInfo]) -> dict[str, Fate]:
    by_task: dict[str, list[GroupInfo]] = defaultdict(list)
    for group in sample:
        by_task[group.task_name].append(group)
    return {
        name: Fate(
            len(mine),
            Counter(it.status.value for it in mine),
            sum(it.times_sampled > 0 for it in mine),
            sum(it.times_sampled > 1 for it in mine),
        )
        for name, mine in sorted(by_task.items())
    }


def _rewards(sample: Iterable[GroupInfo]) -> Chart | None:
    """By policy version, a line for each of some tasks, those with the most groups.

    Versions of other lineages than the buffer follows do not compare.
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
    tasks = by_size[:MOST_LINES]
    means = {task: {x: fmean(sums[task][x]) for x in sorted(sums[task])} for task in tasks}
    ends = {x: min(x + width - 1, most) for task in tasks for x in means[task]}
    main = means[tasks[0]]
    return Chart(
        title="Reward by policy version"
        + (f", {len(tasks)} of {len(by_size)} tasks" if len(by_size) > len(tasks) else ""),
        summary=f"{tasks[0]} went from {_first(main):.3g} to {_last(main):.3g}",
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
                    + (f", {width} to a point" if width > 1 else "")
                },
                "dtick": 1 if len(ends) <= MOST_TICKS and width == 1 else None,
            },
            "yaxis": axis("mean reward"),
        },
    )


def _puts(sample: Sequence[GroupInfo], step: int) -> Chart | None:
    """Groups put a second over time, of those that are still there."""
    times = [it.created_at.timestamp() for it in sample]
    start, seconds = min(times), max(times) - min(times)
    if seconds <= 0:
        return None
    width = seconds / MOST_POINTS
    counts = Counter(min(int((it - start) / width), MOST_POINTS - 1) for it in times)
    middles = [datetime.fromtimestamp(start + (i + 0.5) * width, UTC) for i in range(MOST_POINTS)]
    speeds = [counts[i] * step / width for i in range(MOST_POINTS)]
    return Chart(
        title="Groups put over time",
        summary=f"between {min(speeds):.3g} and {max(speeds):.3g} a second",
        headings=["around (UTC)", "groups a second"],
        rows=[
            [f"{at:%Y-%m-%d %H:%M:%S}", speed] for at, speed in zip(middles, speeds, strict=True)
        ],
        traces=[
            {
                "type": "scatter",
                "mode": "lines",
                "x": [f"{at:%Y-%m-%d %H:%M:%S.%f}" for at in middles],
                "y": speeds,
            }
        ],
        layout={"yaxis": {**axis("groups a second"), "rangemode": "tozero"}},
    )


def _staleness(sample: Iterable[GroupInfo], numbers: Mapping[str, float]) -> Chart | None:
    """Of what can be drawn, and of what was trained on, as shares."""
    ready = [it.staleness for it in sample if it.status == GroupStatus.COMPLETED]
    known = [it for it in ready if it is not None]
    waiting = [sum(least <= it <= most for it in known) for _, least, most in STALENESS_BINS]
    trained = [int(numbers[f"train/staleness/{name}"]) for name, *_ in STALENESS_BINS]
    counts = {
        "can be drawn": [*waiting, len(ready) - len(known)],
        "trained on lately": [*trained, int(numbers["train/groups"]) - sum(trained)],
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
            f"most of what {name}: {words[it.index(max(it))]}" for name, it in shares.items()
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


def _spread(first: int, last: int, step: int) -> list[int]:
    """An id of each `step` in a row, by chance: tasks that take turns each have theirs.

    The same ids each time, as long as `step` is the same.
    """
    stretches = range(first // step, last // step + 1)
    return [it * step + Random(it).randrange(step) for it in stretches]  # noqa: S311


def _width(least: int, most: int) -> int:
    return max(1, math.ceil((most - least + 1) / MOST_POINTS))


def _first(means: Mapping[int, float]) -> float:
    return next(iter(means.values()))


def _last(means: Mapping[int, float]) -> float:
    return next(reversed(list(means.values())))
