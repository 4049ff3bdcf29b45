"""Run pages: list of runs, one run, and comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from replaydb import analysis
from replaydb.buffer.store import Store
from replaydb.database.tables.views import TRAINED
from replaydb.domain.results import RunInfo, RunStats, VersionTotals
from replaydb.errors import InvalidInputError
from replaydb.ui import downloads
from replaydb.ui.charts import Chart, by_number
from replaydb.ui.pages import as_json, optional_number, page, store_of, text_of

#: Rows per table.
ROWS = 100
#: Maximum number of tasks with a reward chart.
MAX_TASKS = 6

#: Names of a buffer and of one of its tasks.
Task = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TaskOfRun:
    """Totals of the sampled groups that a run has added to a task."""

    buffer_name: str
    task_name: str
    num_groups: int
    num_episodes: int
    num_tokens: int
    first_version: int | None
    last_version: int | None
    reward_mean: float | None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, for the page. Large runs are sampled, and their numbers are estimates.

    Attributes:
        stats: Statistics of the sample.
        num_groups: Estimated number of stored groups that the run has added.
        num_tokens: Estimated number of tokens of these.
        num_draws: Estimated number of draws of the run.
        reward_mean: Mean of the mean rewards of the stored groups; None if they are of several
            tasks.
        groups_per_hour: Rate of the stored groups between the first and the last one; None if
            these were added at the same time.
        staleness_mean: Mean staleness of the groups that the run trained on.
        staleness_max: Highest staleness of these.
        staleness_unknown: Share of these with unknown staleness; None if there are none.
        tasks: Totals by task.
        rewards: Mean reward by policy version, for each task.
        stale: Number of groups that the run trained on, by staleness.
    """

    stats: RunStats
    num_groups: int
    num_tokens: int
    num_draws: int
    reward_mean: float | None
    groups_per_hour: float | None
    staleness_mean: float | None
    staleness_max: int | None
    staleness_unknown: float | None
    tasks: Sequence[TaskOfRun]
    rewards: Mapping[Task, Mapping[int, float]]
    stale: Mapping[int, int]

    @property
    def info(self) -> RunInfo:
        """The run."""
        return self.stats.run

    @property
    def is_complete(self) -> bool:
        """Whether the statistics include all groups and draws of the run."""
        return self.stats.share == self.stats.draw_share == 1.0


async def run(request: Request) -> Response:
    """Show a run: its groups, and what it trained on."""
    view = await load_run(store_of(request), text_of(request, "name"))
    return page(request, "run.html", run=view, charts=_charts([view]), max_tasks=MAX_TASKS)


async def runs(request: Request) -> Response:
    """Compare two runs, or list all runs."""
    store = store_of(request)
    a, b = request.query_params.get("a"), request.query_params.get("b")
    if a and b:
        both = [await load_run(store, name) for name in (a, b)]
        return page(
            request,
            "two_runs.html",
            runs=both,
            differences=differences(*(it.info.metadata for it in both)),
            tasks=_compare_tasks(both),
            charts=_charts(both),
            max_tasks=MAX_TASKS,
        )
    known = sorted(await store.runs(), key=lambda it: it.id, reverse=True)
    first = optional_number(request, "first") or 0
    more = first + ROWS if len(known) > first + ROWS else None
    return page(request, "runs.html", runs=known[first : first + ROWS], chosen=a, next_rows=more)


async def download(request: Request) -> Response:
    """Download the list of runs."""
    return await downloads.answer(request, analysis.runs)


async def load_run(store: Store, name: str) -> RunView:
    """Load the statistics of a run.

    Raises:
        HTTPException: There is no such run.
    """
    try:
        stats = await store.run_stats(name)
    except InvalidInputError:
        raise HTTPException(404, f"there is no run named {name!r}") from None
    groups = sum(it.num_groups for it in stats.versions)
    hours = _hours(stats.first_put_at, stats.last_put_at)
    stale: dict[int, int] = {}
    trained = 0
    for (staleness, outcome), count in stats.drawn.items():
        trained += count if outcome in TRAINED else 0
        if staleness is not None and outcome in TRAINED:
            stale[staleness] = stale.get(staleness, 0) + count
    total = sum(stale.values())
    by_task = _by_task(stats.versions)
    return RunView(
        stats,
        round(groups / stats.share),
        round(sum(it.num_tokens for it in stats.versions) / stats.share),
        round(stats.num_draws / stats.draw_share),
        _reward(stats.versions) if len(by_task) == 1 else None,
        groups / stats.share / hours if hours else None,
        sum(it * count for it, count in stale.items()) / total if total else None,
        max(stale, default=None),
        1 - total / trained if trained else None,
        [_task(key, totals) for key, totals in by_task.items()],
        {key: _rewards(totals) for key, totals in by_task.items()},
        dict(sorted(stale.items())),
    )


def differences(
    a: Mapping[str, object], b: Mapping[str, object]
) -> list[tuple[str, str | None, str | None]]:
    """Return the names and both values of the entries in which two JSON objects differ."""
    texts = [as_json(one) for one in (a, b)]
    return [
        (name, texts[0].get(name), texts[1].get(name))
        for name in sorted({*a, *b})
        if texts[0].get(name) != texts[1].get(name)
    ]


def _hours(first: datetime | None, last: datetime | None) -> float:
    return 0.0 if first is None or last is None else (last - first).total_seconds() / 3600


def _reward(totals: Iterable[VersionTotals]) -> float | None:
    known = [(it.reward_mean, it.num_groups) for it in totals if it.reward_mean is not None]
    weight = sum(count for _, count in known)
    return sum(mean * count for mean, count in known) / weight if weight else None


def _rewards(totals: Iterable[VersionTotals]) -> dict[int, float]:
    known = ((it.policy_version, it.reward_mean) for it in totals)
    return dict(sorted((it, mean) for it, mean in known if it is not None and mean is not None))


def _by_task(totals: Iterable[VersionTotals]) -> Mapping[Task, Sequence[VersionTotals]]:
    by: dict[Task, list[VersionTotals]] = {}
    for one in totals:
        by.setdefault((one.buffer_name, one.task_name), []).append(one)
    return dict(sorted(by.items()))


def _task(key: Task, totals: Sequence[VersionTotals]) -> TaskOfRun:
    versions = [it.policy_version for it in totals if it.policy_version is not None]
    return TaskOfRun(
        *key,
        sum(it.num_groups for it in totals),
        sum(it.num_episodes for it in totals),
        sum(it.num_tokens for it in totals),
        min(versions, default=None),
        max(versions, default=None),
        _reward(totals),
    )


def _compare_tasks(
    both: Sequence[RunView],
) -> list[tuple[Task, TaskOfRun | None, TaskOfRun | None]]:
    """Return the tasks of either run with the totals of both."""
    sides = [{(it.buffer_name, it.task_name): it for it in run.tasks} for run in both]
    return [(key, sides[0].get(key), sides[1].get(key)) for key in sorted({*sides[0], *sides[1]})]


def _charts(views: Sequence[RunView]) -> list[Chart]:
    width = 0.8 / len(views)
    lines = [
        {"type": "scatter", "mode": "lines+markers", "line": {"dash": dash}}
        for dash in ("solid", "dash")
    ]
    bars = [  # not lines, which would interpolate between the values
        {"type": "bar", "width": width, "offset": i * width - 0.4, "marker": {"pattern": it}}
        for i, it in enumerate(({}, {"shape": "/"}))
    ]
    charts = [
        *(
            by_number(
                f"Mean reward by policy version: {title}",
                ("policy version", "mean reward"),
                {view.info.name: view.rewards.get(task, {}) for view in views},
                lines,
            )
            for task, title in _charted_tasks(views)
        ),
        by_number(
            "Staleness of trained groups"
            + (", if known" if any(view.staleness_unknown for view in views) else ""),
            ("versions behind", "groups"),
            {view.info.name: view.stale for view in views},
            bars,
        ),
    ]
    return [chart for chart in charts if chart.rows]


def _charted_tasks(views: Sequence[RunView]) -> Iterable[tuple[Task, str]]:
    """Yield the tasks with a reward chart and their titles: first those that all runs have."""
    sizes: dict[Task, list[int]] = {}
    for view in views:
        for it in view.tasks:
            if view.rewards[it.buffer_name, it.task_name]:
                sizes.setdefault((it.buffer_name, it.task_name), []).append(it.num_groups)
    order = sorted(sizes, key=lambda task: (-len(sizes[task]), -sum(sizes[task]), task))
    buffers = {buffer for buffer, _ in sizes}
    for buffer, task in order[:MAX_TASKS]:
        yield (buffer, task), task if len(buffers) == 1 else f"{task} in {buffer}"
