"""Prompt page: rewards of a prompt by policy version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from starlette.requests import Request
from starlette.responses import Response

from replaydb import analysis
from replaydb.buffer import Buffer
from replaydb.database.filters.group_columns import col
from replaydb.domain.decoding import Decode
from replaydb.domain.results import GroupInfo, PromptInfo
from replaydb.ui import downloads
from replaydb.ui.addresses import parse, plain
from replaydb.ui.charts import Chart, axis, label
from replaydb.ui.pages import buffer_of, optional_number, page, text_of
from replaydb.ui.views.draws import mean
from replaydb.ui.views.group import Prompt, prompt_of, read

#: Rows per table.
ROWS = 100
#: Number of the newest groups of a prompt that are summarized.
MAX_GROUPS = 1000


@dataclass(frozen=True, slots=True)
class Attempt:
    """Groups of a prompt by one policy version of one run.

    Attributes:
        run_name: The run; None if it has no name.
        version: Oldest policy version that sampled a token; None if unknown.
        num_groups: Number of groups.
        num_episodes: Number of their episodes.
        reward_mean: Mean of the mean rewards of the groups.
        reward_min: Lowest reward of an episode.
        reward_max: Highest reward of an episode.
    """

    run_name: str | None
    version: int | None
    num_groups: int
    num_episodes: int
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None


@dataclass(frozen=True, slots=True)
class Line:
    """Progress of a run on a prompt.

    Attributes:
        run_name: The run; None if it has no name.
        first: The first attempt with an episode that solves the prompt; None if there is none.
        since: The attempt since which all episodes solve the prompt; None if an episode of the
            latest attempt does not.
        latest: The attempt of the newest version.
    """

    run_name: str | None
    first: Attempt | None
    since: Attempt | None
    latest: Attempt


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt, for the page.

    Attributes:
        uid: Its uid.
        task: Its task; None if several tasks have a prompt of this uid.
        prompt: The prompt from the newest group with a payload.
        totals: Its outcomes, by task.
        groups: Its groups, newest first.
        more: Whether there are more groups than these.
        solved: The lowest reward that counts as solved; None if unknown.
        constant: The reward of all episodes, if there is only one and no `solved` is given. It is
            unknown whether it is a solution.
        attempts: Attempts by run and version, oldest version first.
        lines: Progress by run, the run that added groups last first. Only attempts with known
            versions and rewards count.
    """

    uid: str
    task: str | None
    prompt: Prompt
    totals: Sequence[PromptInfo]
    groups: Sequence[GroupInfo]
    more: bool
    solved: float | None
    constant: float | None
    attempts: Sequence[Attempt]
    lines: Sequence[Line]


async def prompt(request: Request) -> Response:
    """Show a prompt and its rewards by policy version."""
    buffer = await buffer_of(request)
    uid, task = text_of(request, "uid"), request.query_params.get("task") or None
    solved = _solved(request)
    view = await load_prompt(buffer, uid, task=task, solved=solved, decode=request.app.state.decode)
    start = optional_number(request, "first") or 0
    return page(
        request,
        "prompt.html",
        view=view,
        task=task,
        requested=None if solved is None else plain(solved),
        solved=None if view.solved is None else plain(view.solved),
        rows=view.groups[start : start + ROWS],
        next_rows=start + ROWS if len(view.groups) > start + ROWS else None,
        charts=[_chart(view)] if view.attempts and view.task is not None else [],
    )


async def download(request: Request) -> Response:
    """Download the outcomes of the prompt, as rows of `prompt_overview`."""
    buffer = await buffer_of(request)
    task = request.query_params.get("task") or None
    where = col.prompt_uid == text_of(request, "uid")
    return await downloads.answer(
        request, analysis.prompts, buffer=buffer.name, tasks=task, where=where
    )


def _solved(request: Request) -> float | None:
    value = request.query_params.get("solved")
    return parse(value, float, "solved", "a finite number") if value else None


async def load_prompt(
    buffer: Buffer,
    uid: str,
    *,
    task: str | None = None,
    solved: float | None = None,
    decode: Decode | None = None,
) -> PromptView:
    """Load a prompt. Several tasks may have a prompt of the same uid.

    Args:
        buffer: The buffer.
        uid: The `prompt_uid` of its groups.
        task: Only groups of this task.
        solved: The lowest reward that counts as solved. Default: the highest
            reward of an episode, unless all rewards are equal.
        decode: Decodes tokens; None without a tokenizer.
    """
    where = col.prompt_uid == uid
    totals = await buffer.prompts(tasks=task, where=where)
    found = await buffer.find(tasks=task, where=where, order_by=col.id.desc(), limit=MAX_GROUPS + 1)
    groups = found[:MAX_GROUPS]
    rewards = {it for one in groups for it in (one.reward_min, one.reward_max) if it is not None}
    constant = min(rewards) if len(rewards) == 1 and solved is None else None
    if solved is None and constant is None:
        solved = max(rewards, default=None)
    attempts = _attempts(groups)
    task = totals[0].task_name if len(totals) == 1 else task
    return PromptView(
        uid,
        task,
        Prompt() if task is None else await _prompt(buffer, groups, decode),
        totals,
        groups,
        len(found) > MAX_GROUPS,
        solved,
        constant,
        attempts,
        [] if solved is None else _lines(attempts, solved, groups),
    )


async def _prompt(buffer: Buffer, groups: Iterable[GroupInfo], decode: Decode | None) -> Prompt:
    newest = next((one for one in groups if one.num_bytes), None)
    stored, _ = (None, None) if newest is None else await read(buffer, newest)
    return prompt_of(stored, decode)


def _attempts(groups: Iterable[GroupInfo]) -> list[Attempt]:
    by: dict[tuple[str | None, int | None], list[GroupInfo]] = {}
    for one in sorted(groups, key=_version_and_id):
        by.setdefault((one.run_name, one.min_policy_version), []).append(one)
    return [
        Attempt(
            run_name,
            version,
            len(several),
            sum(one.num_episodes for one in several),
            mean(one.reward_mean for one in several),
            min((one.reward_min for one in several if one.reward_min is not None), default=None),
            max((one.reward_max for one in several if one.reward_max is not None), default=None),
        )
        for (run_name, version), several in by.items()
    ]


def _version_and_id(one: GroupInfo) -> tuple[int, int]:
    version = -1 if one.min_policy_version is None else one.min_policy_version
    return version, one.id


def _lines(attempts: Iterable[Attempt], solved: float, newest: Iterable[GroupInfo]) -> list[Line]:
    by: dict[str | None, list[Attempt]] = {}
    for one in attempts:
        if one.version is not None and one.reward_max is not None:
            by.setdefault(one.run_name, []).append(one)
    order = list(dict.fromkeys(one.run_name for one in newest))
    return [
        Line(
            name,
            next(
                (it for it in by[name] if it.reward_max is not None and it.reward_max >= solved),
                None,
            ),
            _since(by[name], solved),
            by[name][-1],
        )
        for name in order
        if name in by
    ]


def _since(attempts: Sequence[Attempt], solved: float) -> Attempt | None:
    found = None
    for one in reversed(attempts):
        if one.reward_min is None or one.reward_min < solved:
            break
        found = one
    return found


def _chart(view: PromptView) -> Chart:
    known = [one for one in view.attempts if one.version is not None]
    runs = sorted({one.run_name or "" for one in known})
    return Chart(
        "Reward by policy version",
        f"{len(known)} attempts of {len(runs)} runs",
        ("run", "version", "groups", "episodes", "mean reward", "lowest", "highest"),
        [astuple(one) for one in view.attempts],
        [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(f"{run or 'no run'}: {name}"),
                "x": [one.version for one in known if (one.run_name or "") == run],
                "y": [getattr(one, key) for one in known if (one.run_name or "") == run],
                "line": {"dash": dash},
            }
            for run in runs
            for name, key, dash in (("mean", "reward_mean", "solid"), ("best", "reward_max", "dot"))
        ],
        {
            "xaxis": axis("policy version", [it.version for it in known if it.version is not None]),
            "yaxis": axis("reward"),
        },
    )
