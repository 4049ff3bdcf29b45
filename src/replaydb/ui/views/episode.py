"""An episode whole, a part at a time, and two of them against each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from replaydb.buffer import Buffer
from replaydb.decoding import Decode
from replaydb.episodes import Turn
from replaydb.episodes.flat import flatten, restarts
from replaydb.errors import InvalidInputError
from replaydb.results import EpisodeInfo, GroupInfo
from replaydb.ui import downloads, queries
from replaydb.ui.differences import Comparison, compared, count_words, words
from replaydb.ui.pages import buffer_of, choice_of, number_of, optional_number, page
from replaydb.ui.tokens import (
    TOKENS,
    By,
    Part,
    Span,
    Token,
    highest_advantage,
    legend,
    own_advantages,
    pieces_of,
    said_by,
    texts_of,
    tokens_of,
)
from replaydb.ui.views.group import (
    Contents,
    advantages_of,
    contents,
    ended,
    info_of,
    prompt_of,
)

#: Tokens, and signs, of each completion that are compared word by word.
MOST_DECODED, MOST_SIGNS = 200_000, 1_000_000
#: Turns that a table has.
MOST_TURNS = 100


@dataclass(frozen=True, slots=True)
class Side:
    """What is known of an episode.

    Attributes:
        info: As it is stored.
        advantage: As it was stored, or as GRPO has it.
        ended: Why it ended; None where that is not known.
    """

    info: EpisodeInfo
    advantage: float | None
    ended: str | None


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """An episode, for a page or a download.

    Attributes:
        group: Its group.
        of: What is known of it.
        computed: Whether its advantage is that of GRPO, as none are stored.
        count: How many episodes there are.
        problem: Why there are no tokens; None where there are.
        show: "text" or "tokens".
        by: What the colours of tokens stand for.
        part: Which part it is; None where there are neither tokens nor text.
        prompt: What it answers, where that is known as text alone.
        turns: The first of them, where what each says is not known.
        texts: What each stretch of the part is, the turn it is the answer of, and what it says.
        tokens: The same, token by token.
        own_advantages: Whether each token has its own.
        legend: Colours, and what they stand for.
        metadata: What it was put with.
        restarts: Turns, from 1, whose prompt does not begin with all tokens before it.
    """

    group: GroupInfo
    of: Side
    computed: bool
    count: int
    problem: str | None
    show: str
    by: By
    part: Part | None = None
    prompt: str | None = None
    turns: Sequence[Turn] = ()
    texts: Sequence[tuple[str, Turn | None, str]] = ()
    tokens: Sequence[tuple[Span, Sequence[Token]]] = ()
    own_advantages: bool = False
    legend: Sequence[tuple[str, str]] = ()
    metadata: dict[str, Any] | None = None
    restarts: Sequence[int] = ()


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
    return page(request, "episode.html", one=view, info=view.of.info, choices=choices)


async def download(request: Request) -> Response:
    """What is known of it, and its text."""
    return await _said(request, ("position",))


async def download_two(request: Request) -> Response:
    """The same of both."""
    return await _said(request, ("a", "b"))


async def _said(request: Request, fields: Sequence[str]) -> Response:
    buffer = await buffer_of(request)
    info = await info_of(buffer, number_of(request, "group"))
    known = await buffer.episodes(info.id, limit=info.num_episodes)
    places = [_known(info, known, number_of(request, field)).position for field in fields]
    return await downloads.answer(request, queries.select_said(buffer.name, info.id, places))


async def download_tokens(request: Request) -> Response:
    """Its tokens, a row each. They are in no view: there is no SQL that gives them."""
    buffer = await buffer_of(request)
    whole = await _read(buffer, number_of(request, "group"))
    position = whole.info_of(number_of(request, "position")).position
    if whole.content.problem is not None:
        raise InvalidInputError("group", "one whose tokens can be read", whole.content.problem)
    url = request.app.state.url
    return await downloads.answer_rows(
        request, lambda: queries.tokens(url, buffer.name, whole.group.id, position)
    )


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
        HTTPException: The group has no such episode.
    """
    whole = await _read(buffer, group_id)
    here = whole.side(position)
    content = whole.content
    one, text = content.episodes.get(position), content.texts.get(position)
    count = whole.group.num_episodes
    show = show if one is not None else "text"
    view = EpisodeView(whole.group, here, whole.computed, count, content.problem, show, by)
    if one is None:
        part, texts = texts_of(None, text, number, None)
        return replace(view, part=part, texts=texts) if texts else view
    if one.turns:
        view = replace(view, restarts=[turn + 1 for _, turn in restarts(flatten([one]))])
    if show == "text":
        part, texts = texts_of(one, text, number, decode)
        begins = decode is None and part.number == 0
        return replace(
            view,
            part=part,
            prompt=whole.prompt if begins else None,
            turns=one.turns[:MOST_TURNS] if begins else (),
            texts=texts,
            metadata=one.metadata,
        )
    part = Part.of(number, one.num_tokens, TOKENS)
    most = max(highest_advantage(it, whole.advantages[i]) for i, it in content.episodes.items())
    return replace(
        view,
        part=part,
        tokens=list(tokens_of(one, part, by, decode, here.advantage, most)),
        own_advantages=own_advantages(one) is not None,
        legend=legend(one, by, most),
        metadata=one.metadata,
    )


@dataclass(frozen=True, slots=True)
class _Whole:
    """A group with what its episodes are.

    Attributes:
        group: What is known of it.
        infos: What is known of its episodes.
        content: What can be read of these.
        advantages: By position, as they were stored, or as GRPO has them.
        computed: Whether they are those of GRPO, as none are stored.
        prompt: What they answer, where it was put as text or messages.
    """

    group: GroupInfo
    infos: Sequence[EpisodeInfo]
    content: Contents
    advantages: Mapping[int, float | None]
    computed: bool
    prompt: str | None

    def info_of(self, position: int) -> EpisodeInfo:
        """What is known of an episode.

        Raises:
            HTTPException: It is not there.
        """
        return _known(self.group, self.infos, position)

    def side(self, position: int) -> Side:
        """The same, and what follows from the others; raises as `info_of`."""
        info = self.info_of(position)
        return Side(
            info, self.advantages[position], ended(info, self.content.episodes.get(position))
        )


def _known(group: GroupInfo, infos: Iterable[EpisodeInfo], position: int) -> EpisodeInfo:
    for one in infos:
        if one.position == position:
            return one
    reason = f"group {group.id} has no episode {position}: it has {group.num_episodes}"
    raise HTTPException(404, reason)


async def _read(buffer: Buffer, group_id: int) -> _Whole:
    info = await info_of(buffer, group_id)
    known = await buffer.episodes(group_id, limit=info.num_episodes)
    content = await contents(buffer, info, known)
    prompt = prompt_of(content.stored, None).text
    return _Whole(info, known, content, *advantages_of(known), prompt)


@dataclass(frozen=True, slots=True)
class CompareView:
    """Two episodes of a group, for a page or a download.

    Attributes:
        group: Their group.
        a: The one.
        b: The other.
        computed: Whether advantages are those of GRPO, as none are stored.
        by: "words" or "tokens".
        not_by_words: Why it is not by words, which was asked for; None where it is.
        problem: Why there are no tokens; None where there are.
        found: What differs; None where there are no texts either.
        other_tokens: Whether tokens differ, though no word does.
    """

    group: GroupInfo
    a: Side
    b: Side
    computed: bool
    by: str
    not_by_words: str | None = None
    problem: str | None = None
    found: Comparison | None = None
    other_tokens: bool = False


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
        HTTPException: The group has no such episode.
    """
    whole = await _read(buffer, group_id)
    one, other = (whole.side(position) for position in (a, b))
    content, places = whole.content, (a, b)
    view = CompareView(whole.group, one, other, whole.computed, by, problem=content.problem)
    if content.problem is not None:
        view, decode = replace(view, by="words"), None
    why = _not_by_words(content, places, decode) if view.by == "words" else None
    if why is not None and content.problem is not None:
        return view
    if why is not None:
        view = replace(view, by="tokens", not_by_words=why)
    find = _by_words if view.by == "words" else _by_tokens
    found = await asyncio.to_thread(find, content, places, decode)
    ids = [it.response_ids for i, it in content.episodes.items() if i in places]
    other_tokens = found.same and len(ids) == 2 and not np.array_equal(ids[0], ids[1])
    return replace(view, found=found, other_tokens=other_tokens)


def _not_by_words(content: Contents, places: Sequence[int], decode: Decode | None) -> str | None:
    """Why two episodes cannot be compared by words; None where they can."""
    if decode is not None:
        is_long = any(len(content.episodes[it].response_ids) > MOST_DECODED for it in places)
        return f"one has more than {MOST_DECODED:,} tokens" if is_long else None
    texts = [content.texts.get(it) for it in places]
    if None in texts:
        return "one was put without text"
    is_long = any(len(text or "") > MOST_SIGNS for text in texts)
    return f"one has more than {MOST_SIGNS:,} signs" if is_long else None


def _by_words(content: Contents, places: Sequence[int], decode: Decode | None) -> Comparison:
    left, right = (
        words(
            content.texts[it]
            if decode is None
            else said_by(ids := content.episodes[it].response_ids, 0, len(ids), decode)
        )
        for it in places
    )
    return compared(left, right, lambda side, i, j: list(side[i:j]), count_words)


def _by_tokens(content: Contents, places: Sequence[int], decode: Decode | None) -> Comparison:
    def says(ids: Any, start: int, end: int) -> list[str]:
        texts = pieces_of(ids, start, end, decode)
        if decode is None:
            return texts
        ids = ids[start:end].tolist()  # a token that is no part of a sign is there as its id
        return [
            text or ("" if decode([it]) else f"⟨{it}⟩") for text, it in zip(texts, ids, strict=True)
        ]

    left, right = (content.episodes[it].response_ids for it in places)
    return compared(left, right, says)
