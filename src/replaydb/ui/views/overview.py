"""Is it learning, is anything stuck, what was just trained?"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from replaydb.buffer import Buffer
from replaydb.database.group_columns import col
from replaydb.errors import InvalidInputError
from replaydb.looks import Look, Rates, empty, end, followed, overdue, waits
from replaydb.results import BufferStats, DrawInfo, LeaseInfo, RunInfo, TaskCounters
from replaydb.ui import downloads, queries
from replaydb.ui.pages import buffer_of, optional_number, page, rendered, store_of, text_of
from replaydb.ui.readable import find
from replaydb.ui.shared import Shared
from replaydb.ui.views.learning import learning

#: Seconds that the list of buffers and runs is fresh.
STORE_SECONDS = 2.0
#: Tasks and buffers that are shown, and of everything else.
SHOWN_TASKS, SHOWN = 50, 10
#: Draws that count as recent.
RECENT_DRAWS = 100


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draw in a line.

    Attributes:
        info: What is recorded of it.
        staleness: Mean at the draw; None where none is known.
        outcomes: How many groups came to what.
    """

    info: DrawInfo
    staleness: float | None
    outcomes: Counter[str]


@dataclass(frozen=True, slots=True)
class Now:
    """A buffer at this moment.

    Attributes:
        at: When that is.
        stats: By the accounts, without totals.
        numbers: As of `Buffer.metrics`, without totals.
        rates: Of every task.
        held_up: What does not go on, and why.
        empty: Tasks of which there is nothing to draw.
        leases: All of them, the oldest first; also expired ones that hold groups.
        draws: The newest.
    """

    at: datetime
    stats: BufferStats
    numbers: dict[str, float]
    rates: dict[str, Rates]
    held_up: Sequence[str]
    empty: Sequence[str]
    leases: Sequence[LeaseInfo]
    draws: Sequence[Drawn]

    @property
    def tasks(self) -> Sequence[TaskCounters]:
        """Those of which most was put."""
        return sorted(self.stats.tasks, key=lambda it: -it.num_inserted)[:SHOWN_TASKS]

    @property
    def put_rate(self) -> float | None:
        """Groups put a second; None where there was no earlier look."""
        known = [rate.puts for rate in self.rates.values() if rate.puts is not None]
        return sum(known) if known else None

    @property
    def num_of_unknown_staleness(self) -> int:
        """Groups that were trained on lately and of which nobody knows how stale they were."""
        known = (n for name, n in self.numbers.items() if name.startswith("train/staleness/"))
        return int(self.numbers["train/groups"] - sum(known))

    def end(self, lease: LeaseInfo) -> str:
        """When a lease ends, or since when it is over."""
        return end(lease, self.at)

    @property
    def draw_rate(self) -> float | None:
        """Groups drawn a second; None where there was no earlier look."""
        known = [rate.draws for rate in self.rates.values() if rate.draws is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page that follows the store.

    Attributes:
        made: What it shows; parts that show the same are made at once.
        template: How.
        fresh: Seconds for which viewers share it.
        every: Seconds after which a browser asks for it again.
    """

    made: Callable[[Request, Buffer], Awaitable[object]]
    template: str
    fresh: float
    every: int


async def overview(request: Request) -> Response:
    """The buffers of the store, or one of them as it changes."""
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
        others=[name for name in names if name != buffer.name][:SHOWN_TASKS],
        num_buffers=len(names),
        parts=[(name, PARTS[name], text) for name, text in zip(PARTS, texts, strict=True)],
    )


async def download(request: Request) -> Response:
    """The tasks of the buffer, or of all, as rows of `task_overview`."""
    named = "buffer" in request.query_params
    name = (await buffer_of(request)).name if named else None
    return await downloads.answer(request, queries.select_tasks(name))


async def live(request: Request) -> Response:
    """A part of the overview as it is now, or that it is as it was (304)."""
    name = text_of(request, "part")
    if name not in PARTS:
        raise InvalidInputError("part", " or ".join(PARTS), repr(name))
    text = await _text(request, await buffer_of(request), name)
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return HTMLResponse(text, headers={"ETag": tag})


async def _text(request: Request, buffer: Buffer, name: str) -> Markup:
    """A part of the page, shared by all who look at it."""
    part = PARTS[name]

    async def made() -> dict[str, Markup]:
        shown = await part.made(request, buffer)
        return {
            each: rendered(request, one.template, buffer_name=buffer.name, it=shown)
            for each, one in PARTS.items()
            if one.made is part.made
        }

    texts = await _shared(request).answer((part.made, buffer.id), part.fresh, made)
    return texts[name]


async def _now(request: Request, buffer: Buffer) -> Now:
    stats, leases = await buffer.stats(totals=False), await buffer.leases(expired=True)
    last = Look(stats, leases, time.monotonic())
    return Now(
        at=datetime.now(UTC),
        stats=stats,
        numbers=await buffer.metrics(draws=RECENT_DRAWS, totals=False),
        rates=followed(_looks(request, buffer), last),
        held_up=await _held_up(buffer, stats, leases),
        empty=empty(stats),
        leases=sorted(leases, key=lambda it: it.acquired_at),
        draws=[_drawn(info) for info in await buffer.draws(limit=SHOWN)],
    )


async def _held_up(buffer: Buffer, stats: BufferStats, leases: Sequence[LeaseInfo]) -> list[str]:
    """Who waits, and what is over, and ends when somebody comes by."""
    at = datetime.now(UTC)
    expired, late = overdue(leases, at), []
    if any(task.num_pending for task in stats.tasks):
        first = await find(buffer, set(), statuses="pending", order_by=col.deadline, limit=SHOWN)
        late = [it for it in first if it.deadline is not None and it.deadline <= at]
    then = "with the next draw or put"
    return [
        *waits(stats, expired),
        *(
            f"the lease {it.id} of {it.owner} has expired: its groups come back {then}"
            for it in expired
        ),
        *(f"the deadline of group {it.id} has passed: it completes or fails {then}" for it in late),
    ]


def _drawn(info: DrawInfo) -> Drawn:
    known = [it for it in info.staleness if it is not None]
    outcomes = Counter("unknown" if it is None else str(it) for it in info.outcomes)
    return Drawn(info, sum(known) / len(known) if known else None, outcomes)


async def _learning(request: Request, buffer: Buffer) -> object:
    return await learning(buffer)


#: In the order of the page: what it is looked at for comes first.
PARTS = {
    "headline": Part(_now, "overview_headline.html", fresh=2.0, every=3),
    "learning": Part(_learning, "overview_learning.html", fresh=10.0, every=15),
    "now": Part(_now, "overview_now.html", fresh=2.0, every=3),
    "sample": Part(_learning, "overview_sample.html", fresh=10.0, every=15),
}


async def _store(request: Request, names: Sequence[str]) -> Response:
    """Buffers, a page of them, and the newest runs, in a line each."""
    store = store_of(request)
    first = optional_number(request, "first") or 0
    end = first + SHOWN_TASKS

    async def about() -> list[tuple[BufferStats, list[str]]]:
        found = []
        for name in names[first:end]:
            buffer = await store.buffer(name, create=False)
            stats, leases = await buffer.stats(totals=False), await buffer.leases(expired=True)
            found.append((stats, await _held_up(buffer, stats, leases)))
        return found

    async def newest() -> list[RunInfo]:
        return (await store.runs())[::-1]

    shared = _shared(request)
    return page(
        request,
        "buffers.html",
        about=await shared.answer(("buffers", first), STORE_SECONDS, about),
        before=max(0, first - SHOWN_TASKS) if first else None,
        after=end if len(names) > end else None,
        num_buffers=len(names),
        runs=await shared.answer("runs", STORE_SECONDS, newest),
        shown=SHOWN,
    )


def _shared(request: Request) -> Shared:
    shared: Shared = request.app.state.shared
    return shared


def _looks(request: Request, buffer: Buffer) -> deque[Look]:
    looks: dict[int, deque[Look]] = request.app.state.looks
    return looks.setdefault(buffer.id, deque())
