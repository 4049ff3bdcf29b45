"""`replaydb ui`: pages to look at."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from replaydb.cli.console import OptionalUrl


def ui(
    context: typer.Context,
    url: OptionalUrl = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others can reach needs --token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="REPLAYDB_UI_TOKEN",
            show_default=False,
            help="What whoever looks has to say first: at least 16 characters.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A tokenizer of Hugging Face, a file or a folder: decode tokens with it.",
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="The store that `make demo` left, or a small one.")
    ] = False,
) -> None:
    """Serve pages about a store, read-only, until Ctrl-C: is it learning, is anything stuck?"""
    from replaydb.ui import serve
    from replaydb.ui.demo import demo_store

    if not demo and url is None:
        raise typer.BadParameter("one of the two is needed", param_hint="--url or --demo")
    said = context.get_parameter_source("url")
    if demo and said is not None and said.name == "COMMANDLINE":  # an environment is for all
        raise typer.BadParameter("one of the two is meant", param_hint="--url or --demo")
    if os.environ.get("REPLAYDB_UI_TOKEN") == "":
        raise typer.BadParameter("it is empty", param_hint="REPLAYDB_UI_TOKEN")
    with demo_store() if demo else nullcontext(url) as shown:
        serve(str(shown), host=host, port=port, token=token, tokenizer=tokenizer, ready=typer.echo)
