"""`replaydb trajectories`: list unfinished trajectories, and end claims of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from replaydb.cli.console import BufferName, Json, Url, print_json, print_table, with_buffer
from replaydb.cli.selecting import Tasks, info_of, with_known
from replaydb.errors import ClaimExpiredError

if TYPE_CHECKING:
    from replaydb import Buffer, TrajectoryInfo

app = typer.Typer(help="List unfinished trajectories, and end claims.", no_args_is_help=True)

Group = Annotated[
    list[str] | None,
    typer.Option("--group", help="Id or uid of a group, of any status (repeatable)."),
]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number of trajectories.")]


@app.command("list")
def list_(
    url: Url,
    buffer: BufferName,
    task: Tasks = None,
    group: Group = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List what pending groups lack: episodes, or values of them; the oldest groups first."""

    async def listed(opened: Buffer) -> list[TrajectoryInfo]:
        uids = [(await info_of(opened, name)).group_uid for name in group or ()]
        return await opened.trajectories(tasks=task or None, uids=uids or None, limit=limit)

    found = with_known(url, buffer, listed, tasks=task)
    if as_json:
        print_json(found)
        return
    print_table(
        (
            *("group", "task", "position", "missing", "turns", "attempts"),
            *("claim", "owner", "expires", "unusable"),
        ),
        [
            (
                one.group_uid,
                one.task_name,
                one.position,
                one.missing,
                one.num_turns,
                one.attempts,
                one.claim_uid,
                one.claimed_by,
                one.expires_at,
                one.unusable_reason,
            )
            for one in found
        ],
    )


@app.command()
def release(
    url: Url,
    buffer: BufferName,
    claim: Annotated[str, typer.Argument(help="Uid of the claim.")],
    reason: Annotated[str, typer.Option(help="Reason to record.")] = "released by replaydb",
) -> None:
    """End a claim, whichever process has it, so that its trajectories can be claimed again."""
    try:
        with_buffer(
            url, buffer, lambda buffer: buffer.release_claim(claim, reason=reason), write=True
        )
    except ClaimExpiredError:
        typer.echo(f"claim {claim} had ended before")
    else:
        typer.echo(f"claim {claim} has ended")
