"""Overview page: blocked calls, key numbers, reward trend, tasks, leases and recent draws."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from replaydb.buffer import Buffer
from replaydb.database.filters.group_columns import col
from replaydb.domain.monitoring import (
    BufferSnapshot,
    Rates,
    empty,
    followed,
    overdue,
    waits,
)
from replaydb.domain.results import BufferStats, LeaseInfo
from replaydb.errors import InvalidInputError
from replaydb.ui.pages import buffer_of, optional_number, page, rendered, store_of, text_of
from replaydb.ui.readable import find
from replaydb.ui.shared import SharedCache
from replaydb.ui.views.draws import DrawRow, draw_row
from replaydb.ui.views.learning import learning

#: Seconds for which the list of buffers and runs is cached.
STORE_SECONDS = 2.0
#: Maximum number of displayed tasks and buffers, and of other rows.
MAX_TASKS, MAX_ROWS = 50, 10
#: Number of draws that count as recent.
RECENT_DRAWS = 100


@dataclass(frozen=True, slots=True)
class Now:
    """The current state of a buffer.

    Attributes:
        at: When it was read.
        stats: Its statistics from the task counters, without totals.
        numbers: Its metrics as of `Buffer.metrics`, without totals.
        rates: Rates by task.
        blocked: Calls and groups that are blocked, with the reason.
        empty: Tasks without groups to draw.
        leases: All leases, oldest first, including expired ones whose groups were not returned yet.
        draws: The newest draws.
        lag: Seconds by which the standby that is read is behind its primary; None if it is none.
    """

    at: datetime
    stats: BufferStats
    numbers: dict[str, float]
    rates: dict[str, Rates]
    blocked: Sequence[str]
    empty: Sequence[str]
    leases: Sequence[LeaseInfo]
    draws: Sequence[DrawRow]
    lag: float | None

    @property
    def expired(self) -> list[LeaseInfo]:
        """Leases that have expired."""
        return overdue(self.leases, self.at)

    @property
    def num_of_unknown_staleness(self) -> int:
        """Number of recently trained groups of unknown staleness."""
        known = (n for name, n in self.numbers.items() if name.startswith("train/staleness/"))
        return int(self.numbers["train/groups"] - sum(known))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page that is updated periodically.

    Attributes:
        load: Loads the data. Parts with the same function are rendered together.
        template: Template that renders it.
        fresh: Seconds for which it is cached and shared between viewers.
        every: Polling interval of browsers in seconds.
    """

    load: Callable[[Request, Buffer], Awaitable[object]]
    template: str
    fresh: float
    every: int


async def overview(request: Request) -> Response:
    """Show the overview of a buffer, or the list of buffers if there are several."""
    names = await store_of(request).buffer_names()
    if "buffer" in request.query_params:
        buffer = await buffer_of(request)
    elif len(names) == 1:
        buffer = await store_of(request).buffer(names[0], create=False)
    else:
        return await _store(request, names)
    texts = await asyncio.gather(*(_text(request, buffer, part) for part in PARTS))
    return page(
        request,
        "overview.html",
        buffer_name=buffer.name,
        others=[name for name in names if name != buffer.name][:MAX_TASKS],
        num_buffers=len(names),
        parts=[(name, PARTS[name], text) for name, text in zip(PARTS, texts, strict=True)],
    )


async def live(request: Request) -> Response:
    """Return the current state of a part of the overview, or 304 if it has not changed."""
    name = text_of(request, "part")
    if name not in PARTS:
        raise InvalidInputError("part", " or ".join(PARTS), repr(name))
    text = await _text(request, await buffer_of(request), name)
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return HTMLResponse(text, headers={"ETag": tag})


async def _text(request: Request, buffer: Buffer, name: str) -> Markup:
    """Return the HTML of a part of the page, shared between viewers."""
    part = PARTS[name]

    async def render() -> dict[str, Markup]:
        data = await part.load(request, buffer)
        return {
            each: rendered(request, one.template, buffer_name=buffer.name, it=data)
            for each, one in PARTS.items()
            if one.load is part.load
        }

    cache: SharedCache = request.app.state.cache
    texts = await cache.get((part.load, buffer.id), part.fresh, render)
    return texts[name]


async def _now(request: Request, buffer: Buffer) -> Now:
    stats, leases = await buffer.stats(totals=False), await buffer.leases(expired=True)
    last = BufferSnapshot(stats, leases, time.monotonic())
    snapshots = request.app.state.snapshots.setdefault(buffer.id, deque())
    return Now(
        at=datetime.now(UTC),
        stats=stats,
        numbers=await buffer.metrics(draws=RECENT_DRAWS, totals=False),
        rates=followed(snapshots, last),
        blocked=await _blocked(buffer, stats, leases),
        empty=empty(stats),
        leases=sorted(leases, key=lambda it: it.acquired_at),
        draws=[draw_row(info) for info in await buffer.draws(limit=MAX_ROWS)],
        lag=await store_of(request).replication_lag(),
    )


async def _blocked(buffer: Buffer, stats: BufferStats, leases: Sequence[LeaseInfo]) -> list[str]:
    """Describe blocked calls, expired leases and passed deadlines.

    Expired leases and passed deadlines take effect in the next write transaction.
    """
    at = datetime.now(UTC)
    expired, late = overdue(leases, at), []
    if any(task.num_pending for task in stats.tasks):
        first = await find(buffer, set(), statuses="pending", order_by=col.deadline, limit=MAX_ROWS)
        late = [it for it in first if it.deadline is not None and it.deadline <= at]
    then = "by the next put, draw or update"
    return [
        *waits(stats, expired),
        *(
            f"lease {it.id} of {it.owner} has expired: its groups are released {then}"
            for it in expired
        ),
        *(f"the deadline of group {it.id} has passed: it completes or fails {then}" for it in late),
    ]


async def _learning(request: Request, buffer: Buffer) -> object:
    return await learning(buffer)


#: Parts by name in the order of the page, the most important first.
PARTS = {
    "headline": Part(_now, "overview_headline.html", fresh=2.0, every=3),
    "learning": Part(_learning, "overview_learning.html", fresh=10.0, every=15),
    "now": Part(_now, "overview_now.html", fresh=2.0, every=3),
    "sample": Part(_learning, "overview_sample.html", fresh=10.0, every=15),
}


async def _store(request: Request, names: Sequence[str]) -> Response:
    """Show a page of the buffers of the store, and the newest runs."""
    store = store_of(request)
    first = optional_number(request, "first") or 0
    end = first + MAX_TASKS

    async def load_buffers() -> list[tuple[BufferStats, list[str]]]:
        found = []
        for name in names[first:end]:
            buffer = await store.buffer(name, create=False)
            stats, leases = await buffer.stats(totals=False), await buffer.leases(expired=True)
            found.append((stats, await _blocked(buffer, stats, leases)))
        return found

    cache: SharedCache = request.app.state.cache
    return page(
        request,
        "buffers.html",
        buffers=await cache.get(("buffers", first), STORE_SECONDS, load_buffers),
        before=max(0, first - MAX_TASKS) if first else None,
        after=end if len(names) > end else None,
        num_buffers=len(names),
        runs=(await cache.get("runs", STORE_SECONDS, store.runs))[::-1],
        lag=await cache.get("lag", STORE_SECONDS, store.replication_lag),
        max_rows=MAX_ROWS,
    )
