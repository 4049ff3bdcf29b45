"""`replaydb buffers`, `stats` and `leases`: what is in a store, for people and for scripts."""

from __future__ import annotations

from typing import Annotated

import typer

from replaydb.cli.console import (
    BufferName,
    Json,
    Url,
    print_json,
    print_table,
    printable,
    with_buffer,
    with_store,
)

#: How many ids of groups a line shows.
SHOWN_IDS = 8


def buffers(url: Url, as_json: Json = False) -> None:
    """List the buffers."""
    found = with_store(url, lambda store: store.buffers())
    if as_json:
        print_json(found)
        return
    print_table(
        ("buffer", "groups", "policy version", "created"),
        [(info.name, info.num_groups, info.policy_version, info.created_at) for info in found],
    )


def stats(url: Url, buffer: BufferName, as_json: Json = False) -> None:
    """Count what is in a buffer: its groups by task and status, and what was drawn."""
    found = with_buffer(url, buffer, lambda buffer: buffer.stats())
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"{printable(found.name)}: {found.num_groups} groups, policy version {found.policy_version}"
    )
    print_table(
        ("task", "status", "groups", "tokens", "bytes", "mean reward", "mean staleness"),
        [
            (
                total.task_name,
                total.status,
                total.num_groups,
                total.num_tokens,
                total.num_bytes,
                total.reward_mean,
                total.mean_staleness,
            )
            for total in found.totals
        ],
    )
    print_table(
        ("task", "ever put", "ever drawn", "samplable now", "max staleness"),
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


def leases(url: Url, buffer: BufferName, as_json: Json = False) -> None:
    """List who holds groups of a buffer, of which trainer step, and until when."""
    found = with_buffer(url, buffer, lambda buffer: buffer.leases())
    if as_json:
        print_json(found)
        return
    print_table(
        ("lease", "owner", "step", "groups", "ids", "since", "until"),
        [
            (
                info.id,
                info.owner,
                info.step,
                info.num_groups,
                ", ".join(map(str, info.group_ids[:SHOWN_IDS]))
                + (" ..." if info.num_groups > SHOWN_IDS else ""),
                info.acquired_at,
                info.expires_at,
            )
            for info in found
        ],
    )


def revoke(
    url: Url,
    buffer: BufferName,
    lease: Annotated[int, typer.Argument(help="Id of the lease, as `replaydb leases` shows it.")],
    reason: Annotated[str | None, typer.Option(help="Kept as the reason of its groups.")] = None,
) -> None:
    """Take back what a lease holds, at once, so that others are given it."""
    ids = with_buffer(url, buffer, lambda buffer: buffer.revoke(lease, reason=reason), write=True)
    typer.echo(f"{len(ids)} groups came back" if ids else f"lease {lease} holds nothing")
