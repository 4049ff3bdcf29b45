"""`replaydb metrics`: Prometheus metrics endpoint."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Annotated

import typer

from replaydb.cli.console import Url, finite
from replaydb.errors import InvalidInputError
from replaydb.util import extras

app = typer.Typer(help="Export Prometheus metrics.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
def serve(
    url: Url,
    buffer: Annotated[
        list[str] | None, typer.Argument(help="Buffers to export (default: all).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 for any free port.")
    ] = 9478,
    draws: Annotated[
        int, typer.Option(min=1, help="Number of recent draws that the metrics cover.")
    ] = 100,
    max_age: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="Cache responses for this many seconds.")
    ] = 5.0,
    no_totals: Annotated[
        bool,
        typer.Option(
            "--no-totals",
            help="Omit sums over all groups, which take seconds for a million of them.",
        ),
    ] = False,
) -> None:
    """Serve Prometheus metrics of buffers until Ctrl-C (read-only)."""
    extras.need("prometheus", "replaydb metrics")

    from prometheus_client import CollectorRegistry, start_http_server

    from replaydb import blocking
    from replaydb.training.prometheus import StoreCollector

    logging.basicConfig(format="%(message)s")
    with blocking.Store.open(url, read_only=True) as store:
        for name in buffer or ():
            store.buffer(name, create=False)
        collector = StoreCollector(
            store, buffer or None, draws=draws, max_age=max_age, totals=not no_totals
        )
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            expected = "a free address and port"
            raise InvalidInputError("host, port", expected, f"{host}:{port} ({error})") from error
        shown = f"[{host}]" if ":" in host else host
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        typer.echo(f"http://{shown}:{server.server_port}/metrics")
        stop.wait()
        server.shutdown()
        thread.join()
        server.server_close()
