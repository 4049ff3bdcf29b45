"""`replaydb prune`: history, and what a folder or object store holds for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaydb.cli.console import Url, console, progress, with_store
from replaydb.cli.delete import told
from replaydb.cli.selecting import Runs, Statuses, check_known
from replaydb.display import human_size
from replaydb.episodes import GroupStatus

if TYPE_CHECKING:
    from replaydb import PruneReport, Store
    from replaydb.operations.removal import Progress, Removal

DAY_SECONDS = 86_400.0


def prune(
    url: Url,
    groups_days: Annotated[
        float | None,
        typer.Option(min=0.0, help="Groups that were put so many days ago; archived ones."),
    ] = None,
    status: Statuses = None,
    draws_days: Annotated[
        float | None,
        typer.Option(min=0.0, help="The record of draws that were made so many days ago."),
    ] = None,
    buffer: Annotated[
        list[str] | None, typer.Option(help="Only groups and draws of this buffer, or these.")
    ] = None,
    run: Runs = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Do it; without this it only says what it would do.")
    ] = False,
    min_hours: Annotated[
        float, typer.Option(min=2.0, help="Leave alone packs that were written more recently.")
    ] = 24.0,
) -> None:
    """Delete history by age; without days: payloads outside the database that belong to nothing."""
    if groups_days is None and draws_days is None:
        if status or buffer or run:
            raise typer.BadParameter(
                "--status, --buffer and --run take one of these beside them",
                param_hint="--groups-days, --draws-days",
            )
        _prune_packs(url, remove=remove, min_hours=min_hours)
        return
    if status and groups_days is None:
        raise typer.BadParameter("is needed beside --status", param_hint="--groups-days")

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
            done.append(await prune_groups(store, statuses=which, min_age=age, **common))
        if draws_days is not None:
            age = DAY_SECONDS * draws_days or None
            done.append(await prune_draws(store, min_age=age, **common))
        return done

    if not remove:
        found = with_store(url, lambda store: work(store, True, None))
        typer.echo("\n".join(f"to delete: {told(one)}" for one in found))
        typer.echo("nothing was changed; --remove deletes it")
        return
    with progress("deleting") as show:
        found = with_store(url, lambda store: work(store, False, show), write=True)
    typer.echo("\n".join(f"deleted: {told(one)}" for one in found))


def _prune_packs(url: str, *, remove: bool, min_hours: float) -> None:
    with console(stderr=True).status("looking") as status:

        def show(report: PruneReport) -> None:
            status.update(f"{report.num_packs} packs, {human_size(report.freed_bytes)} for nothing")

        report = with_store(
            url,
            lambda store: store.prune(
                dry_run=not remove, min_age=3600.0 * min_hours, progress=show
            ),
            write=remove,
        )
    removed, written = ("removed", "written anew") if remove else ("to remove", "to write anew")
    marked = "marked for deletion" if remove else "to mark for deletion"
    typer.echo(f"{report.num_packs} packs, {human_size(report.num_bytes)}")
    lines = (
        (report.num_orphans, f"belong to nothing: {removed},", report.orphan_bytes),
        (report.num_condemned, f"are used up: {removed},", report.condemned_bytes),
        (report.num_unmarked, f"are used up, but not marked: {marked},", report.unmarked_bytes),
        (report.num_compacted, f"are mostly dead: {written} without", report.compacted_bytes),
    )
    for count, what, num_bytes in lines:
        typer.echo(f"  {count} {what} {human_size(num_bytes)}")
    if report.num_damaged:
        typer.echo(f"  {report.num_damaged} are damaged, and stay as they are")
    if not remove and report.freed_bytes:
        typer.echo(f"nothing was changed; --remove frees {human_size(report.freed_bytes)}")
