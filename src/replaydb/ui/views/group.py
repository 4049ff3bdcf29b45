"""Group page: prompt, episodes and history of a group."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from typing import Any

import numpy as np
from sqlalchemy import func, select
from starlette.requests import Request
from starlette.responses import Response

from replaydb import analysis
from replaydb.batch import StoredGroup
from replaydb.buffer import Buffer
from replaydb.database.filters.group_columns import col
from replaydb.database.tables.schema import CONTEXT_PART, annotation, payload
from replaydb.database.tables.views import select_annotations
from replaydb.domain.decoding import Decode
from replaydb.domain.episodes import Episode
from replaydb.domain.results import DrawInfo, EpisodeInfo, GroupInfo, LeaseInfo, TrajectoryInfo
from replaydb.errors import (
    CorruptPayloadError,
    DatabaseReadOnlyError,
    InvalidURLError,
    NotSupportedError,
    PayloadGoneError,
    PayloadsUnavailableError,
    UnknownGroupError,
)
from replaydb.training import advantages
from replaydb.ui import downloads
from replaydb.ui.pages import buffer_of, number_of, optional_number, page
from replaydb.ui.tokens import Excerpt, decoded_text, excerpt
from replaydb.ui.views.draws import DrawnGroup, drawn_group

#: Rows per table.
ROWS = 100
#: Episodes per page with an excerpt of their text.
EXCERPTS = 16
#: GRPO advantages are computed for groups with fewer episodes than this.
MAX_EPISODES = 4096
#: Maximum size in bytes of what is read of a group for a page, and maximum seconds to read it.
MAX_BYTES, READ_SECONDS = 64_000_000, 10.0


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """An episode of a group.

    Attributes:
        info: Its stored columns.
        advantage: Its stored advantage, or the GRPO advantage if none are stored in the group.
        ended: Its finish reason; None if unknown.
        excerpt: Beginning and end of its text; None without a text, or if it is not needed.
    """

    info: EpisodeInfo
    advantage: float | None
    ended: str | None
    excerpt: Excerpt | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a group.

    Attributes:
        text: The prompt as text; None if only its tokens are known.
        ids: Its token ids, if the text is not known.
        left_out: Number of tokens that are not shown.
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
    """An event in the history of a group.

    Attributes:
        at: Time of the event.
        description: Description of the event.
        run_name: The run that caused it.
        step: The trainer step of a draw.
        drawn: The group as it was drawn; None if the event is not a draw.
        reason: Reason of the outcome of the draw, or of the group's status.
    """

    at: datetime
    description: str
    run_name: str | None = None
    step: int | None = None
    drawn: DrawnGroup | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LateValue:
    """A value of an episode or turn that arrived later.

    Attributes:
        row: Its row of `annotation_history`.
        name: Its name; of metadata with the name in it.
        value: The value; of metadata as JSON text.
        previous: The value before; None if there was none.
    """

    row: Any
    name: str
    value: object
    previous: object


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group, for the page.

    Attributes:
        loaded: The group.
        episodes: The episodes on this page.
        next_episode: Position of the first episode of the next page; None on the last page.
        prompt: Its prompt.
        events: Its history, oldest event first.
        older: Draws before this id are on the next page; None if there are none.
        lease: The lease that holds the group, if any.
        trajectories: What it lacks: episodes, and values of them.
        late: Values that arrived later, the newest first.
    """

    loaded: LoadedGroup
    episodes: Sequence[EpisodeSummary]
    next_episode: int | None
    prompt: Prompt
    events: Sequence[Event]
    older: int | None
    lease: LeaseInfo | None
    trajectories: Sequence[TrajectoryInfo]
    late: Sequence[LateValue]


async def group(request: Request) -> Response:
    """Show a group: its episodes side by side, and its history."""
    buffer = await buffer_of(request)
    view = await load_group(
        buffer,
        number_of(request, "id"),
        first=optional_number(request, "first") or 0,
        before=optional_number(request, "before"),
        decode=request.app.state.decode,
    )
    return page(request, "group.html", group=view, info=view.loaded.info)


async def download(request: Request) -> Response:
    """Download the episodes of a group with their texts, as rows of `episode_overview`."""
    buffer = await buffer_of(request)
    info = await info_of(buffer, number_of(request, "id"))
    return await downloads.answer(
        request, analysis.episodes, buffer=buffer.name, where=col.id == info.id
    )


async def load_group(
    buffer: Buffer,
    group_id: int,
    *,
    first: int = 0,
    before: int | None = None,
    decode: Decode | None = None,
) -> GroupView:
    """Load a group with a page of its episodes and draws.

    Args:
        buffer: The buffer.
        group_id: Id of the group.
        first: Position of the first episode.
        before: Only draws before this id.
        decode: Decodes tokens; None without a tokenizer.

    Raises:
        UnknownGroupError: There is no such group.
    """
    loaded = await load(buffer, group_id, MAX_EPISODES)
    info, shown = loaded.info, [one for one in loaded.infos if one.position >= first]
    excerpts = [
        excerpt(loaded.episodes.get(one.position), loaded.texts.get(one.position), decode)
        for one in shown[:ROWS][:EXCERPTS]
    ]
    rows = [loaded.summary(*row) for row in zip_longest(shown[:ROWS], excerpts)]
    draws = await buffer.draws(group_id=group_id, before=before, limit=ROWS + 1)
    leases = await buffer.leases(expired=True) if info.lease_id is not None else []
    return GroupView(
        loaded,
        rows,
        shown[ROWS].position if len(shown) > ROWS else None,
        prompt_of(loaded.stored, decode),
        [*_events(info, draws[:ROWS])],
        draws[ROWS - 1].id if len(draws) > ROWS else None,
        next((lease for lease in leases if lease.id == info.lease_id), None),
        await buffer.trajectories(uids=info.group_uid, limit=ROWS),
        await _late_values(buffer, info),
    )


async def _late_values(buffer: Buffer, info: GroupInfo) -> Sequence[LateValue]:
    """Return the newest values of a group that arrived later, at most `ROWS`."""
    if not info.times_annotated:
        return ()
    of = annotation.c
    rows = (
        select_annotations()
        .where(of.group_id == info.id)
        .order_by(of.number.desc(), of.position, of.turn, of.name)
        .limit(ROWS)
    )
    found: list[LateValue] = []
    for row in await buffer._read(lambda session: session.run(rows)):
        if isinstance(row.changes, dict):
            found += [
                LateValue(
                    row,
                    f"{row.name}: {name}",
                    _json(one["to"]),
                    _json(one["from"]) if "from" in one else None,
                )
                for name, one in row.changes.items()
            ]
        else:
            found.append(LateValue(row, row.name, row.value, row.previous))
    return found[:ROWS]


async def info_of(buffer: Buffer, group_id: int) -> GroupInfo:
    """Return the columns of a group.

    Raises:
        UnknownGroupError: There is no such group.
    """
    found = await buffer.find([group_id])
    if not found:
        raise UnknownGroupError([group_id])
    return found[0]


async def read(
    buffer: Buffer, info: GroupInfo, fields: Collection[str] = ()
) -> tuple[StoredGroup | None, str | None]:
    """Return a group with its tokens and None, or None and the reason why they cannot be read.

    `fields`: names of the extras to read.
    """
    if info.num_bytes > MAX_BYTES and await _num_bytes(buffer, info) > MAX_BYTES:
        return None, f"The tokens are not shown: they have more than {MAX_BYTES:,} bytes."
    try:
        async with asyncio.timeout(READ_SECONDS):
            [stored] = await buffer.get([info.id], fields=fields)
    except TimeoutError:  # requests to an object store are retried for a minute
        location = buffer._payloads.url or "the database"
        reason = f"{location}: no response in {READ_SECONDS:g} seconds"
        return None, f"The tokens cannot be read: {reason}"
    except (
        PayloadsUnavailableError,
        DatabaseReadOnlyError,  # raised for a folder without read permission
        InvalidURLError,  # a setting for the object store is missing on this machine
        NotSupportedError,
    ) as error:
        return None, f"The tokens cannot be read: {error}"
    except PayloadGoneError:
        return None, "The tokens were dropped. The other data of the group is still stored."
    except CorruptPayloadError as error:
        return None, f"The tokens are damaged: {error.reason}"
    return stored, None


async def _num_bytes(buffer: Buffer, info: GroupInfo) -> int:
    """Return the size of the payload of a group without its large extras."""
    size = func.coalesce(func.length(payload.c.data), payload.c.pack_length)
    parts = payload.c.group_id == info.id, payload.c.part >= CONTEXT_PART
    rows = await buffer._read(lambda session: session.run(select(func.sum(size)).where(*parts)))
    return int(rows[0][0] or 0)


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """A group with its episodes, their tokens and texts, as far as they can be read.

    Attributes:
        info: Its stored columns.
        infos: Stored columns of its episodes.
        stored: The group with its tokens; None if they cannot be read.
        problem: Why the tokens cannot be read; None if they can.
        episodes: Its episodes by position; none if the tokens cannot be read.
        texts: Stored texts by position, also if the tokens cannot be read.
        advantages: Advantages by position, stored or computed by GRPO.
        computed: Whether advantages are computed by GRPO, because none are stored.
    """

    info: GroupInfo
    infos: Sequence[EpisodeInfo]
    stored: StoredGroup | None
    problem: str | None
    episodes: Mapping[int, Episode]
    texts: Mapping[int, str]
    advantages: Mapping[int, float | None]
    computed: bool

    def summary(self, info: EpisodeInfo, shown: Excerpt | None = None) -> EpisodeSummary:
        """Return the facts of an episode; without a finish reason, it has that of its last turn."""
        ended, one = info.finish_reason, self.episodes.get(info.position)
        if ended is None and one is not None and one.turns:
            ended = one.turns[-1].finish_reason
        return EpisodeSummary(info, self.advantages[info.position], ended, shown)


async def load(
    buffer: Buffer, group_id: int, limit: int | None = None, fields: Collection[str] = ()
) -> LoadedGroup:
    """Load a group with at most `limit` of its episodes, and with the extras in `fields`.

    Raises:
        UnknownGroupError: There is no such group.
    """
    info = await info_of(buffer, group_id)
    infos = await buffer.episodes(group_id, limit=info.num_episodes if limit is None else limit)
    stored, problem = await read(buffer, info, fields)
    episodes: dict[int, Episode] = {}
    if stored is None:
        texts = (await buffer.texts([group_id])).get(group_id, {})
    else:
        positions = (one.position for one in infos)
        episodes = dict(zip(positions, stored.episodes, strict=False))
        texts = {i: one.text for i, one in episodes.items() if one.text is not None}
    advantages = {one.position: one.advantage for one in infos}
    computed = bool(infos) and all(value is None for value in advantages.values())
    return LoadedGroup(
        info,
        infos,
        stored,
        problem,
        episodes,
        texts,
        _grpo(infos) if computed else advantages,
        computed,
    )


def _grpo(infos: Sequence[EpisodeInfo]) -> Mapping[int, float | None]:
    """Compute GRPO advantages by position; None for all episodes if the group is too large."""
    rewards = [math.nan if one.reward is None else one.reward for one in infos]
    if len(infos) >= MAX_EPISODES:
        return dict.fromkeys(one.position for one in infos)
    found = advantages.grpo(np.array(rewards), np.zeros(len(rewards), np.int64))
    return {
        one.position: None if one.reward is None else float(value)
        for one, value in zip(infos, found, strict=True)
    }


def prompt_of(stored: StoredGroup | None, decode: Decode | None) -> Prompt:
    """Return the prompt of a group: its text or messages, or else its tokens."""
    prompt, ids = (None, None) if stored is None else (stored.prompt, stored.prompt_ids)
    if isinstance(prompt, str):
        return Prompt(prompt)
    if prompt is not None:
        return Prompt("\n\n".join(_message(message) for message in prompt))
    if ids is None:
        return Prompt()
    left_out = max(0, len(ids) - MAX_PROMPT_TOKENS)
    if decode is not None:
        return Prompt(decoded_text(ids, 0, len(ids) - left_out, decode), (), left_out)
    return Prompt(None, ids[:MAX_PROMPT_TOKENS].tolist(), left_out)


#: Maximum number of tokens of a prompt that are shown.
MAX_PROMPT_TOKENS = 2000


def _message(message: Mapping[str, object]) -> str:
    """Format a chat message: role, content and other fields such as tool calls."""
    content = message.get("content")
    text = content if isinstance(content, str) else _json(content) if content else ""
    more = [
        f"{name}: {_json(value)}"
        for name, value in message.items()
        if name not in ("role", "content") and value is not None
    ]
    return "\n".join([f"{message.get('role', '?')}: {text}".rstrip(), *more])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _events(info: GroupInfo, draws: Sequence[DrawInfo]) -> Sequence[Event]:
    events = [Event(info.created_at, "put", info.run_name)]
    if info.completed_at is not None and info.completed_at != info.created_at:
        description = "replaced" if info.times_replaced else "completed"
        events.append(Event(info.completed_at, description))
    events += [_draw_event(info, draw) for draw in draws]
    if info.archived_at is not None:
        events.append(Event(info.archived_at, "archived", reason=info.status_reason))
    return sorted(events, key=lambda event: event.at)


def _draw_event(info: GroupInfo, draw: DrawInfo) -> Event:
    drawn = drawn_group(draw, draw.group_ids.index(info.id), info)
    description = "drawn" if drawn.change is None else "drawn, content replaced since"
    return Event(draw.created_at, description, draw.run_name, draw.step, drawn, drawn.reason)
