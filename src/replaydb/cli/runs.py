"""`replaydb runs`: the jobs that put and drew."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaydb.cli.console import (
    Json,
    Url,
    print_fields,
    print_json,
    print_table,
    with_store,
)
from replaydb.cli.selecting import (
    DEFAULT_LIMIT,
    SORTED_BY,
    Ascending,
    Limit,
    in_order,
    run_of,
)
from replaydb.database.group_columns import col

if TYPE_CHECKING:
    from replaydb import RunInfo, Store

app = typer.Typer(help="List runs, and look at one.", no_args_is_help=True)


class Column(StrEnum):
    """What runs can be sorted by."""

    ID = "id"
    NAME = "name"
    LINEAGE = "lineage"
    STARTED_AT = "started_at"


@app.command("list")
def list_(
    url: Url,
    lineage: Annotated[str | None, typer.Option(help="Only those of this lineage.")] = None,
    sort: Annotated[Column, typer.Option(help=SORTED_BY)] = Column.ID,
    ascending: Ascending = False,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """List the training and generation jobs, the newest first unless they are sorted."""
    runs = with_store(url, lambda store: store.runs())
    mine = [info for info in runs if lineage is None or info.lineage == lineage]
    found = in_order(mine, sort, ascending=ascending)
    if as_json:
        print_json(found[:limit])
        return
    print_table(
        ("run", "lineage", "started"),
        [(info.name, info.lineage, info.started_at) for info in found[:limit]],
    )
    if len(found) > limit:
        typer.echo(f"{len(found) - limit} more: --limit {len(found)}")


@app.command()
def show(
    url: Url,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    as_json: Json = False,
) -> None:
    """Show a run: what it came with, what it put where, and what it drew last."""
    info, shares = with_store(url, lambda store: _shares(store, run))
    if as_json:
        print_json({"run": info, "buffers": shares})
        return
    print_fields(asdict(info))
    print_table(
        ("buffer", "groups of it", "last draw", "of step", "at"),
        [tuple(share.values()) for share in shares],
    )


async def _shares(store: Store, name: str) -> tuple[RunInfo, list[dict[str, Any]]]:
    """A run, and what there is of it in every buffer where there is something."""
    run = run_of(await store.runs(), name)
    shares = []
    for info in await store.buffers():
        buffer = await store.buffer(info.name, create=False)
        num_groups = await buffer.count(where=col.run_id == run.id)
        draws = await buffer.draws(runs=name, limit=1)
        last = draws[0] if draws else None
        if num_groups or last:
            shares.append(
                {
                    "buffer_name": info.name,
                    "num_groups": num_groups,
                    "last_draw": last and last.id,
                    "last_step": last and last.step,
                    "last_drawn_at": last and last.created_at,
                }
            )
    return run, shares
