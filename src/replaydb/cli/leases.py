"""`replaydb leases`: list, show and revoke leases."""

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

app = typer.Typer(help="List, show and revoke leases.", no_args_is_help=True)

LeaseId = Annotated[int, typer.Argument(min=0, max=MAX_ID, help="Id of the lease.")]


#: Columns to sort leases by; each value is the name in lower case.
Column = StrEnum("Column", ["ID", "OWNER", "STEP", "NUM_GROUPS", "ACQUIRED_AT", "EXPIRES_AT"])
#: Maximum number of group ids shown for a lease.
SHOWN_IDS = 8


@app.command("list")
def list_(
    url: Url,
    buffer: BufferName,
    owner: Annotated[str | None, typer.Option(help="Filter by owner.")] = None,
    sort: Annotated[Column, typer.Option(help=SORTED_BY)] = Column.ID,
    ascending: Ascending = False,
    as_json: Json = False,
) -> None:
    """List active leases with owner, trainer step, groups and expiry, newest first by default."""
    leases = with_buffer(url, buffer, lambda buffer: buffer.leases())
    mine = [info for info in leases if owner is None or info.owner == owner]
    found = in_order(mine, sort, ascending=ascending)
    if as_json:
        print_json(found)
        return
    print_table(
        ("lease", "owner", "step", "groups", "ids", "acquired", "expires"),
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
    """Show a lease and its groups."""
    info, groups = with_buffer(url, buffer, lambda buffer: _leased(buffer, lease))
    if as_json:
        print_json({"lease": info, "groups": groups})
        return
    print_fields(
        {
            "lease": info.id,
            "owner": info.owner,
            "step": info.step,
            "draw": info.draw_id,
            "acquired": info.acquired_at,
            "expires": info.expires_at,
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
    reason: Annotated[str | None, typer.Option(help="Reason to record for its groups.")] = None,
) -> None:
    """Revoke a lease and return its groups to the buffer now."""
    ids = with_buffer(url, buffer, lambda buffer: buffer.revoke(lease, reason=reason), write=True)
    typer.echo(f"returned {len(ids)} groups" if ids else f"lease {lease} has no groups")


async def _leased(buffer: Buffer, lease_id: int) -> tuple[LeaseInfo, list[GroupInfo]]:
    for info in await buffer.leases():
        if info.id == lease_id:
            return info, await buffer.find(info.group_ids)
    raise LeaseExpiredError(lease_id)
