"""BEGIN of a transaction, and the wait for writers of other processes."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator

from replaydb.errors import DatabaseUnavailableError

#: How long a writer waits for writers of other processes before it fails.
LOCK_SECONDS = 60.0
#: Writers wait for other processes in `immediate`, not inside SQLite.
WAIT_IN_LOOP = "PRAGMA busy_timeout = 0"


def deferred(connection: sqlite3.Connection, check: Callable[[], None]) -> None:
    """Run BEGIN. The first statement takes the snapshot."""
    connection.execute("BEGIN")


def immediate(connection: sqlite3.Connection, check: Callable[[], None]) -> None:
    """Run BEGIN IMMEDIATE, and wait for writers of other processes.

    In SQLite's own busy handler, a cancelled coroutine could not end the wait.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    for pause in _pauses():
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
                raise
            if time.monotonic() > deadline:
                raise DatabaseUnavailableError(
                    f"another process has held the write lock for {LOCK_SECONDS:g} s (SQLITE_BUSY)"
                ) from error
            time.sleep(pause)
            check()
        else:
            return


def _pauses() -> Iterator[float]:
    """Yield pauses of up to 5 ms, in seconds, with jitter so that waiting processes spread out."""
    longest = 0.0005
    while True:
        yield random.uniform(longest / 2, longest)  # noqa: S311
        longest = min(2 * longest, 0.005)
