"""`replaydb runs`: list and show runs, the jobs that put and draw."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

import replaydb as rdb
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

if TYPE_CHECKING:
    from replaydb import RunInfo, Store

app = typer.Typer(help="List, show and delete runs.", no_args_is_help=True)

#: Columns to sort runs by; each value is the name in lower case.
Column = StrEnum("Column", ["ID", "NAME", "LINEAGE", "STARTED_AT"])


@app.command("list")
def list_(
    url: Url,
    lineage: Annotated[str | None, typer.Option(help="Filter by lineage.")] = None,
    sort: Annotated[Column, typer.Option(help=SORTED_BY)] = Column.ID,
    ascending: Ascending = False,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """List runs (training and generation jobs), newest first by default."""
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
        typer.echo(f"{len(found) - limit} more rows: --limit {len(found)}")


@app.command()
def show(
    url: Url,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    as_json: Json = False,
) -> None:
    """Show a run: metadata, groups for each buffer, last draws."""
    info, shares = with_store(url, lambda store: _usage(store, run))
    if as_json:
        print_json({"run": info, "buffers": shares})
        return
    print_fields(asdict(info))
    print_table(
        ("buffer", "groups", "last draw", "step", "at"),
        [tuple(share.values()) for share in shares],
    )


async def _usage(store: Store, name: str) -> tuple[RunInfo, list[dict[str, Any]]]:
    """Return a run, and its groups and last draw in every buffer that has any."""
    run = run_of(await store.runs(), name)
    shares = []
    for info in await store.buffers():
        buffer = await store.buffer(info.name, create=False)
        num_groups = await buffer.count(where=rdb.col.run_id == run.id)
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
