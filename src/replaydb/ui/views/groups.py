"""Groups page: filtered and sorted list of groups."""

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

from replaydb import analysis
from replaydb.buffer import Buffer
from replaydb.buffer.store import Store
from replaydb.database.filters import compiling
from replaydb.database.filters.group_columns import col
from replaydb.domain.decoding import Decode
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.episodes.unrepeated import Unrepeated
from replaydb.domain.results import GroupInfo
from replaydb.errors import (
    CorruptPayloadError,
    InvalidInputError,
    PayloadGoneError,
    UnknownGroupError,
)
from replaydb.ui import downloads, readable
from replaydb.ui.addresses import BOUNDS, INDEXED, GroupQuery
from replaydb.ui.pages import buffer_of, page, store_of

#: Groups per page.
PAGE = 50
#: Maximum number of groups that are counted, and maximum seconds to count them.
MAX_COUNTED = 10_000
COUNT_SECONDS = 0.15
#: Maximum number of groups that a text search reads for a page, and maximum seconds.
MAX_SEARCHED = 1000
SEARCH_SECONDS = 2.0
#: Maximum number of tokens of a group that a text search decodes.
MAX_DECODED = 1_000_000
#: Characters of a completion before and after a match.
CONTEXT = 60

#: Headings of the sortable columns of the table, in its order.
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
#: Query parameters that together are the position of a page.
_POSITION = {"after", "before", "at"}


@dataclass(frozen=True, slots=True)
class Found:
    """A page of groups.

    Attributes:
        rows: The groups.
        has_next: Whether there is a next page.
        has_previous: Whether there is a previous page.
        last: The last group that was read; the next page begins after it.
        snippets: By group id, the text before a match, the match, and the text after it.
        num_searched: Number of groups whose completions a text search has read.
        unreadable: Ids of groups that are omitted because their columns are damaged.
    """

    rows: Sequence[GroupInfo]
    has_next: bool
    has_previous: bool
    last: GroupInfo | None = None
    snippets: Mapping[int, tuple[str, str, str]] = field(default_factory=dict)
    num_searched: int | None = None
    unreadable: Sequence[int] = ()


async def groups(request: Request) -> Response:
    """Show a page of the groups of a buffer, filtered and sorted."""
    params = request.query_params
    if "" in params.values():  # a form sends empty fields, too
        rest = urlencode([it for it in params.multi_items() if it[1]])
        return RedirectResponse(f"./groups?{rest}", 303)
    buffer = await buffer_of(request)
    query, problem = _parse(params)
    decode = request.app.state.decode
    number, found = None, Found((), False, False)
    if problem is None:
        where = await condition(store_of(request), query)
        number = await _count(buffer, query, where)
        found = await _find(buffer, query, where, decode)
    return page(
        request,
        "groups.html",
        status=200 if problem is None else 400,
        query=query,
        params=params,
        problem=problem,
        found=found,
        headings=_HEADINGS,
        indexed=INDEXED,
        bounds=BOUNDS,
        statuses=list(GroupStatus),
        number=number,
        most=MAX_COUNTED,
        decodes=decode is not None,
    )


def may_read_all(request: Request) -> bool:
    """Whether the request is for a page of groups that may have to read every group."""
    if request.url.path.rpartition("/")[2] != "groups":
        return False
    try:
        return GroupQuery.of(request.query_params).may_read_all
    except InvalidInputError:
        return False


def _parse(params: QueryParams) -> tuple[GroupQuery, InvalidInputError | None]:
    """Parse the query parameters. Invalid ones are omitted; the error of the first is returned.

    Raises:
        InvalidInputError: The error is not about a query parameter.
    """
    try:
        query = GroupQuery.of(params)
        _ = query.condition, query.position
    except InvalidInputError as error:
        wrong = _POSITION if error.field in _POSITION else {error.field}
        rest = [(name, value) for name, value in params.multi_items() if name not in wrong]
        if len(rest) == len(params.multi_items()):
            raise
        return _parse(QueryParams(rest))[0], error
    return query, None


async def download(request: Request) -> Response:
    """Download all groups of the query, as rows of `group_overview`.

    Raises:
        InvalidInputError: The query searches for a text, which downloads do not support.
    """
    query, buffer = GroupQuery.of(request.query_params), await buffer_of(request)
    if query.text is not None:
        expected = "no text search in a download; remove this query parameter"
        raise InvalidInputError("text", expected, repr(query.text[:100]))
    return await downloads.answer(
        request,
        analysis.groups,
        buffer=buffer.name,
        tasks=query.task or None,
        statuses=query.status or None,
        runs=query.run or None,
        where=query.condition,
    )


async def condition(store: Store, query: GroupQuery) -> ColumnElement[bool] | None:
    """Return the SQL condition of a query including its runs, without tasks, statuses and text.

    Raises:
        InvalidInputError: The filter or a tag is invalid.
    """
    where = query.condition
    if not query.run:
        return where
    ids = [run.id for run in await store.runs() if run.name in query.run]
    return compiling.all_of([where, col.run_id.in_(ids) if ids else false()])


async def _count(
    buffer: Buffer, query: GroupQuery, where: ColumnElement[bool] | None
) -> int | None:
    """Return the number of groups, at most `MAX_COUNTED` + 1, or None if that takes too long."""
    try:
        async with asyncio.timeout(COUNT_SECONDS):
            return await buffer.count(
                tasks=query.task or None,
                statuses=query.status or None,
                where=where,
                limit=MAX_COUNTED + 1,
            )
    except TimeoutError:
        return None


async def _find(
    buffer: Buffer, query: GroupQuery, where: ColumnElement[bool] | None, decode: Decode | None
) -> Found:
    listing = _Listing(buffer, query, where)
    position = query.position
    if query.text is not None:
        return await _search(listing, query.text, position, decode)
    if position is not None and query.after is not None:
        rows = await listing.read(PAGE + 1, after=position)
        return listing.page(rows[:PAGE], has_next=len(rows) > PAGE, has_previous=True)
    if position is not None:
        rows = await listing.read_back(PAGE + 1, before=position)
        if len(rows) > PAGE:
            return listing.page(rows[-PAGE:], has_next=True, has_previous=True)
    rows = await listing.read(PAGE + 1)
    return listing.page(rows[:PAGE], has_next=len(rows) > PAGE, has_previous=False)


class _Listing:
    """The sorted groups of a query."""

    def __init__(
        self, buffer: Buffer, query: GroupQuery, where: ColumnElement[bool] | None
    ) -> None:
        self.buffer = buffer
        self._query = query
        self._where = where
        self.unreadable: set[int] = set()

    def page(self, rows: Sequence[GroupInfo], *, has_next: bool, has_previous: bool) -> Found:
        """Return a page with these rows."""
        last = rows[-1] if rows else None
        return Found(
            rows, has_next, has_previous, last, unreadable=sorted(self.unreadable, reverse=True)
        )

    async def read(
        self,
        limit: int,
        *,
        after: GroupInfo | tuple[Any, int] | None = None,
        backwards: bool = False,
        also: ColumnElement[bool] | None = None,
    ) -> list[GroupInfo]:
        """Read the first groups, or the next after a group, without damaged ones."""
        column: ColumnElement[Any] = self._query.column
        return await readable.find(
            self.buffer,
            self.unreadable,
            where=compiling.all_of([self._where, also]),
            tasks=self._query.task or None,
            statuses=self._query.status or None,
            order_by=column if self._query.ascending != backwards else column.desc(),
            limit=limit,
            after=after,
        )

    async def read_back(self, limit: int, *, before: tuple[Any, int]) -> list[GroupInfo]:
        """Read the groups before a value and an id. NULLs are sorted last in both directions."""
        column, rows = self._query.column, []
        known = column.is_not(None) if column.nullable else None
        if before[0] is None:
            rows = await self.read(limit, after=before, backwards=True)
            if len(rows) < limit:
                rows += await self.read(limit - len(rows), backwards=True, also=known)
        else:
            rows = await self.read(limit, after=before, backwards=True, also=known)
        return rows[::-1]


async def _search(
    listing: _Listing, text: str, position: tuple[Any, int] | None, decode: Decode | None
) -> Found:
    """Search completions for a text, within the limits of groups and time."""
    end = time.monotonic() + SEARCH_SECONDS
    rows: list[GroupInfo] = []
    last: GroupInfo | None = None
    snippets: dict[int, tuple[str, str, str]] = {}
    num_searched = 0
    also = col.has_transcript.is_(True) if decode is None else None
    while True:
        some = await listing.read(PAGE, after=last or position, also=also)
        is_exhausted = len(some) < PAGE
        for i, info in enumerate(some):
            if (match := await _match(listing.buffer, info, text, decode)) is not None:
                snippets[info.id] = match
                rows.append(info)
            last, num_searched = info, num_searched + 1
            if time.monotonic() > end:
                is_exhausted = is_exhausted and i + 1 == len(some)
                break
        if (
            is_exhausted
            or len(rows) >= PAGE
            or num_searched >= MAX_SEARCHED
            or time.monotonic() > end
        ):
            found = listing.page(rows, has_next=not is_exhausted, has_previous=position is not None)
            return replace(found, snippets=snippets, num_searched=num_searched, last=last)


async def _match(
    buffer: Buffer, info: GroupInfo, text: str, decode: Decode | None
) -> tuple[str, str, str] | None:
    """Search one group. Its texts are read alone, as they may be large."""
    stored = (await buffer.texts([info.id])).get(info.id, {})
    match = _snippet(stored.values(), text)
    if match is None and decode is not None and len(stored) < info.num_episodes:
        match = _snippet(await _decoded(buffer, info, decode), text)
    return match


async def _decoded(buffer: Buffer, info: GroupInfo, decode: Decode) -> list[str]:
    """Return the decoded responses of episodes without stored text, if they can be read."""
    if info.num_tokens > MAX_DECODED:
        return []
    try:
        [group] = await buffer.get([info.id], fields=())
    except (CorruptPayloadError, PayloadGoneError, UnknownGroupError):
        return []
    ids = [
        Unrepeated(one).token_ids(one.prompt_length).tolist()
        for one in group.episodes
        if one.text is None
    ]
    return await asyncio.to_thread(lambda: [decode(it) for it in ids])


def _snippet(texts: Iterable[str], wanted: str) -> tuple[str, str, str] | None:
    """Return the text before the first match, the match, and the text after it."""
    for text in texts:
        start = _folded(text).find(_folded(wanted))
        if start >= 0:
            end = start + len(wanted)
            before, after = text[max(0, start - CONTEXT) : start], text[end : end + CONTEXT]
            return before, text[start:end], after
    return None


def _folded(text: str) -> str:
    """Convert to lower case without changing positions: only İ would become two characters."""
    return text.replace("İ", "i").lower()
