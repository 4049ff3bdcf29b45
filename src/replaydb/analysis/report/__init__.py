"""A report on a buffer: one page of HTML, with everything in it.

Needs the extra `replaydb[report]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import URL

from replaydb import extras

extras.need("report", "a report")

from replaydb.analysis.report.page import page_of
from replaydb.analysis.report.summary import summary_of
from replaydb.errors import InvalidInputError

__all__ = ["write_report"]


def write_report(
    url: str | URL,
    buffer: str,
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write a page about a buffer, that any browser shows without a network.

    It has rewards by policy version, staleness at training, use counts, priorities, what was
    generated against what was trained over time, throughput, the tasks side by side, and the best
    and the worst groups with their texts. The store is read once, a page at a time: memory is that
    of the plots, however many groups there are. Texts of models are shown, and never run.

    Args:
        url: The store, as for `Store.open`; it is opened read-only.
        buffer: Name of the buffer.
        path: The file; one that is there is replaced when the new one is whole.
        progress: Called with how many rows were read, again and again.

    Raises:
        InvalidInputError: There is no such folder, or something else than a file has that name.
        UnknownBufferError: There is no such buffer.
        NotSupportedError: What draws the plots is not installed.
        DatabaseError: There is no such store, or it cannot be read.
    """
    target = Path(path).resolve()
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        raise InvalidInputError("path", "a file in a folder that is there", path)
    page = page_of(summary_of(url, buffer, progress))
    unfinished = target.with_name(f"{target.name}.part")
    try:
        unfinished.write_text(page, encoding="utf8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
