"""`replaydb groups|buffers|runs delete` and `prune`: delete data, history by age, and packs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import replaydb as rdb
from replaydb.cli.console import (
    BufferName,
    Url,
    Yes,
    console,
    finite,
    progress,
    with_buffer,
    with_store,
)
from replaydb.cli.selecting import (
    Buffers,
    Runs,
    Statuses,
    Where,
    check_known,
    condition,
    info_of,
)
from replaydb.domain.episodes import GroupStatus
from replaydb.util.display import human_size, printable

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from replaydb import Buffer, PruneReport, Store
    from replaydb.operations import Removal
    from replaydb.util.progress import Progress

#: Number of groups that are read at once.
PAGE = 1000
DAY_SECONDS = 86_400.0


def delete_groups(
    url: Url,
    buffer: BufferName,
    group: Annotated[
        list[str] | None, typer.Argument(help="Ids or uids of the groups; none with --where: all.")
    ] = None,
    where: Where = None,
    yes: Yes = False,
) -> None:
    """Delete groups of any status, with their episodes and payloads."""
    from replaydb.database.filters.compiling import all_of

    wanted = condition(where)
    if wanted is None and not group:
        raise typer.BadParameter("one of these is required", param_hint="GROUP, --where")

    async def find(opened: Buffer) -> tuple[ColumnElement[bool] | None, Counter[str]]:
        ids = [(await info_of(opened, name)).id for name in group or ()]
        which = all_of([wanted, rdb.col.id.in_(ids) if group else None])
        total: Counter[str] = Counter()
        page = await opened.find(where=which, limit=PAGE)
        while page:
            total["groups"] += len(page)
            total["bytes"] += sum(info.num_bytes for info in page)
            total["leased"] += sum(info.lease_id is not None for info in page)
            positions = {one.group_uid: one.expected_episodes or 0 for one in page}
            open_ones = await opened.trajectories(
                uids=[*positions], limit=sum(positions.values()) + 1
            )
            claimed = {one.group_uid for one in open_ones if one.claim_uid is not None}
            total["claimed"] += len(claimed)
            page = await opened.find(where=which, limit=PAGE, after=page[-1])
        return which, total

    which, total = with_buffer(url, buffer, find)
    shown = f"{total['groups']} groups, {human_size(total['bytes'])}"
    for state in ("leased", "claimed"):
        if total[state]:
            shown += f"; {total[state]} of them are {state}"
    _confirm(shown, yes)
    number = with_buffer(url, buffer, lambda opened: opened.delete(where=which), write=True)
    typer.echo(f"deleted {number} groups")


def delete_buffers(url: Url, buffer: BufferName, yes: Yes = False) -> None:
    """Delete a buffer: its groups, draws, leases, cursors and settings."""
    from replaydb.operations import delete_buffer

    _remove(url, f"buffer {printable(buffer)}", partial(delete_buffer, name=buffer), yes)


def delete_runs(
    url: Url,
    run: Annotated[str, typer.Argument(help="Name of the run; it must have ended.")],
    yes: Yes = False,
) -> None:
    """Delete a run with the groups that it put, in every buffer, and its draws."""
    from replaydb.operations import delete_run

    _remove(url, f"run {printable(run)}", partial(delete_run, name=run), yes)


def prune(
    url: Url,
    groups_days: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=finite,
            help="Delete groups put more than this many days ago (only archived ones, unless"
            " --status is given).",
        ),
    ] = None,
    status: Statuses = None,
    where: Where = None,
    draws_days: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=finite,
            help="Delete records of draws made more than this many days ago.",
        ),
    ] = None,
    buffer: Buffers = None,
    run: Runs = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete; without it, only report.")
    ] = False,
    min_hours: Annotated[
        float,
        typer.Option(
            min=2.0, callback=finite, help="Skip packs written less than this many hours ago."
        ),
    ] = 24.0,
) -> None:
    """Delete groups and draws by age, or unreferenced packs from the payload store.

    Without --groups-days and --draws-days, packs are pruned. Only reports what it would delete,
    unless --remove is given.
    """
    if groups_days is None and draws_days is None:
        if status or buffer or run or where is not None:
            raise typer.BadParameter(
                "--status, --where, --buffer and --run require one of these",
                param_hint="--groups-days, --draws-days",
            )
        _prune_packs(url, remove=remove, min_hours=min_hours)
        return
    if (status or where is not None) and groups_days is None:
        option = "--status" if status else "--where"
        raise typer.BadParameter(f"required with {option}", param_hint="--groups-days")
    wanted = condition(where)

    async def work(store: Store, dry_run: bool, show: Progress | None) -> list[Removal]:
        from replaydb.operations import prune_draws, prune_groups

        await check_known(store, buffer, runs=run)
        common: dict[str, Any] = {
            "names": buffer or None,
            "runs": run or None,
            "dry_run": dry_run,
            "progress": show,
        }
        done = []
        if groups_days is not None:
            age = DAY_SECONDS * groups_days or None
            which = status or [GroupStatus.ARCHIVED]
            done.append(
                await prune_groups(store, statuses=which, min_age=age, where=wanted, **common)
            )
        if draws_days is not None:
            age = DAY_SECONDS * draws_days or None
            done.append(await prune_draws(store, min_age=age, **common))
        return done

    if not remove:
        found = with_store(url, lambda store: work(store, True, None))
        typer.echo("\n".join(f"to delete: {_described(one)}" for one in found))
        typer.echo("dry run, nothing deleted; use --remove to delete")
        return
    with progress("deleting") as show:
        found = with_store(url, lambda store: work(store, False, show), write=True)
    typer.echo("\n".join(f"deleted: {_described(one)}" for one in found))


def _prune_packs(url: str, *, remove: bool, min_hours: float) -> None:
    with console(stderr=True).status("scanning packs") as status:

        def show(report: PruneReport) -> None:
            status.update(f"{report.num_packs} packs, {human_size(report.freed_bytes)} to remove")

        report = with_store(
            url,
            lambda store: store.prune(
                dry_run=not remove, min_age=3600.0 * min_hours, progress=show
            ),
            write=remove,
        )
    removed, compacted = ("removed", "compacted") if remove else ("to remove", "to compact")
    marked = "marked for deletion" if remove else "to mark for deletion"
    typer.echo(f"{report.num_packs} packs, {human_size(report.num_bytes)}")
    lines = (
        (report.num_orphans, f"orphaned: {removed},", report.orphan_bytes),
        (report.num_marked, f"unreferenced, grace period over: {removed},", report.marked_bytes),
        (report.num_unmarked, f"unreferenced, not yet marked: {marked},", report.unmarked_bytes),
        (report.num_compacted, f"mostly unreferenced: {compacted}, saving", report.compacted_bytes),
    )
    for count, what, num_bytes in lines:
        typer.echo(f"  {count} {what} {human_size(num_bytes)}")
    if report.num_damaged:
        typer.echo(f"  {report.num_damaged} damaged: skipped")
    if report.refused:
        typer.echo(f"dry run, nothing removed; --remove is refused: {printable(report.refused)}")
    elif not remove and report.freed_bytes:
        typer.echo(
            f"dry run, nothing removed; use --remove to free {human_size(report.freed_bytes)}"
        )


def _remove(
    url: str, what: str, delete: Callable[..., Coroutine[Any, Any, Removal]], yes: bool
) -> None:
    expected = with_store(url, lambda store: delete(store, dry_run=True))
    _confirm(f"{what}: {_described(expected)}", yes)
    with progress("deleting") as show:
        done = with_store(url, lambda store: delete(store, progress=show), write=True)
    typer.echo(f"deleted: {_described(done)}")


def _described(removal: Removal) -> str:
    """Return the counts and sizes of a removal as text."""
    size = human_size(removal.num_bytes)
    return f"{removal.num_groups} groups, {size}; {removal.num_draws} draws"


def _confirm(what: str, yes: bool) -> None:
    if not yes:
        typer.confirm(f"{what}\nDelete permanently?", abort=True)
