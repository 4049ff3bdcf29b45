"""Find the groups that I mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import ColumnElement, false
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from replaydb.buffer import Buffer
from replaydb.database import filters
from replaydb.database.group_columns import col
from replaydb.decoding import Decode
from replaydb.episodes import GroupStatus
from replaydb.errors import (
    CorruptPayloadError,
    InvalidInputError,
    PayloadGoneError,
    UnknownGroupError,
)
from replaydb.results import GroupInfo
from replaydb.store import Store
from replaydb.ui import downloads, queries, readable
from replaydb.ui.addresses import BOUNDS, INDEXED, Groups
from replaydb.ui.pages import buffer_of, page, store_of

#: Groups on a page.
PAGE = 50
#: Groups are counted up to here, and as long as this, in seconds.
MOST_COUNTED = 10_000
COUNT_SECONDS = 0.15
#: Texts are looked for in so many groups at most, and as long as this, in seconds.
MOST_LOOKED_THROUGH = 1000
LOOK_SECONDS = 2.0
#: Tokens of a group that are decoded to look for one.
MOST_DECODED = 1_000_000
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
#: Fields that say together where a page begins.
_PLACE = {"after", "before", "at"}


@dataclass(frozen=True, slots=True)
class Found:
    """A page of groups.

    Attributes:
        rows: The groups.
        has_more: Whether others come after them.
        has_fewer: Whether others come before them.
        last: The last group that was looked at; the page after this one begins after it.
        snippets: What their completions say around the text that was looked for, by id.
        looked_through: Groups whose completions were read, where a text was looked for.
        unreadable: Ids of groups that would be among them, whose columns are damaged.
    """

    rows: Sequence[GroupInfo]
    has_more: bool
    has_fewer: bool
    last: GroupInfo | None = None
    snippets: Mapping[int, tuple[str, str, str]] = field(default_factory=dict)
    looked_through: int | None = None
    unreadable: Sequence[int] = ()


async def groups(request: Request) -> Response:
    """A table of the groups of a buffer, filtered, sorted, a page at a time."""
    said = request.query_params
    if "" in said.values():  # forms send fields that are empty
        rest = urlencode([it for it in said.multi_items() if it[1]])
        return RedirectResponse(f"./groups?{rest}", 303)
    buffer = await buffer_of(request)
    asked, problem = _asked(said)
    decode = request.app.state.decode
    number, found = None, Found((), False, False)
    if problem is None:
        where = await condition(store_of(request), asked)
        number = await _number(buffer, asked, where)
        found = await _found(buffer, asked, where, decode)
    return page(
        request,
        "groups.html",
        status=200 if problem is None else 400,
        asked=asked,
        said=said,
        problem=problem,
        found=found,
        headings=_HEADINGS,
        indexed=INDEXED,
        bounds=BOUNDS,
        statuses=list(GroupStatus),
        number=number,
        most=MOST_COUNTED,
        decodes=decode is not None,
    )


def may_read_all(request: Request) -> bool:
    """Whether a page of groups is asked for that may have to read every one of them."""
    if request.url.path.rpartition("/")[2] != "groups":
        return False
    try:
        return Groups.of(request.query_params).may_read_all
    except InvalidInputError:
        return False


def _asked(said: QueryParams) -> tuple[Groups, InvalidInputError | None]:
    """What an address asks for, without the fields that hold what they cannot, and the first one.

    Raises:
        InvalidInputError: What is wrong is not in the address.
    """
    try:
        asked = Groups.of(said)
        _ = asked.condition, asked.place
    except InvalidInputError as error:
        wrong = _PLACE if error.field in _PLACE else {error.field}
        rest = [(name, value) for name, value in said.multi_items() if name not in wrong]
        if len(rest) == len(said.multi_items()):
            raise
        return _asked(QueryParams(rest))[0], error
    return asked, None


async def download(request: Request) -> Response:
    """The groups that the page of the same address shows, on all its pages: see `downloads`."""
    asked, name = Groups.of(request.query_params), (await buffer_of(request)).name
    return await downloads.answer(
        request,
        queries.select_groups(name, asked),
        lambda: queries.groups(request.app.state.url, name, asked),
    )


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
    buffer: Buffer, asked: Groups, where: ColumnElement[bool] | None, decode: Decode | None
) -> Found:
    listing = _Listing(buffer, asked, where)
    mark = asked.place
    if asked.text is not None:
        return await _saying(listing, asked.text, mark, decode)
    if mark is not None and asked.after is not None:
        rows = await listing.read(PAGE + 1, after=mark)
        return listing.page(rows[:PAGE], has_more=len(rows) > PAGE, has_fewer=True)
    if mark is not None:
        rows = await listing.read_back(PAGE + 1, before=mark)
        if len(rows) > PAGE:
            return listing.page(rows[-PAGE:], has_more=True, has_fewer=True)
    rows = await listing.read(PAGE + 1)
    return listing.page(rows[:PAGE], has_more=len(rows) > PAGE, has_fewer=False)


class _Listing:
    """The groups of a buffer that were asked for, in order."""

    def __init__(self, buffer: Buffer, asked: Groups, where: ColumnElement[bool] | None) -> None:
        self.buffer = buffer
        self._asked = asked
        self._where = where
        self.unreadable: set[int] = set()

    def page(self, rows: Sequence[GroupInfo], *, has_more: bool, has_fewer: bool) -> Found:
        """So many of them."""
        last = rows[-1] if rows else None
        return Found(
            rows, has_more, has_fewer, last, unreadable=sorted(self.unreadable, reverse=True)
        )

    async def read(
        self,
        limit: int,
        *,
        after: GroupInfo | tuple[Any, int] | None = None,
        backwards: bool = False,
        also: ColumnElement[bool] | None = None,
    ) -> list[GroupInfo]:
        """The first, or those after a group; without those whose columns are damaged."""
        column: ColumnElement[Any] = self._asked.column
        return await readable.find(
            self.buffer,
            self.unreadable,
            where=filters.all_of([self._where, also]),
            tasks=self._asked.task or None,
            statuses=self._asked.status or None,
            order_by=column if self._asked.ascending != backwards else column.desc(),
            limit=limit,
            after=after,
        )

    async def read_back(self, limit: int, *, before: tuple[Any, int]) -> list[GroupInfo]:
        """Those before a value and an id; those without a value come last in both directions."""
        column, rows = self._asked.column, []
        known = column.is_not(None) if column.nullable else None
        if before[0] is None:
            rows = await self.read(limit, after=before, backwards=True)
            if len(rows) < limit:
                rows += await self.read(limit - len(rows), backwards=True, also=known)
        else:
            rows = await self.read(limit, after=before, backwards=True, also=known)
        return rows[::-1]


async def _saying(
    listing: _Listing, text: str, mark: tuple[Any, int] | None, decode: Decode | None
) -> Found:
    """The next groups with a completion that says a text, as far as there is time to look."""
    end = time.monotonic() + LOOK_SECONDS
    rows: list[GroupInfo] = []
    last: GroupInfo | None = None
    snippets: dict[int, tuple[str, str, str]] = {}
    looked = 0
    also = col.has_transcript.is_(True) if decode is None else None
    while True:
        some = await listing.read(PAGE, after=last or mark, also=also)
        is_over = len(some) < PAGE
        for i, info in enumerate(some):
            if (said := await _said_in(listing.buffer, info, text, decode)) is not None:
                snippets[info.id] = said
                rows.append(info)
            last, looked = info, looked + 1
            if time.monotonic() > end:
                is_over = is_over and i + 1 == len(some)
                break
        if is_over or len(rows) >= PAGE or looked >= MOST_LOOKED_THROUGH or time.monotonic() > end:
            found = listing.page(rows, has_more=not is_over, has_fewer=mark is not None)
            return replace(found, snippets=snippets, looked_through=looked, last=last)


async def _said_in(
    buffer: Buffer, info: GroupInfo, text: str, decode: Decode | None
) -> tuple[str, str, str] | None:
    """What a group says around a text. Of one at a time, as texts may be large."""
    known = (await buffer.texts([info.id])).get(info.id, {})
    said = _snippet(known.values(), text)
    if said is None and decode is not None and len(known) < info.num_episodes:
        said = _snippet(await _decoded(buffer, info, decode), text)
    return said


async def _decoded(buffer: Buffer, info: GroupInfo, decode: Decode) -> list[str]:
    """What the episodes of a group say that were put without text, as far as that can be read."""
    if info.num_tokens > MOST_DECODED:
        return []
    try:
        [group] = await buffer.get([info.id])
    except (CorruptPayloadError, PayloadGoneError, UnknownGroupError):
        return []
    ids = [one.response_ids.tolist() for one in group.episodes if one.text is None]
    return await asyncio.to_thread(lambda: [decode(it) for it in ids])


def _snippet(texts: Iterable[str], wanted: str) -> tuple[str, str, str] | None:
    """What stands before a text, the text as it stands there, and what stands after it."""
    for text in texts:
        place = _folded(text).find(_folded(wanted))
        if place >= 0:
            end = place + len(wanted)
            return text[max(0, place - AROUND) : place], text[place:end], text[end : end + AROUND]
    return None


def _folded(text: str) -> str:
    """A text in small letters, each at its place: of all signs only İ becomes two."""
    return text.replace("İ", "i").lower()
