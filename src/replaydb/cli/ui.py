"""`replaydb ui`: read-only web UI."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Annotated

import typer

from replaydb.cli.console import OptionalUrl, Tokenizer


def ui(
    context: typer.Context,
    url: OptionalUrl = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; an address other than loopback requires --token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 for any free port.")
    ] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="REPLAYDB_UI_TOKEN",
            show_default=False,
            help="Access token that clients must send (at least 16 characters).",
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="Show the store of the last `make demo`, or a small generated one."
        ),
    ] = False,
) -> None:
    """Start the read-only web UI; runs until Ctrl-C."""
    from replaydb.ui import serve
    from replaydb.ui.demo import demo_store

    if not demo and url is None:
        raise typer.BadParameter("one of them is required", param_hint="--url or --demo")
    source = context.get_parameter_source("url")
    if demo and source is not None and source.name == "COMMANDLINE":  # not from REPLAYDB_URL
        raise typer.BadParameter("give only one of them", param_hint="--url or --demo")
    if os.environ.get("REPLAYDB_UI_TOKEN") == "":
        raise typer.BadParameter("is empty", param_hint="REPLAYDB_UI_TOKEN")
    with demo_store() if demo else nullcontext(url) as shown:
        serve(str(shown), host=host, port=port, token=token, tokenizer=tokenizer, ready=typer.echo)
