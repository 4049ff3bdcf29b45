"""An episode whole, a part at a time, and two of them against each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from replaydb.buffer import Buffer
from replaydb.decoding import Decode, pieces
from replaydb.episodes import Episode
from replaydb.errors import InvalidInputError
from replaydb.results import EpisodeInfo, GroupInfo
from replaydb.ui.differences import Comparison, compared, words
from replaydb.ui.pages import buffer_of, choice_of, number_of, optional_number, page
from replaydb.ui.tokens import (
    TOKENS,
    By,
    Part,
    Span,
    Token,
    highest_advantage,
    legend,
    texts_of,
    tokens_of,
)
from replaydb.ui.views.group import info_of, read

#: Tokens of each completion that are decoded to compare them.
MOST_COMPARED = 20_000


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """An episode, for a page or a download.

    Attributes:
        group: Its group.
        info: What is known of it.
        count: How many episodes there are.
        problem: Why there are no tokens; None where there are.
        show: "text" or "tokens".
        by: What the colours of tokens stand for.
        part: Which part it is; None where there are no tokens.
        texts: What each stretch of the part is, and says.
        tokens: The same, token by token.
        legend: Colours, and what they stand for.
        metadata: What it was put with.
    """

    group: GroupInfo
    info: EpisodeInfo
    count: int
    problem: str | None
    show: str
    by: By
    part: Part | None = None
    texts: Sequence[tuple[str, str]] = ()
    tokens: Sequence[tuple[Span, Sequence[Token]]] = ()
    legend: Sequence[tuple[str, str]] = ()
    metadata: dict[str, Any] | None = None


async def episode(request: Request) -> Response:
    """An episode as text, or as tokens coloured by what is known of them."""
    buffer = await buffer_of(request)
    view = await look(
        buffer,
        number_of(request, "group"),
        number_of(request, "position"),
        show=choice_of(request, "show", ("text", "tokens")),
        by=choice_of(request, "by", get_args(By)),
        number=optional_number(request, "part") or 0,
        decode=request.app.state.decode,
    )
    choices = get_args(By)
    return page(request, "episode.html", one=view, info=view.info, choices=choices)


async def look(
    buffer: Buffer,
    group_id: int,
    position: int,
    *,
    show: str = "text",
    by: By = "logprob",
    number: int = 0,
    decode: Decode | None = None,
) -> EpisodeView:
    """A part of an episode.

    Args:
        buffer: In which it is.
        group_id: Its group.
        position: Its place there.
        show: "text" or "tokens".
        by: What the colours of tokens stand for.
        number: Which part, from 0.
        decode: What decodes tokens.

    Raises:
        UnknownGroupError: The group is not there.
        InvalidInputError: The group has no such episode.
    """
    whole = await _read(buffer, group_id)
    here = whole.info_of(position)
    count, problem = whole.group.num_episodes, whole.problem
    if problem is not None:
        return EpisodeView(whole.group, here, count, problem, show, by)
    one = whole.episodes[position]
    if show == "text":
        part, texts = texts_of(one, number, decode)
        return EpisodeView(
            whole.group, here, count, None, show, by, part, texts, metadata=one.metadata
        )
    part = Part.of(number, one.num_tokens, TOKENS)
    most = max(map(highest_advantage, whole.episodes.values()))
    return EpisodeView(
        whole.group,
        here,
        count,
        None,
        show,
        by,
        part,
        tokens=list(tokens_of(one, part, by, decode, most)),
        legend=legend(one, by, most),
        metadata=one.metadata,
    )


@dataclass(frozen=True, slots=True)
class _Whole:
    """A group with its tokens.

    Attributes:
        group: What is known of it.
        infos: What is known of its episodes.
        episodes: By their positions, of which some may not have arrived.
        problem: Why there are none; None where there are.
    """

    group: GroupInfo
    infos: Sequence[EpisodeInfo]
    episodes: dict[int, Episode]
    problem: str | None

    def info_of(self, position: int) -> EpisodeInfo:
        """What is known of an episode.

        Raises:
            InvalidInputError: It is not there.
        """
        for one in self.infos:
            if one.position == position:
                return one
        expected = f"an episode of group {self.group.id}, which has {self.group.num_episodes}"
        raise InvalidInputError("position", expected, position)


async def _read(buffer: Buffer, group_id: int) -> _Whole:
    info = await info_of(buffer, group_id)
    known = await buffer.episodes(group_id, limit=info.num_episodes)
    stored, problem = await read(buffer, info)
    episodes = () if stored is None else stored.episodes
    by_position = dict(zip((one.position for one in known), episodes, strict=False))
    return _Whole(info, known, by_position, problem)


@dataclass(frozen=True, slots=True)
class CompareView:
    """Two episodes of a group, for a page or a download.

    Attributes:
        group: Their group.
        a: What is known of the one.
        b: What is known of the other.
        by: "words" or "tokens".
        problem: Why they cannot be compared; None where they are.
        found: What differs.
    """

    group: GroupInfo
    a: EpisodeInfo
    b: EpisodeInfo
    by: str
    problem: str | None
    found: Comparison | None = None


async def compare(request: Request) -> Response:
    """Where two episodes of a group differ."""
    two = await look_at_two(
        await buffer_of(request),
        number_of(request, "group"),
        number_of(request, "a"),
        number_of(request, "b"),
        by=choice_of(request, "by", ("words", "tokens")),
        decode=request.app.state.decode,
    )
    return page(request, "compare.html", two=two, found=two.found)


async def look_at_two(
    buffer: Buffer,
    group_id: int,
    a: int,
    b: int,
    *,
    by: str = "words",
    decode: Decode | None = None,
) -> CompareView:
    """Where two episodes of a group differ.

    Raises:
        UnknownGroupError: The group is not there.
        InvalidInputError: The group has no such episode.
    """
    whole = await _read(buffer, group_id)
    one, other = (whole.info_of(position) for position in (a, b))
    if whole.problem is not None:
        return CompareView(whole.group, one, other, by, whole.problem)
    left, right = (whole.episodes[position] for position in (a, b))
    if by == "words" and decode is None and (left.text is None or right.text is None):
        by = "tokens"
    sides = [_items(it, by, decode) for it in (left, right)]
    found = await asyncio.to_thread(compared, *sides)
    return CompareView(whole.group, one, other, by, None, found)


def _items(one: Episode, by: str, decode: Decode | None) -> list[str]:
    ids = one.response_ids[:MOST_COMPARED].tolist()
    if by == "words":
        return words(one.text or "" if decode is None else decode(ids))
    return [f"{it} " for it in ids] if decode is None else pieces(ids, decode)
