"""The `replaydb` command-line interface."""

from __future__ import annotations

from typing import Annotated

import typer

from replaydb import __version__
from replaydb.cli import (
    buffers,
    db,
    draws,
    episodes,
    groups,
    leases,
    metrics,
    runs,
    trajectories,
)
from replaydb.cli.console import ErrorsInOneLine
from replaydb.cli.copy import backup, copy, restore
from replaydb.cli.exchange import export, import_, import_dataset
from replaydb.cli.health import doctor, vacuum, verify
from replaydb.cli.removal import delete_buffers, delete_groups, delete_runs, prune
from replaydb.cli.report import report
from replaydb.cli.ui import ui
from replaydb.cli.watch import watch

app = typer.Typer(
    name="replaydb",
    help="A durable replay buffer and rollout queue for RL post-training, in a SQL database.",
    cls=ErrorsInOneLine,
    no_args_is_help=True,
    # Local variables include database URLs, and so passwords.
    pretty_exceptions_show_locals=False,
)
buffers.app.command("delete")(delete_buffers)
groups.app.command("delete")(delete_groups)
runs.app.command("delete")(delete_runs)
app.add_typer(buffers.app, name="buffers")
app.add_typer(groups.app, name="groups")
app.add_typer(episodes.app, name="episodes")
app.add_typer(draws.app, name="draws")
app.add_typer(leases.app, name="leases")
app.add_typer(trajectories.app, name="trajectories")
app.add_typer(runs.app, name="runs")
app.add_typer(metrics.app, name="metrics")
app.add_typer(db.app, name="db")
app.command()(watch)
app.command()(report)
app.command()(ui)
app.command()(prune)
app.command()(export)
app.command("import")(import_)
app.command()(import_dataset)
app.command()(copy)
app.command()(backup)
app.command()(restore)
app.command()(verify)
app.command()(vacuum)
app.command()(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass
