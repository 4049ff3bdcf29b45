"""What may be wrong with SQLite here, or with the file of a database."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection

from replaydb.results import Finding

#: Of the last two lines of releases that were mended before it was known: from which patch on.
_MENDED_EARLIER = {(3, 44): 6, (3, 50): 7}
_MENDED = (3, 51, 3)

GB = 1 << 30
#: Free space on the disk below which nothing can be relied on.
LEAST_FREE = GB // 4
#: A log that has become so long is not moved into the file any more: somebody reads all the time.
LONG_LOG = GB // 4
#: Free pages that are worth giving back: so many bytes, and this part of the file.
MUCH_FREE, FREE_SHARE = GB // 16, 0.5
PAGE_SIZE = 16384


def findings(connection: Connection, path: Path) -> Iterator[Finding]:
    """What is good, and what is not, of the library, the file and its disk."""
    yield _library(connection)
    yield _journal(connection)
    yield _pages(connection)
    yield _log(path)
    yield _disk(path)
    yield _rights(path)


def _library(connection: Connection) -> Finding:
    text = str(connection.exec_driver_sql("SELECT sqlite_version()").scalar_one())
    major, minor, patch = (int(part) for part in text.split(".")[:3])
    mended_at = _MENDED_EARLIER.get((major, minor))
    if (major, minor, patch) >= _MENDED or (mended_at is not None and patch >= mended_at):
        return Finding("good", "SQLite", text)
    return Finding(
        "warning",
        "SQLite",
        f"{text} can, very rarely, damage a file that several processes write "
        "(the WAL-reset fault, sqlite.org/wal.html)",
        "use a Python with SQLite 3.51.3, 3.50.7 or 3.44.6, or newer; until then keep backups",
    )


def _journal(connection: Connection) -> Finding:
    mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
    if mode == "wal":
        return Finding("good", "journal", "a write-ahead log: who reads waits for nobody")
    return Finding(
        "warning",
        "journal",
        f"journal_mode is {mode}: who reads and who writes wait for each other",
        "open the store once to write, which makes it a write-ahead log, and let nobody change it",
    )


def _pages(connection: Connection) -> Finding:
    size, pages, free = (
        int(connection.exec_driver_sql(pragma).scalar_one())
        for pragma in ("PRAGMA page_size", "PRAGMA page_count", "PRAGMA freelist_count")
    )
    if free * size > MUCH_FREE and free > FREE_SHARE * pages:
        return Finding(
            "warning",
            "file",
            f"{_mb(free * size)} of {_mb(pages * size)} hold nothing: they are used again, "
            "but not given back",
            "if the space is needed elsewhere: replaydb vacuum",
        )
    if size != PAGE_SIZE:
        return Finding(
            "warning",
            "file",
            f"its pages have {size} bytes: payloads are read faster from pages of {PAGE_SIZE}",
            "replaydb copy into a new file",
        )
    return Finding("good", "file", f"{_mb(pages * size)}, of which {_mb(free * size)} are free")


def _log(path: Path) -> Finding:
    log = path.with_name(f"{path.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    if size <= LONG_LOG:
        return Finding("good", "log", f"{_mb(size)} are still to be moved into the file")
    return Finding(
        "warning",
        "log",
        f"{log.name} has {_mb(size)}: somebody has been reading without a break",
        "end the program that has a transaction open; the next commits then shorten it",
    )


def _disk(path: Path) -> Finding:
    free = shutil.disk_usage(path.parent).free
    if free < LEAST_FREE:
        return Finding(
            "bad",
            "disk",
            f"{_mb(free)} are free: puts are about to fail",
            "make room, or move the store; replaydb prune and vacuum free some of its own",
        )
    if free < path.stat().st_size:
        return Finding(
            "warning",
            "disk",
            f"{_mb(free)} are free, less than the file has: neither a vacuum nor a copy would fit",
            "make room before either is needed",
        )
    return Finding("good", "disk", f"{_mb(free)} are free")


def _rights(path: Path) -> Finding:
    as_who = os.access in os.supports_effective_ids
    if all(os.access(one, os.W_OK, effective_ids=as_who) for one in (path, path.parent)):
        return Finding("good", "rights", "this user may write")
    return Finding(
        "warning",
        "rights",
        "this user may only read: SQLite writes the file, and a log beside it",
        "whoever puts or draws needs to write both the file and its folder",
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
