"""`replaydb db`: schema migrations, payload location and roles.

Modules that are slow to import are imported by the commands that need them.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from replaydb.cli.console import OptionalUrl, Url, Yes, progress, with_store
from replaydb.util.display import human_size, printable

app = typer.Typer(
    help="Manage the tables, payload location and PostgreSQL roles of a store.",
    no_args_is_help=True,
)


@app.command()
def upgrade(
    url: Url,
    revision: Annotated[str, typer.Argument(help="Target revision: an id, head, or +1.")] = "head",
    yes: Yes = False,
) -> None:
    """Create the tables or upgrade them to a revision. At the newest, create missing indexes."""
    from replaydb.database import migrations

    _confirm_outdated(yes, url, revision)
    with progress("creating indexes") as update:
        asyncio.run(migrations.upgrade(url, revision, progress=update))
    typer.echo(f"revision {printable(asyncio.run(migrations.current(url)) or 'none')}")


@app.command(context_settings={"ignore_unknown_options": True})  # -1 is an argument
def downgrade(
    url: Url,
    revision: Annotated[str, typer.Argument(help="Target revision: an id, -1, or base.")],
    yes: Yes = False,
) -> None:
    """Downgrade the tables; drops what later revisions added (`base` drops everything)."""
    from replaydb.database import migrations

    if lost := asyncio.run(migrations.losses(url, revision)):
        typer.echo("\n  ".join(("lost, also after a new upgrade:", *lost)))
    if not yes:
        typer.confirm(f"Downgrade to {revision} and drop all later additions?", abort=True)
    asyncio.run(migrations.downgrade(url, revision))
    typer.echo(f"revision {printable(asyncio.run(migrations.current(url)) or 'none')}")


@app.command()
def current(url: Url) -> None:
    """Print the current revision of the tables, or none."""
    from replaydb.database import migrations

    typer.echo(printable(asyncio.run(migrations.current(url)) or "none"))


@app.command()
def history(url: OptionalUrl = None) -> None:
    """List all revisions, oldest first; with --url, mark the current one."""
    from replaydb.database import migrations

    here = None if url is None else asyncio.run(migrations.current(url))
    for revision in migrations.history():
        mark = "*" if revision.id == here else " "
        typer.echo(f"{mark} {revision.id}  {revision.description}")


@app.command()
def check(url: Url) -> None:
    """Compare the tables with those that this version needs; exit with 1 if they differ."""
    from replaydb.database import migrations

    differences = asyncio.run(migrations.check(url))
    for difference in differences:
        typer.echo(printable(difference))
    if differences:
        raise typer.Exit(1)
    typer.echo("no differences")


@app.command()
def write_format(
    url: Url,
    number: Annotated[int, typer.Argument(help="Payload format, from 1.")],
    yes: Yes = False,
) -> None:
    """Set the format of new payloads. Clients that cannot read it can then not use the store."""
    from replaydb.database import migrations

    _confirm_outdated(yes, url, number=number)
    asyncio.run(migrations.write_format(url, number))
    typer.echo(f"new payloads have format {number}")


@app.command()
def rewrite_payloads(url: Url) -> None:
    """Rewrite payloads of older formats in the format of new ones, while the store is used.

    If it is interrupted, run it again.
    """
    from replaydb.operations import RewriteReport
    from replaydb.operations import rewrite_payloads as rewrite

    with progress("rewriting payloads") as update:

        def show(report: RewriteReport) -> None:
            update(report.num_groups, None)

        report = with_store(url, lambda store: rewrite(store, progress=show), write=True)
    saved = f"{human_size(report.bytes_before)} are now {human_size(report.bytes_after)}"
    typer.echo(f"rewrote {report.num_groups} groups: {saved}")
    if report.num_skipped:
        typer.echo(f"skipped {report.num_skipped} groups that are damaged or in use: run it again")


@app.command()
def relocate(
    url: Url,
    payloads: Annotated[
        str, typer.Argument(help="New payload location: file:///FOLDER, s3://BUCKET/PREFIX, ...")
    ],
) -> None:
    """Record the new payload location after you have moved the folder or prefix."""
    with_store(url, lambda store: store.relocate_payloads(payloads), write=True)
    typer.echo("payload location recorded; reopen the store in every process")


@app.command()
def adopt_payloads(
    url: Url,
    yes: Yes = False,
) -> None:
    """Make this database the owner of its payloads, after it was restored or moved.

    If the marker of the payload store is missing or damaged, this restores it.

    The former owner can then only read them, and `replaydb prune` deletes those that only it has.
    """
    if not yes:
        typer.confirm(
            "Make this database the owner of its payloads? The former owner, if it still exists, "
            "can then only read them: its puts are refused. `replaydb prune --remove` here deletes "
            "the payloads that only the former owner has.",
            abort=True,
        )
    with_store(url, lambda store: store.adopt_payloads(), write=True)
    typer.echo("this database owns its payloads")


@app.command()
def roles(
    url: Url,
    apply: Annotated[
        bool, typer.Option("--apply", help="Run the statements instead of printing them.")
    ] = False,
    prefix: Annotated[str, typer.Option(help="Prefix of the role names.")] = "replaydb",
) -> None:
    """Print, or run, SQL that creates PostgreSQL roles with minimal permissions.

    The roles are PREFIX_writer, PREFIX_trainer and PREFIX_analyst (read-only).
    """
    from replaydb import operations

    statements = asyncio.run(operations.roles(url, prefix=prefix, apply=apply))
    if apply:
        typer.echo(f"ran {len(statements)} statements")
    else:
        typer.echo("\n".join(f"{printable(one)};" for one in statements))


def _confirm_outdated(
    yes: bool, url: str, revision: str = "head", number: int | None = None
) -> None:
    """Show connected clients that could not use the store after a change. Ask, unless `yes`."""
    from replaydb.database import migrations

    needed, clients = asyncio.run(migrations.outdated_clients(url, revision, number))
    if not clients:
        return
    typer.echo(f"connected clients older than {needed}, whose calls will raise ClientTooOldError:")
    for one in clients:
        where = f" at {one.host}" if one.host else ""
        user = printable(f"user {one.user}{where}")
        typer.echo(
            f"  replaydb {printable(one.version)}: {user}, {one.num_connections} connections"
        )
    if not yes:
        typer.confirm("Continue, although they will stop working?", abort=True)
