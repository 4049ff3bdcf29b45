"""`replaydb buffers`, `stats` and `leases`: what is in a store, for people and for scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import Url, printable

if TYPE_CHECKING:
    from replaydb import BufferInfo, BufferStats, LeaseInfo

Name = Annotated[str, typer.Argument(help="Name of the buffer.")]
Json = Annotated[bool, typer.Option("--json", help="For scripts: JSON, in full precision.")]

#: How many ids of groups a line shows.
SHOWN_IDS = 8


def buffers(url: Url, as_json: Json = False) -> None:
    """List the buffers."""
    found = asyncio.run(_buffers(url))
    if as_json:
        _print_json([asdict(info) for info in found])
        return
    _print_table(
        ("buffer", "groups", "policy version", "created"),
        (
            (info.name, info.num_groups, info.policy_version, f"{info.created_at:%Y-%m-%d %H:%M}")
            for info in found
        ),
    )


def stats(
    url: Url,
    buffer: Name,
    as_json: Json = False,
) -> None:
    """Count what is in a buffer: its groups by task and status, and what was drawn."""
    found = asyncio.run(_stats(url, buffer))
    if as_json:
        _print_json(asdict(found))
        return
    typer.echo(
        f"{printable(found.name)}: {found.num_groups} groups, policy version {found.policy_version}"
    )
    _print_table(
        ("task", "status", "groups", "tokens", "bytes", "mean reward", "mean staleness"),
        (
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
        ),
    )
    _print_table(
        ("task", "ever put", "ever drawn", "samplable now", "max staleness"),
        (
            (
                task.task_name,
                task.num_inserted,
                task.num_sampled,
                task.num_available,
                task.max_staleness,
            )
            for task in found.tasks
        ),
    )


def leases(url: Url, buffer: Name, as_json: Json = False) -> None:
    """List who holds groups of a buffer, of which trainer step, and until when."""
    found = asyncio.run(_leases(url, buffer))
    if as_json:
        _print_json([asdict(info) for info in found])
        return
    _print_table(
        ("lease", "owner", "step", "groups", "ids", "since", "until"),
        (
            (
                info.id,
                info.owner,
                info.step,
                info.num_groups,
                ", ".join(map(str, info.group_ids[:SHOWN_IDS]))
                + (" ..." if info.num_groups > SHOWN_IDS else ""),
                f"{info.acquired_at:%Y-%m-%d %H:%M:%S}",
                f"{info.expires_at:%Y-%m-%d %H:%M:%S}",
            )
            for info in found
        ),
    )


def revoke(
    url: Url,
    buffer: Name,
    lease: Annotated[int, typer.Argument(help="Id of the lease, as `replaydb leases` shows it.")],
    reason: Annotated[str | None, typer.Option(help="Kept as the reason of its groups.")] = None,
) -> None:
    """Take back what a lease holds, at once, so that others are given it."""
    ids = asyncio.run(_revoke(url, buffer, lease, reason))
    typer.echo(f"{len(ids)} groups came back" if ids else f"lease {lease} holds nothing")


async def _buffers(url: str) -> list[BufferInfo]:
    from replaydb import Store

    async with Store.open(url, read_only=True) as store:
        return await store.buffers()


async def _stats(url: str, name: str) -> BufferStats:
    from replaydb import Store

    async with Store.open(url, read_only=True) as store:
        return await (await store.buffer(name, create=False)).stats()


async def _leases(url: str, name: str) -> list[LeaseInfo]:
    from replaydb import Store

    async with Store.open(url, read_only=True) as store:
        return await (await store.buffer(name, create=False)).leases()


async def _revoke(url: str, name: str, lease_id: int, reason: str | None) -> list[int]:
    from replaydb import Store

    async with Store.open(url, migrate=False) as store:
        return await (await store.buffer(name, create=False)).revoke(lease_id, reason=reason)


def _print_json(value: object) -> None:
    # ASCII: JSON escapes all that is not, and with it what a terminal would obey.
    text = json.dumps(value, indent=2, default=datetime.isoformat)
    typer.echo(text.replace("\x7f", "\\u007f"))


def _print_table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=box.SIMPLE)
    for row in rows:
        # Names are shown as they are, also where they look like markup of rich.
        table.add_row(*(Text(_shown(value)) for value in row))
    Console().print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
