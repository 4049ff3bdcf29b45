"""Health check of the SQLite library and of a database file, for `replaydb doctor`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection

from replaydb.domain.results import Finding

#: Earlier release branches with the fix of the WAL-reset bug, and their first patch that has it.
_FIXED_EARLIER = {(3, 44): 6, (3, 50): 7}
_FIXED = (3, 51, 3)

#: Free space on the disk below which puts are likely to fail.
LEAST_FREE = 256 << 20
#: A log this long is no longer checkpointed, because some transaction is always reading.
LONG_LOG = 256 << 20


def findings(connection: Connection, path: Path) -> Iterator[Finding]:
    """Yield the findings about the library, the file and its disk."""
    yield _library(connection)
    yield _journal(connection)
    yield _log(path)
    yield _disk(path)
    yield _rights(path)


def _library(connection: Connection) -> Finding:
    text = str(connection.exec_driver_sql("SELECT sqlite_version()").scalar_one())
    major, minor, patch = (int(part) for part in text.split(".")[:3])
    fixed_at = _FIXED_EARLIER.get((major, minor))
    if (major, minor, patch) >= _FIXED or (fixed_at is not None and patch >= fixed_at):
        return Finding("good", "SQLite", text)
    return Finding(
        "warning",
        "SQLite",
        f"{text} can, very rarely, corrupt a file that several processes write "
        "(the WAL-reset bug, sqlite.org/wal.html)",
        "use a Python with SQLite 3.51.3, 3.50.7 or 3.44.6, or newer; until then keep backups",
    )


def _journal(connection: Connection) -> Finding:
    mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
    if mode == "wal":
        return Finding("good", "journal", "a write-ahead log: readers do not wait for writers")
    return Finding(
        "warning",
        "journal",
        f"journal_mode is {mode}: readers and writers wait for each other",
        "open the store once for writing, which sets it to wal, and do not change it",
    )


def _log(path: Path) -> Finding:
    log = path.with_name(f"{path.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    if size <= LONG_LOG:
        return Finding("good", "log", f"{_mb(size)} are not checkpointed into the file yet")
    return Finding(
        "warning",
        "log",
        f"the size of {log.name} is {_mb(size)}: some transaction is always reading",
        "end the program that keeps a transaction open; later commits then shorten the log",
    )


def _disk(path: Path) -> Finding:
    free = shutil.disk_usage(path.parent).free
    if free < LEAST_FREE:
        return Finding(
            "bad",
            "disk",
            f"{_mb(free)} are free: puts are about to fail",
            "free space on the disk, with replaydb prune and vacuum too, or move the store",
        )
    return Finding("good", "disk", f"{_mb(free)} are free")


def _rights(path: Path) -> Finding:
    effective_ids = os.access in os.supports_effective_ids
    if all(os.access(one, os.W_OK, effective_ids=effective_ids) for one in (path, path.parent)):
        return Finding("good", "rights", "this user may write")
    return Finding(
        "warning",
        "rights",
        "this user may only read: SQLite writes to the file and to a log beside it",
        "to put or draw, give the user write permission on the file and on its folder",
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
