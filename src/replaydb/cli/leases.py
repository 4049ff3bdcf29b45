"""`replaydb leases`: who holds what."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import (
    BufferName,
    Json,
    Url,
    print_fields,
    print_json,
    print_table,
    with_buffer,
)
from replaydb.cli.selecting import MAX_ID, SORTED_BY, Ascending, in_order
from replaydb.errors import LeaseExpiredError

if TYPE_CHECKING:
    from replaydb import Buffer, GroupInfo, LeaseInfo

app = typer.Typer(help="List leases, look at one, or take it back.", no_args_is_help=True)

LeaseId = Annotated[int, typer.Argument(min=0, max=MAX_ID, help="Id of the lease.")]


class Column(StrEnum):
    """What leases can be sorted by."""

    ID = "id"
    OWNER = "owner"
    STEP = "step"
    NUM_GROUPS = "num_groups"
    ACQUIRED_AT = "acquired_at"
    EXPIRES_AT = "expires_at"


#: How many ids of groups a line shows.
SHOWN_IDS = 8


@app.command("list")
def list_(
    url: Url,
    buffer: BufferName,
    owner: Annotated[str | None, typer.Option(help="Only those of this owner.")] = None,
    sort: Annotated[Column, typer.Option(help=SORTED_BY)] = Column.ID,
    ascending: Ascending = False,
    as_json: Json = False,
) -> None:
    """List who holds groups of a buffer, of which trainer step, and until when."""
    leases = with_buffer(url, buffer, lambda buffer: buffer.leases())
    mine = [info for info in leases if owner is None or info.owner == owner]
    found = in_order(mine, sort, ascending=ascending)
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


@app.command()
def show(url: Url, buffer: BufferName, lease: LeaseId, as_json: Json = False) -> None:
    """Show the groups that a lease holds."""
    info, groups = with_buffer(url, buffer, lambda buffer: _held(buffer, lease))
    if as_json:
        print_json({"lease": info, "groups": groups})
        return
    print_fields(
        {
            "lease": info.id,
            "owner": info.owner,
            "step": info.step,
            "draw": info.draw_id,
            "since": info.acquired_at,
            "until": info.expires_at,
        }
    )
    print_table(
        ("group", "task", "prompt", "episodes", "tokens", "reward", "staleness", "attempts"),
        [
            (
                group.id,
                group.task_name,
                group.prompt_uid,
                group.num_episodes,
                group.num_tokens,
                group.reward_mean,
                group.staleness,
                group.attempts,
            )
            for group in groups
        ],
    )


@app.command()
def revoke(
    url: Url,
    buffer: BufferName,
    lease: LeaseId,
    reason: Annotated[str | None, typer.Option(help="Kept as the reason of its groups.")] = None,
) -> None:
    """Take back what a lease holds, at once, so that others are given it."""
    ids = with_buffer(url, buffer, lambda buffer: buffer.revoke(lease, reason=reason), write=True)
    typer.echo(f"{len(ids)} groups came back" if ids else f"lease {lease} holds nothing")


async def _held(buffer: Buffer, lease_id: int) -> tuple[LeaseInfo, list[GroupInfo]]:
    for info in await buffer.leases():
        if info.id == lease_id:
            return info, await buffer.find(info.group_ids)
    raise LeaseExpiredError(lease_id)
