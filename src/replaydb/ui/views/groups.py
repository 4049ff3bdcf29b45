"""Find the groups that I mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, false
from starlette.requests import Request
from starlette.responses import Response

from replaydb.batch.stored import StoredGroup
from replaydb.buffer import Buffer
from replaydb.database import filters
from replaydb.database.group_columns import col
from replaydb.episodes import GroupStatus
from replaydb.errors import CorruptPayloadError, PayloadGoneError, UnknownGroupError
from replaydb.results import GroupInfo
from replaydb.store import Store
from replaydb.ui import downloads
from replaydb.ui.addresses import BOUNDS, INDEXED, Groups, plain
from replaydb.ui.pages import buffer_of, page, store_of

#: Groups on a page.
PAGE = 50
#: Groups are counted up to here, and as long as this, in seconds.
MOST_COUNTED = 10_000
COUNT_SECONDS = 0.15
#: Texts are looked for in so many groups at most, and as long as this, in seconds.
MOST_LOOKED_THROUGH = 1000
LOOK_SECONDS = 2.0
#: Characters of a completion around what was looked for.
AROUND = 60

#: What the table calls the columns that it can be sorted by, in its order.
_HEADINGS = {
    "num_episodes": "episodes",
    "num_tokens": "tokens",
    "reward_mean": "reward",
    "reward_std": "std",
    "comparable_version": "version",
    "times_sampled": "drawn",
    "last_sampled_at": "last drawn",
    "priority": "priority",
}


@dataclass(frozen=True, slots=True)
class Found:
    """A page of groups.

    Attributes:
        rows: The groups.
        has_more: Whether others come after them.
        has_fewer: Whether others come before them.
        snippets: What their completions say around the text that was looked for, by id.
        looked_through: Groups whose completions were read, where a text was looked for.
        last: Id of the last group that was looked at.
    """

    rows: Sequence[GroupInfo]
    has_more: bool
    has_fewer: bool
    snippets: dict[int, tuple[str, str, str]]
    looked_through: int | None = None
    last: int | None = None


async def groups(request: Request) -> Response:
    """A table of the groups of a buffer, filtered, sorted, a page at a time."""
    asked = Groups.of(request.query_params)
    buffer = await buffer_of(request)
    where = await condition(store_of(request), asked)
    number = await _number(buffer, asked, where)
    found, is_lost = await _found(buffer, asked, where)
    return page(
        request,
        "groups.html",
        asked=asked,
        meaning=asked.meaning,
        found=found,
        is_lost=is_lost,
        headings=_HEADINGS,
        indexed=INDEXED,
        bounds=BOUNDS,
        given={name: plain(value) for name, value in asked.bounds},
        statuses=list(GroupStatus),
        number=number,
        most=MOST_COUNTED,
    )


async def download(request: Request) -> Response:
    """The groups that the page of the same address shows, on all its pages: see `downloads`."""
    asked = Groups.of(request.query_params)
    buffer = await buffer_of(request)
    kind = downloads.kind_of(request)
    parts = await downloads.groups(request.app.state.url, buffer.name, asked, kind)
    return downloads.answer(request, parts)


async def condition(store: Store, asked: Groups) -> ColumnElement[bool] | None:
    """What has to be true of a group, also of the run that put it; but for tasks and statuses.

    Raises:
        InvalidInputError: The filter, or a tag, is none.
    """
    where = asked.condition
    if not asked.run:
        return where
    ids = [run.id for run in await store.runs() if run.name in asked.run]
    return filters.all_of([where, col.run_id.in_(ids) if ids else false()])


async def _number(buffer: Buffer, asked: Groups, where: ColumnElement[bool] | None) -> int | None:
    """How many there are, up to one more than are counted; None where that would take long."""
    try:
        async with asyncio.timeout(COUNT_SECONDS):
            return await buffer.count(
                tasks=asked.task or None,
                statuses=asked.status or None,
                where=where,
                limit=MOST_COUNTED + 1,
            )
    except TimeoutError:
        return None


async def _found(
    buffer: Buffer, asked: Groups, where: ColumnElement[bool] | None
) -> tuple[Found, bool]:
    """The page; and whether it is the first as the group that it was to go on from is gone."""
    listing = _Listing(buffer, asked, where)
    mark = asked.before if asked.after is None else asked.after
    there = [] if mark is None else await buffer.find([mark])
    if asked.text is not None:
        return await _saying(listing, asked.text, there), mark is not None and not there
    if not there:
        rows = await listing.read(PAGE + 1)
        return Found(rows[:PAGE], len(rows) > PAGE, False, {}), mark is not None
    if asked.after is not None:
        rows = await listing.read(PAGE + 1, after=there[0])
        return Found(rows[:PAGE], len(rows) > PAGE, True, {}), False
    rows = await listing.read_back(PAGE + 1, before=there[0])
    return Found(rows[-PAGE:], True, len(rows) > PAGE, {}), False


class _Listing:
    """The groups of a buffer that were asked for, in order."""

    def __init__(self, buffer: Buffer, asked: Groups, where: ColumnElement[bool] | None) -> None:
        self.buffer = buffer
        self._asked = asked
        self._where = where

    async def read(
        self,
        limit: int,
        *,
        after: GroupInfo | None = None,
        backwards: bool = False,
        also: ColumnElement[bool] | None = None,
    ) -> list[GroupInfo]:
        """The first, or those after a group."""
        column: ColumnElement[Any] = self._asked.column
        return await self.buffer.find(
            tasks=self._asked.task or None,
            statuses=self._asked.status or None,
            where=filters.all_of([self._where, also]),
            order_by=column if self._asked.ascending != backwards else column.desc(),
            limit=limit,
            after=after,
        )

    async def read_back(self, limit: int, *, before: GroupInfo) -> list[GroupInfo]:
        """Those before a group. Those without a value come last, whatever the direction."""
        column, rows = self._asked.column, []
        known = column.is_not(None) if column.nullable else None
        if getattr(before, column.key) is None:
            rows = await self.read(limit, after=before, backwards=True)
            if len(rows) < limit:
                rows += await self.read(limit - len(rows), backwards=True, also=known)
        else:
            rows = await self.read(limit, after=before, backwards=True, also=known)
        return rows[::-1]


async def _saying(listing: _Listing, text: str, there: Sequence[GroupInfo]) -> Found:
    """The next groups with a completion that says a text, as far as there is time to look."""
    end = time.monotonic() + LOOK_SECONDS
    last = there[0] if there else None
    rows: list[GroupInfo] = []
    snippets: dict[int, tuple[str, str, str]] = {}
    looked = 0
    while True:
        some = await listing.read(PAGE, after=last, also=col.has_transcript.is_(True))
        for group in await _read(listing.buffer, [info.id for info in some]):
            if (said := _snippet(group.texts, text)) is not None:
                snippets[group.id] = said
        looked += len(some)
        rows += [info for info in some if info.id in snippets]
        last = some[-1] if some else last
        is_over = len(some) < PAGE
        if is_over or len(rows) >= PAGE or looked >= MOST_LOOKED_THROUGH or time.monotonic() > end:
            return Found(
                rows, not is_over, bool(there), snippets, looked, None if last is None else last.id
            )


async def _read(buffer: Buffer, ids: Sequence[int]) -> Iterable[StoredGroup]:
    """Groups with their episodes, but for those that cannot be read."""
    try:
        return await buffer.get(ids)
    except (CorruptPayloadError, PayloadGoneError, UnknownGroupError) as error:
        return error.batch or ()


def _snippet(texts: Iterable[str | None], wanted: str) -> tuple[str, str, str] | None:
    """What stands before a text, the text as it stands there, and what stands after it."""
    for text in texts:
        place = -1 if text is None else text.lower().find(wanted.lower())
        if text is not None and place >= 0:
            end = place + len(wanted)
            return text[max(0, place - AROUND) : place], text[place:end], text[end : end + AROUND]
    return None
