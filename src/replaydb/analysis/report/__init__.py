"""Self-contained HTML report of a buffer.

Needs the extra `replaydb[report]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import URL

from replaydb.util import extras

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
    """Write an HTML report of a buffer, which browsers show without network access.

    Contents: rewards by policy version, staleness at training, draws per group, priorities,
    generated and trained groups over time, throughput, a table of tasks, and the best and worst
    groups with their texts. The store is read once, page by page; memory use depends on the plots,
    not on the number of groups. Generated texts are escaped and cannot run scripts.

    Args:
        url: The store, as for `Store.open`; it is opened read-only.
        buffer: Name of the buffer.
        path: File to write; an existing file is replaced when the report is complete.
        progress: Called repeatedly with the number of rows read.

    Raises:
        InvalidInputError: The folder of `path` does not exist, or `path` is not a file.
        UnknownBufferError: The buffer does not exist.
        NotSupportedError: plotly is not installed.
        DatabaseError: The store does not exist or cannot be read.
    """
    target = Path(path).resolve()
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        raise InvalidInputError("path", "a file in an existing folder", path)
    page = page_of(summary_of(url, buffer, progress))
    unfinished = target.with_name(f"{target.name}.part")
    try:
        unfinished.write_text(page, encoding="utf8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
