"""Replacement of the payloads of groups by the same episodes in another form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, exists, func, select

from replaydb.database.repository import groups, packs
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import update_each_group
from replaydb.database.statements.insertion import insert_into
from replaydb.database.statements.payload import delete_payloads
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import PayloadRecord
from replaydb.database.tables.schema import (
    IS_OF_TURN,
    LATE_PART,
    buffer,
    compatibility,
    episode,
    episode_group,
    group,
    payload,
    turn,
)
from replaydb.domain.episodes import GroupStatus

#: The episodes of a group are joined when it is completed if their prompts have this many tokens
#: more than the longest of them, and these are at least a fifth of all tokens. Otherwise at most
#: 1.25 times the distinct tokens are stored.
JOINED_TOKENS, JOINED_FRACTION = 4096, 5
#: The lock of the task is held while a payload is replaced, so larger ones are not.
JOINED_BYTES = 16 << 20

#: The parts of a payload, by number, and their checksums.
Parts = frozenset[tuple[int, int]]


def old_groups(session: Session, after: int, most: int) -> Sequence[Any]:
    """Return up to `most` groups whose payloads would be stored in another way now, after an id.

    They have an older format than new ones, values that were added later, or episodes that were
    added one by one and do not share tokens. Pending groups of the last kind, and groups with turns
    of unfinished trajectories, are omitted.

    Returns:
        Rows with `id`, `buffer`, `task_name` and `num_bytes`, by id.
    """
    current = select(compatibility.c.write_format).scalar_subquery()
    before = exists().where(
        episode.c.group_id == payload.c.group_id, episode.c.position == payload.c.part - 1
    )
    is_core = (payload.c.part > 0) & payload.c.field.is_(None) & payload.c.of_part.is_(None)
    is_complete = exists().where(
        group.id == payload.c.group_id, group.group_status != GroupStatus.PENDING.value
    )
    is_apart = is_core & (current > 1) & before & is_complete
    is_late = payload.c.part == LATE_PART
    is_old = (payload.c.codec_version < current) | is_late | is_apart
    old = select(payload.c.group_id).where(is_old)
    old = old.where(payload.c.group_id > after).distinct().order_by(payload.c.group_id).limit(most)
    turns = exists().where(payload.c.group_id == group.id, IS_OF_TURN)
    named = (
        select(group.id, group.task_name, group.num_bytes, buffer.c.name.label("buffer"))
        .join_from(episode_group, buffer, buffer.c.id == group.buffer_id)
        .where(group.id.in_(old), ~turns)
        .order_by(group.id)
    )
    return session.run(named)


def with_repeated_prompts(session: Session, buffer_id: int, group_uids: Sequence[str]) -> list[Any]:
    """Return those of some groups whose episodes, added one by one, repeat much of their prompt.

    Returns:
        Rows with `id` and `task_name`.
    """
    return [
        row
        for row in session.run(select_prompts(buffer_id, group_uids))
        if (repeated := row.in_prompts - row.longest_prompt) >= JOINED_TOKENS
        and repeated * JOINED_FRACTION >= row.in_episodes
        and row.num_bytes <= JOINED_BYTES
    ]


def rewrite(
    locked: LockedBuffer,
    several: Mapping[int, Sequence[PayloadRecord]],
    before: Mapping[int, Parts],
) -> set[int]:
    """Replace the payloads of groups, unless these are other ones than before.

    Args:
        locked: The buffer, with the tasks of the groups.
        several: The new parts, by group id.
        before: The parts that were read.

    Returns:
        Ids of the groups with new payloads.
    """
    session = locked.session
    every = [part for parts in several.values() for part in parts]
    locked.check_formats(every)
    counted = packs.enter(session, every)
    now: dict[int, set[tuple[int, int]]] = {}
    for row in session.run(_select_checksums(sorted(several))):
        now.setdefault(row.group_id, set()).add((row.part, row.checksum))
    rows = {row.id: row for row in groups.scalars(session, locked.id, sorted(several))}
    changed = [
        group_id
        for group_id in rows
        if frozenset(now.get(group_id, ())) == before[group_id]
        and rows[group_id].task_name in locked.task_states
    ]
    packs.settle(locked.shares, counted, [part for one in changed for part in several[one]])
    if not changed:
        return set()
    if locked.row.uses_payload_store:
        packs.release(session, changed, locked.shares)
    else:
        session.run(delete_payloads(changed))
    session.run_many(
        insert_into(payload), [part.row(one) for one in changed for part in several[one]]
    )
    sizes = {one: sum(len(part.data) for part in several[one]) for one in changed}
    for one in changed:
        if rows[one].group_status != GroupStatus.ARCHIVED:
            task = locked.task_states[rows[one].task_name]
            task.stored_bytes += sizes[one] - rows[one].num_bytes
    session.run_many(
        update_each_group(),
        [{"group_id": one, "num_bytes": size} for one, size in sizes.items()],
    )
    return set(changed)


@prepared
def select_prompts(buffer_id: Any, group_uids: Any) -> Select[Any]:
    """Select the number of tokens of the prompts and episodes of groups without unusable turns."""
    first = (
        (turn.c.group_id == group.id) & (turn.c.position == episode.c.position) & (turn.c.turn == 0)
    )
    of_no_turn = episode.c.num_tokens - episode.c.num_loss_tokens
    prompt = func.coalesce(turn.c.num_prompt_tokens, of_no_turn)
    unused = exists().where(payload.c.group_id == group.id, IS_OF_TURN)
    return (
        select(
            group.id,
            group.task_name,
            group.num_bytes,
            func.sum(prompt).label("in_prompts"),
            func.max(prompt).label("longest_prompt"),
            func.sum(episode.c.num_tokens).label("in_episodes"),
        )
        .join_from(episode_group, episode, episode.c.group_id == group.id)
        .outerjoin(turn, first)
        .where(
            group.buffer_id == buffer_id,
            among(group.group_uid, group_uids),
            group.group_status != GroupStatus.PENDING.value,
            ~unused,
        )
        .group_by(group.id, group.task_name, group.num_bytes)
    )


def _select_checksums(ids: Sequence[int]) -> Select[Any]:
    """Select the parts of groups, without their bytes."""
    key = (payload.c.group_id, payload.c.part, payload.c.checksum)
    return select(*key).where(among(payload.c.group_id, ids))
