"""`replaydb db`: the tables and their revisions. What is slow to import waits for its command."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from replaydb.cli.console import OptionalUrl, Url, with_store
from replaydb.display import printable

app = typer.Typer(help="Create, upgrade and check the tables.", no_args_is_help=True)


@app.command()
def upgrade(
    url: Url,
    revision: Annotated[str, typer.Argument(help="A revision, head, or +1.")] = "head",
) -> None:
    """Create the tables, or bring them up to date."""
    from replaydb.database import migrations

    asyncio.run(migrations.upgrade(url, revision))
    typer.echo(f"revision {printable(asyncio.run(migrations.current(url)) or 'none')}")


@app.command(context_settings={"ignore_unknown_options": True})  # -1 is a revision
def downgrade(
    url: Url,
    revision: Annotated[str, typer.Argument(help="A revision, -1, or base.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Take the tables back; what later revisions added is lost, with base everything."""
    from replaydb.database import migrations

    if not yes:
        typer.confirm(f"Go back to {revision} and lose what was added since?", abort=True)
    asyncio.run(migrations.downgrade(url, revision))
    typer.echo(f"revision {printable(asyncio.run(migrations.current(url)) or 'none')}")


@app.command()
def current(url: Url) -> None:
    """Show the revision of the tables, or none."""
    from replaydb.database import migrations

    typer.echo(printable(asyncio.run(migrations.current(url)) or "none"))


@app.command()
def history(url: OptionalUrl = None) -> None:
    """List the revisions, the oldest first; with a database, mark where it is."""
    from replaydb.database import migrations

    here = None if url is None else asyncio.run(migrations.current(url))
    for revision in migrations.history():
        mark = "*" if revision.id == here else " "
        typer.echo(f"{mark} {revision.id}  {revision.description}")


@app.command()
def check(url: Url) -> None:
    """Compare the tables with those this version needs; exit with 1 where they differ."""
    from replaydb.database import migrations

    differences = asyncio.run(migrations.check(url))
    for difference in differences:
        typer.echo(printable(difference))
    if differences:
        raise typer.Exit(1)
    typer.echo("the tables are as expected")


@app.command()
def relocate(
    url: Url,
    payloads: Annotated[
        str, typer.Argument(help="Where the packs are now: file:///FOLDER, s3://BUCKET/PREFIX, ...")
    ],
) -> None:
    """Record where the payloads are now, after their folder or prefix was brought elsewhere."""
    with_store(url, lambda store: store.relocate_payloads(payloads), write=True)
    typer.echo("recorded; processes that have the store open must open it again")


@app.command()
def roles(
    url: Url,
    apply: Annotated[
        bool, typer.Option("--apply", help="Run the statements; by default they are printed.")
    ] = False,
    prefix: Annotated[
        str, typer.Option(help="What the names of the roles begin with.")
    ] = "replaydb",
) -> None:
    """Make roles on PostgreSQL with the least rights: writer, trainer, and reading analyst."""
    from replaydb import operations

    statements = asyncio.run(operations.roles(url, prefix=prefix, apply=apply))
    if apply:
        typer.echo(f"{len(statements)} statements were run")
    else:
        typer.echo("\n".join(f"{printable(one)};" for one in statements))
