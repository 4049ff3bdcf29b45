"""What is being done, on stderr: a line that changes, and one for each benchmark that is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def shown(what: str) -> Iterator[Callable[[str], None]]:
    """For the length of a block; what the block says comes after `what`."""
    console = Console(stderr=True)
    start = time.perf_counter()
    # Seldom: what draws the line runs beside what is measured.
    with console.status(what, refresh_per_second=2) as status:
        yield lambda progress: status.update(f"{what}: {progress}")
    console.print(f"{what}: {time.perf_counter() - start:.1f} s", highlight=False)
