"""What made this update?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response

from replaydb.buffer import Buffer
from replaydb.database.views import TRAINED
from replaydb.errors import UnknownDrawError
from replaydb.results import DrawInfo, DrawOutcome, GroupInfo
from replaydb.ui import downloads
from replaydb.ui.charts import Chart, axis, label
from replaydb.ui.pages import buffer_of, number_of, optional_number, page

#: Rows of a table.
ROWS = 100
#: Draws of a step, and groups of these, that are summed up.
MOST_DRAWS, MOST_GROUPS = 32, 4096


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


@dataclass(frozen=True, slots=True)
class Source:
    """Where groups of a step come from.

    Attributes:
        run_name: The run that put them; None where that is not known.
        version: Oldest policy version that made a token of them.
        num_groups: How many.
        reward_mean: Mean of their mean rewards.
        weight: Sum of their weights.
    """

    run_name: str | None
    version: int | None
    num_groups: int
    reward_mean: float | None
    weight: float


@dataclass(frozen=True, slots=True)
class StepView:
    """What was drawn for a step, for a page or a download.

    Attributes:
        step: The step; None of a draw that was for none.
        run_name: The run whose step it is; None: of all runs.
        draws: Its draws, the newest first.
        more: Whether there are more draws than these.
        drawn: Groups of these draws.
        sources: Runs and policy versions that they come from.
        outcomes: How many came to what.
        staleness: How many were how stale.
        previous: The step before; None where there is none.
        next: The step after it.
    """

    step: int | None
    run_name: str | None
    draws: Sequence[DrawInfo]
    more: bool
    drawn: Sequence[Drawn]
    sources: Sequence[Source]
    outcomes: Mapping[str, int]
    staleness: Mapping[int | None, int]
    previous: int | None
    next: int | None

    @property
    def trained(self) -> Sequence[Drawn]:
        """Groups that it trained on, as far as is known."""
        return [one for one in self.drawn if one.trained]

    @property
    def reward_mean(self) -> float | None:
        """Mean of the mean rewards of what it trained on."""
        return _mean(one.group.reward_mean for one in self.trained if one.group is not None)

    @property
    def staleness_mean(self) -> float | None:
        """Mean staleness of what it trained on."""
        return _mean(one.staleness for one in self.trained)

    @property
    def staleness_max(self) -> int | None:
        """The highest."""
        return max((it.staleness for it in self.trained if it.staleness is not None), default=None)


async def step(request: Request) -> Response:
    """What was drawn for a step of a trainer, or by one draw."""
    buffer = await buffer_of(request)
    number, draw_id = optional_number(request, "step"), optional_number(request, "draw")
    view = await look(buffer, number, run=request.query_params.get("run"), draw_id=draw_id)
    first = optional_number(request, "first") or 0
    return page(
        request,
        "step.html",
        step=view,
        draw_id=draw_id,
        rows=view.drawn[first : first + ROWS],
        first=first,
        next_rows=first + ROWS if len(view.drawn) > first + ROWS else None,
        charts=_charts(view),
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
    statement = downloads.select_drawn(
        buffer.name,
        step=number_of(request, "step") if draw is None else None,
        run=request.query_params.get("run") or None,
        draw=draw,
    )
    kind = downloads.kind_of(request)
    return downloads.answer(
        request, await downloads.rows_of(request.app.state.url, statement, kind)
    )


async def steps(request: Request) -> Response:
    """Draws, the newest first."""
    buffer = await buffer_of(request)
    before, run = optional_number(request, "before"), request.query_params.get("run")
    draws = await buffer.draws(runs=run or None, before=before, limit=ROWS + 1)
    rows = [
        StepRow(draw, _outcomes(draw.outcomes), _mean(draw.staleness), draw.created_at)
        for draw in draws[:ROWS]
    ]
    older = draws[ROWS - 1].id if len(draws) > ROWS else None
    return page(request, "steps.html", rows=rows, older=older, run=run)


async def look(
    buffer: Buffer,
    number: int | None,
    *,
    run: str | None = None,
    draw_id: int | None = None,
) -> StepView:
    """What was drawn for a step.

    Args:
        buffer: From which.
        number: The step.
        run: Only what this run drew.
        draw_id: This draw instead.

    Raises:
        UnknownDrawError: It is not recorded.
    """
    if draw_id is not None:
        draws = await buffer.draws(before=draw_id + 1, limit=1)
        if not draws or draws[0].id != draw_id:
            raise UnknownDrawError(draw_id)
        number, run = draws[0].step, draws[0].run_name
    else:
        draws = await buffer.draws(step=number, runs=run or None, limit=MOST_DRAWS + 1)
    shown = draws[:MOST_DRAWS]
    known = await _groups(buffer, shown)
    drawn = [one for draw in shown for one in _drawn(draw, known)][:MOST_GROUPS]
    before = [] if number is None else await buffer.steps(below=number, limit=1)
    after = [] if number is None else await buffer.steps(above=number, limit=1)
    return StepView(
        number,
        run,
        shown,
        len(draws) > MOST_DRAWS or sum(len(draw.group_ids) for draw in shown) > MOST_GROUPS,
        drawn,
        _sources(drawn),
        _outcomes(one.outcome for one in drawn),
        dict(sorted(Counter(one.staleness for one in drawn).items(), key=lambda it: it[0] or 0)),
        before[0] if before else None,
        after[0] if after else None,
    )


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


def _sources(drawn: Iterable[Drawn]) -> list[Source]:
    by: dict[tuple[str | None, int | None], list[Drawn]] = {}
    for one in drawn:
        if one.group is not None:
            by.setdefault((one.group.run_name, one.group.min_policy_version), []).append(one)
    found = [
        Source(
            *key,
            len(several),
            _mean(it.group.reward_mean for it in several if it.group is not None),
            sum(it.weight for it in several),
        )
        for key, several in by.items()
    ]
    return sorted(
        found, key=lambda it: (it.run_name or "", -1 if it.version is None else it.version)
    )


def _outcomes(outcomes: Iterable[DrawOutcome | None]) -> dict[str, int]:
    counts = Counter("unknown" if it is None else it.value for it in outcomes)
    return dict(sorted(counts.items()))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _charts(view: StepView) -> list[Chart]:
    known = [(stale, count) for stale, count in view.staleness.items() if stale is not None]
    if not known:
        return []
    stale = Chart(
        "Staleness when it was drawn",
        f"{sum(count for _, count in known)} groups, {known[0][0]} to {known[-1][0]} versions old",
        ("staleness", "groups"),
        known,
        [{"type": "bar", "x": [it for it, _ in known], "y": [count for _, count in known]}],
        {
            "xaxis": axis("policy versions behind", [it for it, _ in known]),
            "yaxis": axis("groups"),
        },
    )
    versions = [it for it in view.sources if it.version is not None]
    runs = sorted({it.run_name or "" for it in versions})
    made = Chart(
        "Policy versions that made it",
        f"{len(runs)} runs, {len({it.version for it in versions})} versions",
        ("run", "version", "groups"),
        [(it.run_name, it.version, it.num_groups) for it in versions],
        [
            {
                "type": "bar",
                "name": label(run or "no run"),
                "x": [it.version for it in versions if (it.run_name or "") == run],
                "y": [it.num_groups for it in versions if (it.run_name or "") == run],
            }
            for run in runs
        ],
        {
            "barmode": "stack",
            "xaxis": axis(
                "policy version", [it.version for it in versions if it.version is not None]
            ),
            "yaxis": axis("groups"),
        },
    )
    return [stale, made] if versions else [stale]
