"""Step pages: list of draws, and the composition of one trainer step or draw."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from sqlalchemy import URL
from starlette.requests import Request
from starlette.responses import Response

from replaydb import analysis
from replaydb.analysis.tables import Which, draws_of, scan_draws, scanned
from replaydb.buffer import Buffer
from replaydb.database.statements.scans import Scan
from replaydb.database.tables import schema
from replaydb.domain.results import DrawInfo, DrawOutcome, GroupInfo
from replaydb.errors import UnknownDrawError
from replaydb.ui import downloads
from replaydb.ui.charts import Chart, by_number
from replaydb.ui.pages import buffer_of, number_of, optional_number, page
from replaydb.ui.views.draws import DrawnGroup, draw_row, drawn_group, mean

T = TypeVar("T")
#: The run that added a group and the oldest policy version in it; None if unknown.
Source: TypeAlias = tuple[str | None, int | None]

#: Rows per table.
ROWS = 100
#: Maximum number of draws of a step, and of their groups, that are summarized.
MAX_DRAWS, MAX_GROUPS = 32, 4096

# By default Plotly makes a bar as wide as the smallest distance between two bars.
_BARS = {"type": "bar", "width": 0.8}


@dataclass(frozen=True, slots=True)
class Subset:
    """Totals of the groups of a step with the same task, or the same run and version.

    Attributes:
        num_groups: Number of groups.
        share: Share of the groups of the step whose task is known.
        reward_mean: Mean of their mean rewards.
        weight: Sum of their weights.
    """

    num_groups: int
    share: float
    reward_mean: float | None
    weight: float


@dataclass(frozen=True, slots=True)
class StepView:
    """The draws of a run for a step, or a single draw, for the page.

    Attributes:
        step: The step; None for a draw without a step.
        run_name: The run; None if unknown.
        draws: Its draws, newest first.
        more: Whether there are more draws or groups than these.
        drawn: The groups of these draws.
        times_sampled: Number of draws by `sample` of the run for the step, including draws that are
            not shown.
    """

    step: int | None
    run_name: str | None
    draws: Sequence[DrawInfo]
    more: bool
    drawn: Sequence[DrawnGroup]
    times_sampled: int

    @property
    def counted(self) -> Sequence[DrawnGroup]:
        """The groups trained on, or all drawn groups if none are known to be."""
        return self.trained or self.drawn

    @property
    def is_ambiguous(self) -> bool:
        """Whether an earlier draw may belong to an update that was lost and repeated.

        The record does not distinguish this from processes that share a step, or from a batch that
        was drawn in parts.
        """
        return self.times_sampled > 1 and DrawOutcome.SAMPLED.value in self.outcomes

    @property
    def num_missing(self) -> int:
        """Number of counted groups whose task and reward are unknown."""
        return sum(one.task_name is None for one in self.counted)

    @property
    def sources(self) -> Mapping[Source, Subset]:
        """Totals of the counted groups that are known, by run and policy version."""
        found = _subsets(self.counted, lambda it: (it.run_name, it.min_policy_version))
        return {source: found[source] for source in sorted(found, key=_sort_key)}

    @property
    def tasks(self) -> Mapping[str, Subset]:
        """Totals of the counted groups that are known, by task, largest first."""
        found = _subsets(self.counted, lambda it: it.task_name or "")
        return dict(sorted(found.items(), key=lambda it: (-it[1].num_groups, it[0])))

    @property
    def staleness(self) -> Mapping[int | None, int]:
        """Number of counted groups by staleness."""
        counts = Counter(one.staleness for one in self.counted)
        return dict(sorted(counts.items(), key=lambda it: it[0] or 0))

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Number of drawn groups by outcome."""
        return dict(sorted(Counter(one.outcome_name for one in self.drawn).items()))

    @property
    def trained(self) -> Sequence[DrawnGroup]:
        """The groups trained on, according to their outcomes."""
        return [one for one in self.drawn if one.trained]

    @property
    def reward_mean(self) -> float | None:
        """Mean of the mean rewards of the groups trained on that are known."""
        return mean(one.reward_mean for one in self.trained)

    @property
    def staleness_mean(self) -> float | None:
        """Mean staleness of the groups trained on."""
        return mean(one.staleness for one in self.trained)

    @property
    def num_of_unknown_staleness(self) -> int:
        """Number of groups trained on without versions or with versions of other lineages."""
        return sum(one.staleness is None for one in self.trained)

    @property
    def staleness_max(self) -> int | None:
        """Highest staleness of the groups trained on."""
        return max((it.staleness for it in self.trained if it.staleness is not None), default=None)


async def step(request: Request) -> Response:
    """Show the groups that were drawn for a trainer step, or by one draw."""
    buffer = await buffer_of(request)
    draw_id, first = optional_number(request, "draw"), optional_number(request, "first") or 0
    number = number_of(request, "step") if draw_id is None else None
    views = await load_step(buffer, number, run=_run(request), draw_id=draw_id)
    number, run = views[0].step, views[0].run_name if len(views) == 1 else None
    before = [] if number is None else await buffer.steps(runs=run, below=number, limit=1)
    after = [] if number is None else await buffer.steps(runs=run, above=number, limit=1)
    if len(views) > 1:
        return page(
            request,
            "step_of_runs.html",
            views=views,
            number=number,
            before=before,
            after=after,
        )
    [view] = views
    return page(
        request,
        "step.html",
        step=view,
        draw_id=draw_id,
        requested_run=_run(request),
        rows=view.drawn[first : first + ROWS],
        next_rows=first + ROWS if len(view.drawn) > first + ROWS else None,
        charts=_charts(view),
        before=before,
        after=after,
    )


async def download(request: Request) -> Response:
    """Download the groups of a step or draw, as rows of `training_history`."""
    buffer = await buffer_of(request)
    draw = optional_number(request, "draw")
    return await downloads.answer(
        request,
        _drawn,
        buffer_name=buffer.name,
        step=number_of(request, "step") if draw is None else None,
        run_name=_run(request),
        draw_id=draw,
    )


def _drawn(
    url: str | URL, *, buffer_name: str, step: int | None, run_name: str | None, draw_id: int | None
) -> analysis.Rows:
    """Return the groups of one draw of a buffer, or of the draws of a step."""
    runs = None if run_name is None else [run_name]

    def scan(ids: Collection[int] | None) -> Scan:
        found = scan_draws(draws_of(ids, runs, None, None))
        of = schema.draw.c.id == draw_id
        if draw_id is None:
            of = schema.draw.c.buffer_id.in_(ids or ()) & (schema.draw.c.step == step)
        return replace(found, of=of)

    return scanned(url, Which.of(buffer_name), scan)


async def steps(request: Request) -> Response:
    """List the draws of a buffer, newest first."""
    buffer = await buffer_of(request)
    before, run = optional_number(request, "before"), _run(request)
    draws = await buffer.draws(runs=run, before=before, limit=ROWS + 1)
    rows = [draw_row(draw) for draw in draws[:ROWS]]
    older = draws[ROWS - 1].id if len(draws) > ROWS else None
    return page(request, "steps.html", rows=rows, older=older, run=run)


async def download_all(request: Request) -> Response:
    """Download the groups of all draws of a buffer, as rows of `training_history`."""
    buffer = await buffer_of(request)
    return await downloads.answer(request, analysis.draws, buffer=buffer.name, runs=_run(request))


async def load_step(
    buffer: Buffer,
    number: int | None,
    *,
    run: str | None = None,
    draw_id: int | None = None,
) -> list[StepView]:
    """Load the draws for a step, separately for each run.

    Steps of the same number in several runs are different updates.

    Args:
        buffer: The buffer.
        number: The step.
        run: Only draws of this run.
        draw_id: Load this draw instead of a step.

    Returns:
        One view per run, the run with the newest draw first. A single empty view if nothing was
        drawn.

    Raises:
        UnknownDrawError: The draw is not recorded.
    """
    shown: list[DrawInfo] = []
    if draw_id is not None:
        shown = await buffer.draws(before=draw_id + 1, limit=1)
        if not shown or shown[0].id != draw_id:
            raise UnknownDrawError(draw_id)
        number, run = shown[0].step, shown[0].run_name
    draws = shown
    if number is not None:
        draws = await buffer.draws(step=number, runs=run, limit=MAX_DRAWS + 1)
    sampled = Counter(draw.run_name for draw in draws if DrawOutcome.SAMPLED in draw.outcomes)
    shown, cut = shown or draws[:MAX_DRAWS], draw_id is None and len(draws) > MAX_DRAWS
    known = await _groups(buffer, shown)
    drawn = [
        drawn_group(draw, i, known.get(id_))
        for draw in shown
        for i, id_ in enumerate(draw.group_ids)
    ][:MAX_GROUPS]
    more = cut or sum(len(draw.group_ids) for draw in shown) > MAX_GROUPS
    by: dict[str | None, list[DrawInfo]] = {}
    for draw in shown:
        by.setdefault(draw.run_name, []).append(draw)
    if not by:
        return [StepView(number, run, [], False, [], 0)]
    return [
        StepView(
            number,
            run_name,
            theirs,
            more,
            [one for one in drawn if one.draw_id in {draw.id for draw in theirs}],
            sampled[run_name],
        )
        for run_name, theirs in by.items()
    ]


async def _groups(buffer: Buffer, draws: Sequence[DrawInfo]) -> dict[int, GroupInfo]:
    ids = list(dict.fromkeys(id_ for draw in draws for id_ in draw.group_ids))[:MAX_GROUPS]
    return {info.id: info for info in await buffer.find(ids)}


def _subsets(drawn: Iterable[DrawnGroup], key: Callable[[DrawnGroup], T]) -> dict[T, Subset]:
    by: dict[T, list[DrawnGroup]] = {}
    for one in drawn:
        if one.task_name is not None:
            by.setdefault(key(one), []).append(one)
    total = sum(map(len, by.values()))
    return {
        value: Subset(
            len(several),
            len(several) / total,
            mean(one.reward_mean for one in several),
            sum(one.weight for one in several),
        )
        for value, several in by.items()
    }


def _sort_key(source: Source) -> tuple[str, int]:
    return source[0] or "", -1 if source[1] is None else source[1]


def _run(request: Request) -> str | None:
    return request.query_params.get("run") or None


def _charts(view: StepView) -> list[Chart]:
    stale = {it: count for it, count in view.staleness.items() if it is not None}
    if not stale:
        return []
    total = sum(stale.values())
    of = "" if total == len(view.counted) else f", of {total} of {len(view.counted)} groups"
    versions: dict[str, dict[int, int]] = defaultdict(dict)
    for (run, version), subset in view.sources.items():
        if version is not None:
            versions[run or "no run"][version] = subset.num_groups
    charts = [
        by_number(
            f"Staleness when drawn{of}",
            ("policy versions behind", "groups"),
            {"groups": stale},
            [_BARS],
            summary=f"{total} groups, {min(stale)} to {max(stale)} versions old",
        ),
        by_number(
            "Policy versions",
            ("policy version", "groups"),
            versions,
            [_BARS] * len(versions),
            barmode="stack",
            showlegend=True,
        ),
    ]
    return [chart for chart in charts if chart.rows]
