"""Reads of unfinished trajectories: their turns, and who continues them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, select

from replaydb.database.repository import groups, trajectories
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import select_known_uids
from replaydb.database.statements.payload import NAME_OF_PACK
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import Stored
from replaydb.database.tables.schema import (
    CONTEXT_PART,
    IS_OF_TURN,
    episode_group,
    group,
    payload,
    trajectory,
    turn,
)
from replaydb.database.tables.turn_records import Parent, part_of
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import TrajectoryInfo
from replaydb.errors import PayloadGoneError, UnknownGroupError


def fetch(session: Session, buffer_id: int, places: Collection[tuple[int, int]]) -> Stored:
    """Return the rows of groups, with the parts of their context and of some trajectories.

    Args:
        session: The transaction.
        buffer_id: Id of the buffer.
        places: Group id and position of each trajectory.
    """
    ids = sorted({group_id for group_id, _ in places})
    facts = groups.facts(session, buffer_id, ids)
    parts = [
        row._asdict()
        for row in session.run(select_unfinished(ids, sorted({at for _, at in places})))
        if row.part < 0 or (row.group_id, row.of_part) in places
    ]
    return Stored(facts, parts)


def fetch_one(session: Session, buffer_id: int, group_uid: str, position: int) -> Stored:
    """Return the row of a group, with the parts of its context and of one trajectory.

    It raises the errors of `_group_of`.

    Raises:
        PayloadGoneError: The turns were dropped when the group was archived.
    """
    group_id = _group_of(session, buffer_id, group_uid, position)
    found = fetch(session, buffer_id, [(group_id, position)])
    if all(one["of_part"] != position for one in found.payloads):
        for row in session.run(trajectories.select_trajectories([group_id])):
            if row.position == position and row.num_turns:  # so it has no episode
                raise PayloadGoneError([group_id])
    return found


def _group_of(session: Session, buffer_id: int, group_uid: str, position: int) -> int:
    """Return the id of the group of a trajectory.

    Raises:
        UnknownGroupError: The group does not exist.
        InvalidInputError: The position is not below `expected_episodes`.
        DuplicateEpisodeError: The position has an episode.
        GroupClosedError: The group is not incremental.
    """
    found = session.run(select_known_uids(buffer_id, [group_uid]))
    if not found:
        raise UnknownGroupError([group_uid])
    group_id: int = found[0].id
    if position not in [one.position for one in session.run(select_positions(group_id))]:
        trajectories.explain_missing(session, buffer_id, group_uid, position)
    return group_id


def find_turn(
    session: Session, buffer_id: int, group_uid: str, position: int, turn_uid: str
) -> Parent | None:
    """Return a turn of a trajectory; None if there is none of this uid."""
    rows = session.run(select_turn(buffer_id, group_uid, position, turn_uid))
    return Parent(turn_uid, rows[0].num_tokens) if rows else None


def check_open(
    session: Session, buffer_id: int, group_uid: str, position: int, claim_uid: str | None
) -> None:
    """Check that a trajectory is open to the caller, without locks.

    It raises the errors of `_group_of` and of `trajectories.check_open`.
    """
    group_id = _group_of(session, buffer_id, group_uid, position)
    rows = session.run(trajectories.select_trajectories([group_id]))
    [of_group] = session.run(trajectories.select_position(buffer_id, group_uid, position))
    for row in rows:
        if row.position == position and row.missing == trajectories.EPISODE:
            status, now = of_group.group_status, session.now()
            trajectories.check_open(row, group_uid, status, claim_uid, now)


def data_of(session: Session, buffer_id: int, group_uid: str, position: int, number: int) -> Any:
    """Return the encoded bytes of a turn of a trajectory; None if there are none.

    It raises the errors of `_group_of`.
    """
    group_id = _group_of(session, buffer_id, group_uid, position)
    [row] = session.run(select_expected(group_id))
    part = part_of(position, number, row.expected_episodes)
    rows = session.run(select_part(group_id, part))
    return rows[0].data if rows else None


def listed(
    session: Session,
    buffer_id: int,
    tasks: Collection[str] | None,
    uids: Collection[str] | None,
    limit: int,
) -> list[TrajectoryInfo]:
    """Return up to `limit` positions of groups without an episode, or without a value of it."""
    rows = session.run(_select_listed(buffer_id, tasks, uids).limit(limit))
    return [TrajectoryInfo(**row._asdict()) for row in rows]


def _select_listed(
    buffer_id: int, tasks: Collection[str] | None, uids: Collection[str] | None
) -> Select[Any]:
    condition: ColumnElement[bool] = trajectory.c.buffer_id == buffer_id
    if tasks is not None:
        condition &= among(group.task_name, sorted(tasks))
    if uids is None:
        condition &= group.group_status == GroupStatus.PENDING.value
    else:
        condition &= among(group.group_uid, sorted(uids))
    shown = (one for one in trajectory.c if one is not trajectory.c.buffer_id)
    return (
        select(*shown, group.group_uid, group.task_name)
        .join_from(trajectory, episode_group, group.id == trajectory.c.group_id)
        .where(condition)
        .order_by(trajectory.c.group_id, trajectory.c.position, trajectory.c.missing)
    )


@prepared
def select_unfinished(ids: Any, positions: Any) -> Select[Any]:
    """Select the parts of the context of groups, and those of turns at some positions."""
    of_context = (payload.c.part == CONTEXT_PART) | (payload.c.of_part == CONTEXT_PART)
    of_turns = IS_OF_TURN & among(payload.c.of_part, positions)
    return (
        select(payload, NAME_OF_PACK)
        .where(among(payload.c.group_id, ids), of_context | of_turns)
        .order_by(payload.c.group_id, payload.c.part)
    )


@prepared
def select_positions(group_id: Any) -> Select[Any]:
    """Select the positions of a group without an episode."""
    mine = (trajectory.c.group_id == group_id, trajectory.c.missing == trajectories.EPISODE)
    return select(trajectory.c.position).where(*mine)


@prepared
def select_turn(buffer_id: Any, group_uid: Any, position: Any, turn_uid: Any) -> Select[Any]:
    """Select the number of tokens of a turn."""
    return (
        select(turn.c.num_tokens)
        .join_from(turn, episode_group, group.id == turn.c.group_id)
        .where(
            group.buffer_id == buffer_id,
            group.group_uid == group_uid,
            turn.c.position == position,
            turn.c.turn_uid == turn_uid,
        )
    )


@prepared
def select_expected(group_id: Any) -> Select[Any]:
    """Select the expected number of episodes of a group."""
    return select(group.expected_episodes).where(group.id == group_id)


@prepared
def select_part(group_id: Any, part: Any) -> Select[Any]:
    """Select the bytes of a part that is in the database."""
    return select(payload.c.data).where(payload.c.group_id == group_id, payload.c.part == part)
