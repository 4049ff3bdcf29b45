"""`replaydb groups`: list and show groups."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from replaydb.cli.console import (
    BufferName,
    Json,
    Url,
    print_fields,
    print_json,
    print_list,
    print_more,
    print_table,
    with_buffer,
)
from replaydb.cli.episodes import FIELDS, facts_of, placed, row_of, values_of
from replaydb.cli.selecting import (
    DEFAULT_LIMIT,
    AfterGroup,
    Ascending,
    GroupName,
    Limit,
    Runs,
    Selection,
    Sort,
    Statuses,
    Tasks,
    Where,
    condition,
    info_of,
    ordered,
    with_known,
)
from replaydb.errors import CorruptPayloadError, PayloadGoneError
from replaydb.util.display import printable

if TYPE_CHECKING:
    from replaydb import Buffer, DrawInfo, GroupInfo, StoredGroup

app = typer.Typer(help="List, show and delete groups.", no_args_is_help=True)

#: Maximum number of draws shown for a group, newest first.
SHOWN_DRAWS = 100


@app.command("list")
def list_(
    url: Url,
    buffer: BufferName,
    task: Tasks = None,
    status: Statuses = None,
    run: Runs = None,
    where: Where = None,
    sort: Sort = "id",
    ascending: Ascending = False,
    limit: Limit = DEFAULT_LIMIT,
    after: AfterGroup = None,
    as_json: Json = False,
) -> None:
    """List groups, newest first by default. Rewards are means over the episodes of a group."""
    which = Selection(task, status, run, condition(where), ordered(sort, ascending), after)
    found = with_known(
        url, buffer, lambda buffer: which.page(buffer, limit + 1), tasks=task, runs=run
    )
    page = found[:limit]
    if as_json:
        print_json(page)
        return
    more = () if sort in _SHOWN else (sort,)
    print_list(
        (*_SHOWN.values(), *more),
        [[getattr(info, name) for name in (*_SHOWN, *more)] for info in page],
        spare=[heading for heading in _SPARE if heading != _SHOWN.get(sort)],
        cut=("task", "prompt"),
    )
    if len(found) > limit:
        print_more(page[-1].id)


#: Attributes that the list shows, with their headings.
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
    "times_sampled": "draws",
    "priority": "priority",
    "created_at": "created",
}

#: Columns to omit in a narrow terminal, in this order.
_SPARE = ("created", "priority", "draws", "tokens", "std", "staleness", "prompt", "episodes")


@app.command()
def show(url: Url, buffer: BufferName, group: GroupName, as_json: Json = False) -> None:
    """Show a group: its attributes, prompt, episodes, and the draws that took it.

    --json also prints its extras, and the bytes of token extras that are stored again for tokens
    that turns or episodes share. Without it, no extras are read.
    """
    fields = None if as_json else ()
    info, stored, problem, draws = with_buffer(
        url, buffer, lambda buffer: _details(buffer, group, fields)
    )
    prompt = None if stored is None else stored.prompt
    ids = None if stored is None or stored.prompt_ids is None else stored.prompt_ids.tolist()
    context = {"prompt": prompt, "prompt_ids": ids}
    if as_json:
        print_json(
            {
                "group": info,
                **context,
                "extras": None if stored is None else values_of(stored.extras),
                "repeated_bytes": None if stored is None else stored.repeated_bytes,
                "episodes": None
                if stored is None
                else [{"position": at, **facts_of(one)} for at, one in placed(stored)],
                "draws": [_entry(draw, info.id) for draw in draws],
            }
        )
        return
    if stored is None:
        print_fields(asdict(info))
        typer.echo(f"episodes cannot be read: {printable(problem)}")
    else:
        print_fields({**asdict(info), **context})
        print_table(FIELDS, [row_of(at, one) for at, one in placed(stored)])
    print_table(
        ("draw", "at", "run", "step", "probability", "weight", "staleness", "outcome", "reason"),
        [tuple(_entry(draw, info.id).values())[:-1] for draw in draws],
    )
    if len(draws) == SHOWN_DRAWS:
        typer.echo(f"last {SHOWN_DRAWS} draws; `replaydb draws list` prints all")


async def _details(
    buffer: Buffer, name: str, fields: Collection[str] | None
) -> tuple[GroupInfo, StoredGroup | None, str, list[DrawInfo]]:
    """Return the group, its content or the reason that it cannot be read, and its draws.

    `fields`: names of the extras to read; None: all.
    """
    info = await info_of(buffer, name)
    draws = await buffer.draws(group_id=info.id, limit=SHOWN_DRAWS)
    try:
        [stored] = await buffer.get([info.id], fields=fields)
    except (CorruptPayloadError, PayloadGoneError) as error:
        return info, None, str(error), draws
    return info, stored, "", draws


def _entry(draw: DrawInfo, group_id: int) -> dict[str, Any]:
    """Return the entry of one group in a draw."""
    index = draw.group_ids.index(group_id)
    return {
        "draw": draw.id,
        "drawn_at": draw.created_at,
        "run_name": draw.run_name,
        "step": draw.step,
        "probability": draw.probabilities[index],
        "weight": draw.weights[index],
        "staleness": draw.staleness[index],
        "outcome": draw.outcomes[index],
        "outcome_reason": draw.outcome_reasons[index],
        "outcome_at": draw.outcome_times[index],
    }
