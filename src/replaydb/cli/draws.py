"""`replaydb draws`: list and show recorded draws and their outcomes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import (
    BufferName,
    Json,
    Url,
    print_fields,
    print_json,
    print_more,
    print_table,
    with_buffer,
)
from replaydb.cli.selecting import DEFAULT_LIMIT, MAX_ID, Limit, Runs, with_known
from replaydb.errors import UnknownDrawError

if TYPE_CHECKING:
    from replaydb import Buffer, DrawInfo

app = typer.Typer(help="List and show recorded draws.", no_args_is_help=True)


@app.command("list")
def list_(
    url: Url,
    buffer: BufferName,
    step: Annotated[
        int | None, typer.Option(min=0, max=MAX_ID, help="Filter by trainer step.")
    ] = None,
    run: Runs = None,
    group: Annotated[
        int | None,
        typer.Option(metavar="ID", min=0, max=MAX_ID, help="Filter by group id."),
    ] = None,
    limit: Limit = DEFAULT_LIMIT,
    after: Annotated[
        int | None,
        typer.Option(
            metavar="ID",
            min=0,
            max=MAX_ID,
            help="Show draws older than this one: the last id of the previous page.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List draws, newest first."""
    found = with_known(
        url,
        buffer,
        lambda buffer: buffer.draws(
            step=step, runs=run or None, group_id=group, before=after, limit=limit + 1
        ),
        runs=run,
    )
    page = found[:limit]
    if as_json:
        print_json(page)
        return
    print_table(
        ("draw", "at", "run", "step", "strategy", "groups", "outcomes", "mean staleness"),
        [
            (
                draw.id,
                draw.created_at,
                draw.run_name,
                draw.step,
                draw.policy,
                len(draw.group_ids),
                _outcomes(draw),
                _mean_staleness(draw),
            )
            for draw in page
        ],
    )
    if len(found) > limit:
        print_more(page[-1].id)


@app.command()
def show(
    url: Url,
    buffer: BufferName,
    draw: Annotated[int, typer.Argument(min=0, max=MAX_ID, help="Id of the draw.")],
    as_json: Json = False,
) -> None:
    """Show the groups of a draw: probability, weight, staleness and outcome."""
    record = with_buffer(url, buffer, lambda buffer: _record(buffer, draw))
    if as_json:
        print_json(record)
        return
    print_fields(
        {
            "draw": record.id,
            "at": record.created_at,
            "run": record.run_name,
            "step": record.step,
            "strategy": record.policy,
            "groups": len(record.group_ids),
        }
    )
    tasks = (
        name or ("replaced" if times is None else "deleted")
        for name, times in zip(record.task_names, record.times_replaced, strict=True)
    )
    print_table(
        (
            *("group", "task", "prompt", "reward", "probability", "weight", "staleness"),
            *("outcome", "reason", "outcome at"),
        ),
        zip(
            record.group_ids,
            tasks,
            record.prompt_uids,
            record.reward_means,
            record.probabilities,
            record.weights,
            record.staleness,
            record.outcomes,
            record.outcome_reasons,
            record.outcome_times,
            strict=True,
        ),
    )


async def _record(buffer: Buffer, draw_id: int) -> DrawInfo:
    found = await buffer.draws(before=draw_id + 1, limit=1)
    if not found or found[0].id != draw_id:
        raise UnknownDrawError(draw_id)
    return found[0]


def _outcomes(draw: DrawInfo) -> str:
    counts = Counter(outcome or "unknown" for outcome in draw.outcomes)
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))


def _mean_staleness(draw: DrawInfo) -> float | None:
    known = [one for one in draw.staleness if one is not None]
    return sum(known) / len(known) if known else None
