"""What made this update?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from replaydb import analysis
from replaydb.buffer import Buffer
from replaydb.database.views import TRAINED
from replaydb.errors import UnknownDrawError
from replaydb.results import DrawInfo, DrawOutcome, GroupInfo
from replaydb.ui import downloads, queries
from replaydb.ui.charts import Chart, axis, label
from replaydb.ui.pages import buffer_of, number_of, optional_number, page

T = TypeVar("T")
#: The run that put groups, None where that is not known, and the oldest policy version in them.
Source: TypeAlias = tuple[str | None, int | None]

#: Rows of a table.
ROWS = 100
#: Draws of a step, and groups of these, that are summed up.
MOST_DRAWS, MOST_GROUPS = 32, 4096

# Plotly would make bars as wide as the least distance between two: of 18 and 20, from 17 to 21.
_BARS = {"type": "bar", "width": 0.8}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A group of a draw.

    Attributes:
        draw_id: The draw.
        group_id: The group.
        probability: With which it was drawn.
        weight: That it had in its batch.
        staleness: At the draw; None where it was unknown.
        outcome: What became of it; None where that was not recorded.
        reason: Why.
        group: What is known of it; None where it is gone, or has other content since.
        gone: "deleted" or "replaced" where nothing is known.
    """

    draw_id: int
    group_id: int
    probability: float
    weight: float
    staleness: int | None
    outcome: DrawOutcome | None
    reason: str | None
    group: GroupInfo | None
    gone: str | None

    @property
    def trained(self) -> bool:
        """Whether the step trained on it, as far as is known."""
        return self.outcome in TRAINED

    @property
    def became(self) -> str:
        """What became of it, in a word."""
        return "unknown" if self.outcome is None else self.outcome.value


@dataclass(frozen=True, slots=True)
class Portion:
    """Groups of a step that have something in common.

    Attributes:
        num_groups: How many.
        share: Of all that are not gone.
        reward_mean: Mean of their mean rewards.
        weight: Sum of their weights.
    """

    num_groups: int
    share: float
    reward_mean: float | None
    weight: float


@dataclass(frozen=True, slots=True)
class StepView:
    """What a run drew for a step, for a page.

    Attributes:
        step: The step; None of a draw that was for none.
        run_name: The run whose step it is; None where that is not known.
        draws: Its draws, the newest first.
        more: Whether there are more draws than these.
        drawn: Groups of these draws.
        times_sampled: How often the run sampled for the step, in these draws or others.
    """

    step: int | None
    run_name: str | None
    draws: Sequence[DrawInfo]
    more: bool
    drawn: Sequence[Drawn]
    times_sampled: int

    @property
    def counted(self) -> Sequence[Drawn]:
        """What it trained on; where nothing is known of that, all."""
        return self.trained or self.drawn

    @property
    def is_doubtful(self) -> bool:
        """Whether some of it may have trained an update that was lost, and taken again.

        Processes that share a step, and parts of a batch, are recorded alike.
        """
        return self.times_sampled > 1 and DrawOutcome.SAMPLED.value in self.outcomes

    @property
    def num_gone(self) -> int:
        """How many of them are deleted, or have other content since."""
        return sum(one.group is None for one in self.counted)

    @property
    def sources(self) -> Mapping[Source, Portion]:
        """Runs and policy versions that these come from, of those that are not gone."""
        found = _portions(self.counted, lambda it: (it.run_name, it.min_policy_version))
        return {source: found[source] for source in sorted(found, key=_place)}

    @property
    def tasks(self) -> Mapping[str, Portion]:
        """The same by task, the largest first."""
        found = _portions(self.counted, lambda it: it.task_name)
        return dict(sorted(found.items(), key=lambda it: (-it[1].num_groups, it[0])))

    @property
    def staleness(self) -> Mapping[int | None, int]:
        """How many of them were how stale."""
        counts = Counter(one.staleness for one in self.counted)
        return dict(sorted(counts.items(), key=lambda it: it[0] or 0))

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many groups came to what."""
        return dict(sorted(Counter(one.became for one in self.drawn).items()))

    @property
    def trained(self) -> Sequence[Drawn]:
        """Groups that it trained on, as far as is known."""
        return [one for one in self.drawn if one.trained]

    @property
    def reward_mean(self) -> float | None:
        """Mean of the mean rewards of what it trained on, of what is not gone."""
        return _mean(one.group.reward_mean for one in self.trained if one.group is not None)

    @property
    def staleness_mean(self) -> float | None:
        """Mean staleness of what it trained on."""
        return _mean(one.staleness for one in self.trained)

    @property
    def num_of_unknown_staleness(self) -> int:
        """Of how many it is not known: of other lineages, or without versions."""
        return sum(one.staleness is None for one in self.trained)

    @property
    def staleness_max(self) -> int | None:
        """The highest."""
        return max((it.staleness for it in self.trained if it.staleness is not None), default=None)


async def step(request: Request) -> Response:
    """What was drawn for a step of a trainer, or by one draw."""
    buffer = await buffer_of(request)
    draw_id, first = optional_number(request, "draw"), optional_number(request, "first") or 0
    number = number_of(request, "step") if draw_id is None else None
    views = await look(buffer, number, run=_run(request), draw_id=draw_id)
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
        asked=_run(request),
        rows=view.drawn[first : first + ROWS],
        next_rows=first + ROWS if len(view.drawn) > first + ROWS else None,
        charts=_charts(view),
        before=before,
        after=after,
    )


@dataclass(frozen=True, slots=True)
class StepRow:
    """A draw, as the list of steps has it."""

    draw: DrawInfo
    outcomes: Mapping[str, int]
    staleness_mean: float | None
    at: datetime


async def download(request: Request) -> Response:
    """The groups that were drawn for it, as rows of `training_history`."""
    buffer = await buffer_of(request)
    draw = optional_number(request, "draw")
    statement = queries.select_drawn(
        buffer.name,
        step=number_of(request, "step") if draw is None else None,
        run=_run(request),
        draw=draw,
    )
    return await downloads.answer(request, statement)


async def steps(request: Request) -> Response:
    """Draws, the newest first."""
    buffer = await buffer_of(request)
    before, run = optional_number(request, "before"), _run(request)
    draws = await buffer.draws(runs=run, before=before, limit=ROWS + 1)
    rows = [
        StepRow(draw, _outcomes(draw.outcomes), _mean(draw.staleness), draw.created_at)
        for draw in draws[:ROWS]
    ]
    older = draws[ROWS - 1].id if len(draws) > ROWS else None
    return page(request, "steps.html", rows=rows, older=older, run=run)


async def download_all(request: Request) -> Response:
    """The groups of all its draws, as rows of `training_history`."""
    name, run = (await buffer_of(request)).name, _run(request)
    return await downloads.answer(
        request,
        queries.select_drawn(name, run=run),
        lambda: analysis.draws(request.app.state.url, buffer=name, runs=run),
    )


async def look(
    buffer: Buffer,
    number: int | None,
    *,
    run: str | None = None,
    draw_id: int | None = None,
) -> list[StepView]:
    """What each run drew for a step, the run that drew last first; of no run where none did.

    Steps of several runs are several updates, which have their number by chance.

    Args:
        buffer: From which.
        number: The step.
        run: Only what this run drew.
        draw_id: This draw instead.

    Raises:
        UnknownDrawError: It is not recorded.
    """
    shown: list[DrawInfo] = []
    if draw_id is not None:
        shown = await buffer.draws(before=draw_id + 1, limit=1)
        if not shown or shown[0].id != draw_id:
            raise UnknownDrawError(draw_id)
        number, run = shown[0].step, shown[0].run_name
    draws = shown
    if number is not None:
        draws = await buffer.draws(step=number, runs=run, limit=MOST_DRAWS + 1)
    sampled = Counter(draw.run_name for draw in draws if DrawOutcome.SAMPLED in draw.outcomes)
    shown, cut = shown or draws[:MOST_DRAWS], draw_id is None and len(draws) > MOST_DRAWS
    known = await _groups(buffer, shown)
    drawn = [one for draw in shown for one in _drawn(draw, known)][:MOST_GROUPS]
    more = cut or sum(len(draw.group_ids) for draw in shown) > MOST_GROUPS
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
    ids = list(dict.fromkeys(id_ for draw in draws for id_ in draw.group_ids))[:MOST_GROUPS]
    return {info.id: info for info in await buffer.find(ids)}


def _drawn(draw: DrawInfo, known: Mapping[int, GroupInfo]) -> Iterable[Drawn]:
    for i, id_ in enumerate(draw.group_ids):
        info, gone = known.get(id_), None
        if info is None:
            gone = "deleted"
        elif info.times_replaced != draw.times_replaced[i]:
            info, gone = None, "replaced"
        yield Drawn(
            draw.id,
            id_,
            draw.probabilities[i],
            draw.weights[i],
            draw.staleness[i],
            draw.outcomes[i],
            draw.outcome_reasons[i],
            info,
            gone,
        )


def _portions(drawn: Iterable[Drawn], of: Callable[[GroupInfo], T]) -> dict[T, Portion]:
    by: dict[T, list[tuple[Drawn, GroupInfo]]] = {}
    for one in drawn:
        if one.group is not None:
            by.setdefault(of(one.group), []).append((one, one.group))
    total = sum(map(len, by.values()))
    return {
        key: Portion(
            len(several),
            len(several) / total,
            _mean(group.reward_mean for _, group in several),
            sum(one.weight for one, _ in several),
        )
        for key, several in by.items()
    }


def _place(source: Source) -> tuple[str, int]:
    return source[0] or "", -1 if source[1] is None else source[1]


def _outcomes(outcomes: Iterable[DrawOutcome | None]) -> dict[str, int]:
    counts = Counter("unknown" if it is None else it.value for it in outcomes)
    return dict(sorted(counts.items()))


def _run(request: Request) -> str | None:
    return request.query_params.get("run") or None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _charts(view: StepView) -> list[Chart]:
    known = [(stale, count) for stale, count in view.staleness.items() if stale is not None]
    if not known:
        return []
    total = sum(count for _, count in known)
    of = "" if total == len(view.counted) else f", of {total} of {len(view.counted)} groups"
    stale = Chart(
        f"Staleness when it was drawn{of}",
        f"{total} groups, {known[0][0]} to {known[-1][0]} versions old",
        ("staleness", "groups"),
        known,
        [_BARS | {"x": [it for it, _ in known], "y": [count for _, count in known]}],
        {
            "xaxis": axis("policy versions behind", [it for it, _ in known]),
            "yaxis": axis("groups", [0, *(count for _, count in known)]),
        },
    )
    versions = [
        (run or "", version, portion.num_groups)
        for (run, version), portion in view.sources.items()
        if version is not None
    ]
    runs = sorted({run for run, *_ in versions})
    made = Chart(
        "Policy versions that made it",
        f"{len(runs)} runs, {len({it for _, it, _ in versions})} versions",
        ("run", "version", "groups"),
        [(run or None, *rest) for run, *rest in versions],
        [
            _BARS
            | {
                "name": label(run or "no run"),
                "x": [it for of, it, _ in versions if of == run],
                "y": [count for of, _, count in versions if of == run],
            }
            for run in runs
        ],
        {
            "barmode": "stack",
            "xaxis": axis("policy version", [it for _, it, _ in versions]),
            "yaxis": axis("groups", [0, sum(count for *_, count in versions)]),
        },
    )
    return [stale, made] if versions else [stale]
