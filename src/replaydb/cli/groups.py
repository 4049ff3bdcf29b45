"""`replaydb groups`: what is stored, by group."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from replaydb.cli.console import (
    BufferName,
    Json,
    Url,
    print_fields,
    print_json,
    print_more,
    print_table,
    printable,
    with_buffer,
)
from replaydb.cli.episodes import FIELDS, facts_of, row_of
from replaydb.cli.selecting import (
    DEFAULT_LIMIT,
    AfterGroup,
    Ascending,
    GroupName,
    Limit,
    MaxReward,
    MinReward,
    PromptUid,
    Runs,
    Selection,
    Sort,
    Statuses,
    TagValues,
    Tasks,
    condition,
    info_of,
    ordered,
)
from replaydb.database.group_columns import col
from replaydb.errors import CorruptPayloadError, PayloadGoneError

if TYPE_CHECKING:
    from replaydb import Buffer, DrawInfo, Episode, GroupInfo

app = typer.Typer(help="List groups, and look at one.", no_args_is_help=True)

#: Draws of a group that are shown, the newest.
SHOWN_DRAWS = 100


@app.command("list")
def list_(
    url: Url,
    buffer: BufferName,
    task: Tasks = None,
    status: Statuses = None,
    run: Runs = None,
    prompt: PromptUid = None,
    min_reward: MinReward = None,
    max_reward: MaxReward = None,
    tag: TagValues = None,
    sort: Sort = "id",
    ascending: Ascending = False,
    limit: Limit = DEFAULT_LIMIT,
    after: AfterGroup = None,
    as_json: Json = False,
) -> None:
    """List groups, the newest first unless they are sorted; the reward is their mean."""
    where = condition(
        prompt,
        tag,
        None if min_reward is None else col.reward_mean >= min_reward,
        None if max_reward is None else col.reward_mean <= max_reward,
    )
    which = Selection(task, status, run, where, ordered(sort, ascending), after)
    found = with_buffer(url, buffer, lambda buffer: which.page(buffer, limit + 1))
    page = found[:limit]
    if as_json:
        print_json(page)
        return
    more = () if sort in _SHOWN else (sort,)
    print_table((*_SHOWN.values(), *more), [_row(info, more) for info in page])
    if len(found) > limit:
        print_more(page[-1].id)


#: Attributes that the list shows, and what it calls them.
_SHOWN = {
    "id": "group",
    "task_name": "task",
    "status": "status",
    "prompt_uid": "prompt",
    "num_episodes": "episodes",
    "num_tokens": "tokens",
    "reward_mean": "reward",
    "reward_std": "std",
    "staleness": "staleness",
    "times_sampled": "drawn",
    "priority": "priority",
    "created_at": "put",
}


def _row(info: GroupInfo, more: tuple[str, ...]) -> list[object]:
    return [getattr(info, name) for name in (*_SHOWN, *more)]


@app.command()
def show(url: Url, buffer: BufferName, group: GroupName, as_json: Json = False) -> None:
    """Show everything about a group: its scalars, its episodes, and the draws that took it."""
    info, episodes, problem, draws = with_buffer(url, buffer, lambda buffer: _life(buffer, group))
    if as_json:
        print_json(
            {
                "group": info,
                "episodes": None if episodes is None else [facts_of(one) for one in episodes],
                "draws": [_part(draw, info.id) for draw in draws],
            }
        )
        return
    print_fields(asdict(info))
    if episodes is None:
        typer.echo(f"its episodes cannot be read: {printable(problem)}")
    else:
        print_table(FIELDS, [row_of(i, one) for i, one in enumerate(episodes)])
    print_table(
        ("draw", "at", "run", "step", "probability", "weight", "staleness", "outcome", "reason"),
        [tuple(_part(draw, info.id).values())[:-1] for draw in draws],
    )
    if len(draws) == SHOWN_DRAWS:
        typer.echo(f"these are the last {SHOWN_DRAWS}; replaydb draws list has all")


async def _life(
    buffer: Buffer, name: str
) -> tuple[GroupInfo, tuple[Episode, ...] | None, str, list[DrawInfo]]:
    """A group, its episodes or why there are none, and its draws."""
    info = await info_of(buffer, name)
    draws = await buffer.draws(group_id=info.id, limit=SHOWN_DRAWS)
    try:
        [stored] = await buffer.get([info.id])
    except (CorruptPayloadError, PayloadGoneError) as error:
        return info, None, str(error), draws
    return info, tuple(stored.episodes), "", draws


def _part(draw: DrawInfo, group_id: int) -> dict[str, Any]:
    """What a draw has of one group."""
    place = draw.group_ids.index(group_id)
    return {
        "draw": draw.id,
        "drawn_at": draw.created_at,
        "run_name": draw.run_name,
        "step": draw.step,
        "probability": draw.probabilities[place],
        "weight": draw.weights[place],
        "staleness": draw.staleness[place],
        "outcome": draw.outcomes[place],
        "outcome_reason": draw.outcome_reasons[place],
        "outcome_at": draw.outcome_times[place],
    }
