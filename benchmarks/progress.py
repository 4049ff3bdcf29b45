"""Progress on stderr: a status line, and one line for each finished benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show a status line during a block. Yields a function that sets the text after `what`."""
    console = Console(stderr=True)
    start = time.perf_counter()
    # Refreshed rarely, since drawing the line takes CPU time during a measurement.
    with console.status(what, refresh_per_second=2) as status:
        yield lambda step: status.update(f"{what}: {step}")
    console.print(f"{what}: {time.perf_counter() - start:.1f} s", highlight=False)
