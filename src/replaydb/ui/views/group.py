"""Why this reward, and what did we do with it?"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from replaydb.batch import StoredGroup
from replaydb.buffer import Buffer
from replaydb.decoding import Decode
from replaydb.episodes import Episode
from replaydb.errors import (
    CorruptPayloadError,
    DatabaseReadOnlyError,
    InvalidURLError,
    NotSupportedError,
    PayloadGoneError,
    PayloadsUnavailableError,
    UnknownGroupError,
)
from replaydb.results import DrawInfo, DrawOutcome, EpisodeInfo, GroupInfo, LeaseInfo
from replaydb.training import advantages
from replaydb.ui import downloads, queries
from replaydb.ui.pages import buffer_of, number_of, optional_number, page
from replaydb.ui.tokens import Excerpt, excerpt, said_by

#: Rows of a table.
ROWS = 100
#: Episodes of whom a page has a part of the text.
EXCERPTS = 16
#: Episodes that advantages are computed over, at most.
MOST_EPISODES = 4096
#: Bytes of a group that are read for a page, and seconds that they may take.
MOST_BYTES, READ_SECONDS = 64_000_000, 10.0


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """An episode of a group.

    Attributes:
        info: What is known of it.
        advantage: As it was stored, or as GRPO has it.
        ended: Why it ended; None where that is not known.
        said: The beginning and the end of what it says; None where that is not known.
    """

    info: EpisodeInfo
    advantage: float | None
    ended: str | None
    said: Excerpt | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the episodes of a group answer.

    Attributes:
        text: As text; None where that is not known.
        ids: Its tokens, where it is not known as text.
        left_out: Tokens of it that are not shown.
    """

    text: str | None = None
    ids: Sequence[int] = ()
    left_out: int = 0

    @property
    def is_known(self) -> bool:
        """Whether there is anything to show."""
        return self.text is not None or bool(self.ids)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a group went through.

    Attributes:
        at: When it began.
        what: What it was.
        run_name: The run that did it.
        step: The trainer step that it was for.
        draw_id: The draw that it was.
        probability: With which it was drawn.
        weight: That it had in its batch.
        staleness: At the draw.
        outcome: What became of it.
        reason: Why.
        ended_at: When.
    """

    at: datetime
    what: str
    run_name: str | None = None
    step: int | None = None
    draw_id: int | None = None
    probability: float | None = None
    weight: float | None = None
    staleness: int | None = None
    outcome: DrawOutcome | None = None
    reason: str | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group, for a page or a download.

    Attributes:
        info: What is known of it.
        episodes: Those of this page.
        next_episode: The first of the next page; None where this is the last.
        computed: Whether the advantages are those of GRPO, as none are stored.
        problem: Why there is no more of it than this; None where all of it is there.
        prompt: What its episodes answer.
        events: Its life, the first first.
        older: Draws before this one are on the next page; None where all are here.
        lease: Who holds it.
    """

    info: GroupInfo
    episodes: Sequence[EpisodeRow]
    next_episode: int | None
    computed: bool
    problem: str | None
    prompt: Prompt
    events: Sequence[Event]
    older: int | None
    lease: LeaseInfo | None


async def group(request: Request) -> Response:
    """A group: its episodes side by side, and its life."""
    buffer = await buffer_of(request)
    view = await look(
        buffer,
        number_of(request, "id"),
        first=optional_number(request, "first") or 0,
        before=optional_number(request, "before"),
        decode=request.app.state.decode,
    )
    return page(request, "group.html", group=view, info=view.info)


async def download(request: Request) -> Response:
    """Its episodes, as rows of `episode_overview`."""
    buffer = await buffer_of(request)
    info = await info_of(buffer, number_of(request, "id"))
    return await downloads.answer(request, queries.select_episodes(buffer.name, info.id))


async def look(
    buffer: Buffer,
    group_id: int,
    *,
    first: int = 0,
    before: int | None = None,
    decode: Decode | None = None,
) -> GroupView:
    """What there is to say of a group.

    Args:
        buffer: In which it is.
        group_id: Its id.
        first: The first episode to show.
        before: Only draws before this one.
        decode: What decodes tokens.

    Raises:
        UnknownGroupError: It is not there.
    """
    info = await info_of(buffer, group_id)
    known = await buffer.episodes(group_id, limit=MOST_EPISODES)
    content = await contents(buffer, info, known)
    values, computed = advantages_of(known)
    shown = [one for one in known if one.position >= first]
    rows = [
        _row(one, values[one.position], content, decode, i < EXCERPTS)
        for i, one in enumerate(shown[:ROWS])
    ]
    draws = await buffer.draws(group_id=group_id, before=before, limit=ROWS + 1)
    leases = await buffer.leases(expired=True) if info.lease_id is not None else []
    return GroupView(
        info,
        rows,
        shown[ROWS].position if len(shown) > ROWS else None,
        computed,
        content.problem,
        prompt_of(content.stored, decode),
        [*_events(info, draws[:ROWS])],
        draws[ROWS - 1].id if len(draws) > ROWS else None,
        next((lease for lease in leases if lease.id == info.lease_id), None),
    )


async def info_of(buffer: Buffer, group_id: int) -> GroupInfo:
    """What is known of a group.

    Raises:
        UnknownGroupError: It is not there.
    """
    found = await buffer.find([group_id])
    if not found:
        raise UnknownGroupError([group_id])
    return found[0]


async def read(buffer: Buffer, info: GroupInfo) -> tuple[StoredGroup | None, str | None]:
    """A group with its tokens; or None, and why there are none."""
    if info.num_bytes > MOST_BYTES:
        return None, f"Its tokens are more than a page reads: {MOST_BYTES:,} bytes."
    try:
        async with asyncio.timeout(READ_SECONDS):
            [stored] = await buffer.get([info.id])
    except TimeoutError:  # an object store that does not answer is asked again for a minute
        place = buffer._payloads.url or "the database"
        return None, f"Its tokens cannot be read: {place}: no answer in {READ_SECONDS:g} seconds"
    except (
        PayloadsUnavailableError,
        DatabaseReadOnlyError,  # as a folder that is not to be opened is called
        InvalidURLError,  # what this machine would need to ask an object store
        NotSupportedError,
    ) as error:
        return None, f"Its tokens cannot be read: {error}"
    except PayloadGoneError:
        return None, "Its tokens are gone: what is known of it besides is left."
    except CorruptPayloadError as error:
        return None, f"Its tokens are damaged: {error.reason}"
    return stored, None


@dataclass(frozen=True, slots=True)
class Contents:
    """What the episodes of a group are, as far as that can be read.

    Attributes:
        stored: The group with its tokens; None where there are none.
        episodes: The same, by position.
        texts: What they were put with as text, by position; without tokens too.
        problem: Why there are no tokens; None where there are.
    """

    stored: StoredGroup | None
    episodes: Mapping[int, Episode]
    texts: Mapping[int, str]
    problem: str | None


async def contents(buffer: Buffer, info: GroupInfo, known: Sequence[EpisodeInfo]) -> Contents:
    """Tokens and texts of a group, of which these episodes have arrived."""
    stored, problem = await read(buffer, info)
    if stored is None:
        texts = await buffer.texts([info.id])
        return Contents(None, {}, texts.get(info.id, {}), problem)
    episodes = dict(zip(positions(known), stored.episodes, strict=False))
    said = {i: one.text for i, one in episodes.items() if one.text is not None}
    return Contents(stored, episodes, said, None)


def positions(known: Sequence[EpisodeInfo]) -> list[int]:
    """Positions of the episodes that have arrived, in order."""
    return [one.position for one in known]


def advantages_of(known: Sequence[EpisodeInfo]) -> tuple[Mapping[int, float | None], bool]:
    """Advantages by position, and whether they are those of GRPO, as none are stored."""
    given = {one.position: one.advantage for one in known}
    computed = bool(known) and all(value is None for value in given.values())
    return _grpo(known) if computed else given, computed


def _grpo(known: Sequence[EpisodeInfo]) -> Mapping[int, float | None]:
    """Advantages by position; None for all where the group is too large."""
    rewards = [math.nan if one.reward is None else one.reward for one in known]
    if len(known) >= MOST_EPISODES:
        return dict.fromkeys(positions(known))
    found = advantages.grpo(np.array(rewards), np.zeros(len(rewards), np.int64))
    return {
        one.position: None if one.reward is None else float(value)
        for one, value in zip(known, found, strict=True)
    }


def ended(info: EpisodeInfo, one: Episode | None) -> str | None:
    """Why an episode ended: where that was not said, why its last turn did."""
    if info.finish_reason is None and one is not None and one.turns:
        return one.turns[-1].finish_reason
    return info.finish_reason


def _row(
    info: EpisodeInfo,
    advantage: float | None,
    content: Contents,
    decode: Decode | None,
    with_text: bool,
) -> EpisodeRow:
    one, text = content.episodes.get(info.position), content.texts.get(info.position)
    said = excerpt(one, text, decode) if with_text else None
    return EpisodeRow(info, advantage, ended(info, one), said)


def prompt_of(stored: StoredGroup | None, decode: Decode | None) -> Prompt:
    """What the episodes of a group answer."""
    prompt, ids = (None, None) if stored is None else (stored.prompt, stored.prompt_ids)
    if isinstance(prompt, str):
        return Prompt(prompt)
    if prompt is not None:
        return Prompt("\n\n".join(_message(message) for message in prompt))
    if ids is None:
        return Prompt()
    left_out = max(0, len(ids) - MOST_PROMPT)
    if decode is not None:
        return Prompt(said_by(ids, 0, len(ids) - left_out, decode), (), left_out)
    return Prompt(None, ids[:MOST_PROMPT].tolist(), left_out)


#: Tokens of a prompt that are shown.
MOST_PROMPT = 2000


def _message(message: Mapping[str, object]) -> str:
    """A chat message: who says what, and whatever else there is, such as calls of tools."""
    content = message.get("content")
    said = content if isinstance(content, str) else _json(content) if content else ""
    more = [
        f"{name}: {_json(value)}"
        for name, value in message.items()
        if name not in ("role", "content") and value is not None
    ]
    return "\n".join([f"{message.get('role', '?')}: {said}".rstrip(), *more])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _events(info: GroupInfo, draws: Sequence[DrawInfo]) -> Sequence[Event]:
    events = [Event(info.created_at, "put", info.run_name)]
    if info.completed_at is not None and info.completed_at != info.created_at:
        what = "replaced" if info.times_replaced else "complete"
        events.append(Event(info.completed_at, what))
    events += [_drawn(info, draw) for draw in draws]
    if info.archived_at is not None:
        events.append(Event(info.archived_at, "archived", reason=info.status_reason))
    return sorted(events, key=lambda event: event.at)


def _drawn(info: GroupInfo, draw: DrawInfo) -> Event:
    i = draw.group_ids.index(info.id)
    same = draw.times_replaced[i] == info.times_replaced
    return Event(
        draw.created_at,
        "drawn" if same else "drawn, with what was replaced since",
        draw.run_name,
        draw.step,
        draw.id,
        draw.probabilities[i],
        draw.weights[i],
        draw.staleness[i],
        draw.outcomes[i],
        draw.outcome_reasons[i],
        draw.outcome_times[i],
    )
