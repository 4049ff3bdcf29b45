"""`replaydb ui`: pages to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replaydb.cli.console import Url


def ui(
    url: Url,
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
) -> None:
    """Serve pages about a store, read-only, until Ctrl-C: is it learning, is anything stuck?"""
    from replaydb.ui import serve

    serve(url, host=host, port=port, token=token, tokenizer=tokenizer, ready=typer.echo)
