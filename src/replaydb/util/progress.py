"""Functions that long operations call with their progress."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the number of items that are done, and their total; None: it is unknown.
Progress = Callable[[int, int | None], object]


def no_progress(done: int, total: int | None) -> None:
    """Do nothing."""
