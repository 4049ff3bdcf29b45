"""Synchronous read-only access to a store, by a thread with its own event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import URL, Select, select

from replaydb import blocking
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.database.statements.scans import Scan
from replaydb.database.tables.records import Stored
from replaydb.database.tables.schema import buffer
from replaydb.util.chunks import chunks

T = TypeVar("T")

#: Number of rows, and size of their texts, that are read at once; a single row may be larger.
PAGE, PAGE_BYTES = 8192, 64 << 20


class Source:
    """A store opened read-only. Calls run in its own thread and can be made from any thread."""

    def __init__(self, store: blocking.Store) -> None:
        self._thread = store._thread
        self._payloads = store._wrapped._payloads

    def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` in one read-only snapshot."""
        database = self._payloads.database
        return self._thread.run(lambda: database.read(work, end=end_in(BULK_SECONDS)))

    def stored(self, work: Callable[[Session], Stored]) -> Stored:
        """Read groups with `work`, with payloads inside or outside the database."""

        async def run() -> Stored:
            end = end_in(BULK_SECONDS)
            stored = await self._payloads.database.read(work, end=end)
            return await self._payloads.read(stored, end)

        return self._thread.run(run)

    def buffer_ids(self) -> dict[str, int]:
        """Return the ids of all buffers by name."""
        rows = self.read(lambda session: session.run(select_buffer_ids()))
        return {row.name: row.id for row in rows}

    def pages(self, scan: Scan) -> Iterator[list[Any]]:
        """Yield the pages of a scan; each page is a consistent snapshot."""
        top = self.read(lambda session: _value(session, scan.top))
        start, after = scan.start, None
        while top is not None and start != top:

            def work(
                session: Session, start: Any = start, after: Any = after
            ) -> tuple[Any, int, Any]:
                end = _value(session, scan.end_of_window(start, top))
                if end is None:
                    return None, 0, []
                limit = PAGE
                if (sizes := scan.sizes(start, end, after, PAGE)) is not None:
                    limit = fitting([row[0] for row in session.run(sizes)])
                return end, limit, session.run(scan.page(start, end, after, limit))

            end, limit, rows = self.read(work)
            if rows:
                yield rows
            if end is None:
                return
            if len(rows) < limit:
                start, after = end, None
            else:
                after = rows[-1][-len(scan.keys) :]


@contextmanager
def opened(url: str | URL) -> Iterator[Source]:
    """Open a store for the duration of the block."""
    with blocking.Store.open(url, read_only=True, pool_size=1, payload_cache=0) as store:
        yield Source(store)


def fitting(sizes: Sequence[int]) -> int:
    """Return how many rows of these sizes are read at once; `PAGE` if all are."""
    number = len(next(chunks(sizes, int, PAGE_BYTES), ()))
    return PAGE if number == len(sizes) else number


def _value(session: Session, statement: Any) -> Any:
    [(value,)] = session.run(statement)
    return value


def select_buffer_ids() -> Select[Any]:
    """Select the ids and names of all buffers."""
    return select(buffer.c.id, buffer.c.name).order_by(buffer.c.id)
