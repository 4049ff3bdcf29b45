"""Episode page, and comparison of two episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from replaydb import analysis
from replaydb.buffer import Buffer
from replaydb.database.filters.group_columns import col
from replaydb.domain.decoding import Decode
from replaydb.domain.episodes import Turn
from replaydb.domain.episodes.merging import restarts
from replaydb.domain.episodes.unrepeated import Unrepeated
from replaydb.domain.results import EpisodeInfo, GroupInfo
from replaydb.errors import InvalidInputError
from replaydb.ui import downloads
from replaydb.ui.differences import Comparison, compared, count_words, words
from replaydb.ui.pages import buffer_of, choice_of, number_of, optional_number, page
from replaydb.ui.tokens import (
    ADVANTAGES,
    TOKENS,
    By,
    Part,
    Span,
    Token,
    decoded_text,
    highest_advantage,
    legend,
    own_advantages,
    texts_in_range,
    texts_of,
    tokens_of,
)
from replaydb.ui.views.group import EpisodeSummary, LoadedGroup, info_of, load, prompt_of

#: Maximum number of tokens, and of characters, of a completion that is compared word by word.
MAX_DECODED, MAX_CHARACTERS = 200_000, 1_000_000
#: Maximum number of turns in the table.
MAX_TURNS = 100


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """A part of an episode, for the page.

    Attributes:
        loaded: Its group.
        summary: Facts of the episode.
        show: "text" or "tokens".
        by: The value that the colors of tokens represent.
        part: The displayed part; None if there are neither tokens nor text.
        prompt: The prompt as stored text, on the first part if there is no tokenizer.
        turns: The first turns, on the first part if there is no tokenizer to decode them.
        texts: For each span of the part its name, the turn if it is the response of one, and its
            text.
        tokens: The spans of the part with their tokens.
        own_advantages: Whether advantages per token are stored.
        legend: CSS classes with the values that they represent.
        metadata: Metadata of the episode.
        restarts: Numbers, from 1, of turns whose prompt starts with all tokens of no earlier turn.
    """

    loaded: LoadedGroup
    summary: EpisodeSummary
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

    @property
    def neighbours(self) -> list[tuple[str, int]]:
        """The positions of the episodes before and after it, with their names."""
        here = self.summary.info.position
        others = [one.position for one in self.loaded.infos]
        before = [("Previous", position) for position in others if position < here]
        after = [("Next", position) for position in others if position > here]
        return before[-1:] + after[:1]


async def episode(request: Request) -> Response:
    """Show an episode as text, or as tokens colored by one of their values."""
    buffer = await buffer_of(request)
    view = await load_episode(
        buffer,
        number_of(request, "group"),
        number_of(request, "position"),
        show=choice_of(request, "show", ("text", "tokens")),
        by=choice_of(request, "by", get_args(By)),
        number=optional_number(request, "part") or 0,
        decode=request.app.state.decode,
    )
    choices = get_args(By)
    return page(request, "episode.html", one=view, info=view.summary.info, choices=choices)


async def download(request: Request) -> Response:
    """Download the row of the episode, with its text."""
    return await _download_texts(request, ("position",))


async def download_two(request: Request) -> Response:
    """Download the rows of two episodes, with their texts."""
    return await _download_texts(request, ("a", "b"))


async def _download_texts(request: Request, fields: Sequence[str]) -> Response:
    buffer = await buffer_of(request)
    info = await info_of(buffer, number_of(request, "group"))
    infos = await buffer.episodes(info.id, limit=info.num_episodes)
    positions = [_find_info(info, infos, number_of(request, field)).position for field in fields]
    return await downloads.answer(
        request,
        analysis.episodes,
        buffer=buffer.name,
        where=col.id == info.id,
        positions=positions,
    )


async def download_tokens(request: Request) -> Response:
    """Download the tokens of an episode, one row each."""
    buffer = await buffer_of(request)
    loaded = await load(buffer, number_of(request, "group"))
    info = _find_info(loaded.info, loaded.infos, number_of(request, "position"))
    if loaded.problem is not None:
        raise InvalidInputError("group", "a group with readable tokens", loaded.problem)
    return await downloads.answer(
        request,
        analysis.tokens,
        buffer=buffer.name,
        where=col.id == loaded.info.id,
        per="token",
        positions=[info.position],
    )


async def load_episode(
    buffer: Buffer,
    group_id: int,
    position: int,
    *,
    show: str = "text",
    by: By = "logprob",
    number: int = 0,
    decode: Decode | None = None,
) -> EpisodeView:
    """Load a part of an episode.

    Args:
        buffer: The buffer.
        group_id: The group of the episode.
        position: Position of the episode in the group.
        show: "text" or "tokens".
        by: The value that the colors of tokens represent.
        number: Number of the part, from 0.
        decode: Decodes tokens; None without a tokenizer.

    Raises:
        UnknownGroupError: There is no such group.
        HTTPException: The group has no such episode.
    """
    loaded = await load(buffer, group_id, fields=ADVANTAGES if show == "tokens" else ())
    summary = loaded.summary(_find_info(loaded.info, loaded.infos, position))
    one, text = loaded.episodes.get(position), loaded.texts.get(position)
    view = EpisodeView(loaded, summary, show if one is not None else "text", by)
    if one is None:
        part, texts = texts_of(None, text, number, None)
        return replace(view, part=part, texts=texts) if texts else view
    if one.turns:
        view = replace(view, restarts=[turn + 1 for _, turn in restarts([one])])
    if view.show == "text":
        part, texts = texts_of(one, text, number, decode)
        show_turns = decode is None and part.number == 0
        return replace(
            view,
            part=part,
            prompt=prompt_of(loaded.stored, None).text if show_turns else None,
            turns=one.turns[:MAX_TURNS] if show_turns else (),
            texts=texts,
            metadata=one.metadata,
        )
    tokens = Unrepeated(one)
    part = Part.of(number, tokens.num_tokens, TOKENS)
    max_advantage = 0.0
    if by == "advantage":
        max_advantage = max(
            highest_advantage(Unrepeated(it), loaded.advantages[i])
            for i, it in loaded.episodes.items()
        )
    return replace(
        view,
        part=part,
        tokens=list(tokens_of(tokens, part, by, decode, summary.advantage, max_advantage)),
        own_advantages=own_advantages(tokens, part.start, part.end) is not None,
        legend=legend(tokens, by, max_advantage),
        metadata=one.metadata,
    )


def _find_info(group: GroupInfo, infos: Iterable[EpisodeInfo], position: int) -> EpisodeInfo:
    for one in infos:
        if one.position == position:
            return one
    reason = f"group {group.id} has no episode {position}: it has {group.num_episodes}"
    raise HTTPException(404, reason)


@dataclass(frozen=True, slots=True)
class CompareView:
    """A comparison of two episodes of a group, for the page.

    Attributes:
        loaded: Their group.
        a: Facts of the first episode.
        b: Facts of the second episode.
        by: "words" or "tokens".
        not_by_words: Why a comparison by words was requested but is not possible; else None.
        found: The comparison; None if there are neither tokens nor texts.
        tokens_differ: Whether tokens differ although the texts are equal.
    """

    loaded: LoadedGroup
    a: EpisodeSummary
    b: EpisodeSummary
    by: str
    not_by_words: str | None = None
    found: Comparison | None = None
    tokens_differ: bool = False


async def compare(request: Request) -> Response:
    """Show the differences between two episodes of a group."""
    two = await load_comparison(
        await buffer_of(request),
        number_of(request, "group"),
        number_of(request, "a"),
        number_of(request, "b"),
        by=choice_of(request, "by", ("words", "tokens")),
        decode=request.app.state.decode,
    )
    return page(request, "compare.html", two=two, found=two.found)


async def load_comparison(
    buffer: Buffer,
    group_id: int,
    a: int,
    b: int,
    *,
    by: str = "words",
    decode: Decode | None = None,
) -> CompareView:
    """Compare two episodes of a group.

    Args:
        buffer: The buffer.
        group_id: The group of the episodes.
        a: Position of the first episode in the group.
        b: Position of the second episode in the group.
        by: "words" or "tokens".
        decode: Decodes tokens; None without a tokenizer.

    Raises:
        UnknownGroupError: There is no such group.
        HTTPException: The group has no such episode.
    """
    loaded, positions = await load(buffer, group_id), (a, b)
    one, other = (
        loaded.summary(_find_info(loaded.info, loaded.infos, position)) for position in positions
    )
    if loaded.problem is not None:
        by, decode = "words", None
    view = CompareView(loaded, one, other, by)
    why = _not_by_words(loaded, positions, decode) if by == "words" else None
    if why is not None and loaded.problem is not None:
        return view
    if why is not None:
        view = replace(view, by="tokens", not_by_words=why)
    find = _by_words if view.by == "words" else _by_tokens
    found = await asyncio.to_thread(find, loaded, positions, decode)
    tokens_differ = False
    if found.same and loaded.problem is None:
        left, right = (_response(loaded, position) for position in positions)
        tokens_differ = not np.array_equal(left, right)
    return replace(view, found=found, tokens_differ=tokens_differ)


def _not_by_words(
    group: LoadedGroup, positions: Sequence[int], decode: Decode | None
) -> str | None:
    """Return why two episodes cannot be compared by words, or None if they can."""
    if decode is not None:
        is_long = any(len(_response(group, it)) > MAX_DECODED for it in positions)
        return f"an episode has more than {MAX_DECODED:,} tokens" if is_long else None
    texts = [group.texts.get(it) for it in positions]
    if None in texts:
        return "an episode has no stored text"
    is_long = any(len(text or "") > MAX_CHARACTERS for text in texts)
    return f"an episode has more than {MAX_CHARACTERS:,} characters" if is_long else None


def _response(group: LoadedGroup, position: int) -> NDArray[np.int32]:
    """Return the tokens of an episode after its prompt."""
    one = group.episodes[position]
    return Unrepeated(one).token_ids(one.prompt_length)


def _by_words(group: LoadedGroup, positions: Sequence[int], decode: Decode | None) -> Comparison:
    left, right = (
        words(
            group.texts[it]
            if decode is None
            else decoded_text(ids := _response(group, it), 0, len(ids), decode)
        )
        for it in positions
    )
    return compared(left, right, lambda side, i, j: list(side[i:j]), count_words)


def _by_tokens(group: LoadedGroup, positions: Sequence[int], decode: Decode | None) -> Comparison:
    def item_texts(ids: Any, start: int, end: int) -> list[str]:
        texts = texts_in_range(ids, start, end, decode)
        if decode is None:
            return texts
        ids = ids[start:end].tolist()  # a token that decodes to no text is shown as its id
        return [
            text or ("" if decode([it]) else f"⟨{it}⟩") for text, it in zip(texts, ids, strict=True)
        ]

    left, right = (_response(group, it) for it in positions)
    return compared(left, right, item_texts)
