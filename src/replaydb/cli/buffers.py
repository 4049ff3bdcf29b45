"""`replaydb buffers`: list buffers and show their statistics."""

from __future__ import annotations

import typer

from replaydb.cli.console import (
    BufferName,
    Json,
    Url,
    print_json,
    print_table,
    with_buffer,
    with_store,
)
from replaydb.util.display import human_size, printable

app = typer.Typer(help="List, show and delete buffers.", no_args_is_help=True)


@app.command("list")
def list_(url: Url, as_json: Json = False) -> None:
    """List the buffers."""
    found = with_store(url, lambda store: store.buffers())
    if as_json:
        print_json(found)
        return
    print_table(
        ("buffer", "groups", "policy version", "created"),
        [(info.name, info.num_groups, info.policy_version, info.created_at) for info in found],
    )


@app.command()
def show(url: Url, buffer: BufferName, as_json: Json = False) -> None:
    """Show the groups of a buffer by task and status, and counts of puts and draws per task."""
    found = with_buffer(url, buffer, lambda buffer: buffer.stats())
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"{printable(found.name)}: {found.num_groups} groups, policy version {found.policy_version}"
    )
    print_table(
        ("task", "status", "groups", "tokens", "size", "mean reward", "mean staleness"),
        [
            (
                total.task_name,
                total.status,
                total.num_groups,
                total.num_tokens,
                human_size(total.num_bytes),
                total.reward_mean,
                total.mean_staleness,
            )
            for total in found.totals
        ],
    )
    print_table(
        ("task", "groups put", "groups drawn", "completed", "max staleness"),
        [
            (
                task.task_name,
                task.num_inserted,
                task.num_sampled,
                task.num_available,
                task.max_staleness,
            )
            for task in found.tasks
        ],
    )
