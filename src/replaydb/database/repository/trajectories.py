"""Trajectories: positions of incremental groups without an episode, and their appended turns.

The table has rows for other missing values as well: see `missing_values`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, NoReturn

from sqlalchemy import (
    ColumnElement,
    Delete,
    Select,
    Text,
    Update,
    bindparam,
    cast,
    delete,
    func,
    literal,
    select,
    update,
)

from replaydb.database.repository.locked import Scope
from replaydb.database.runtime import revisions
from replaydb.database.runtime.prepared import Write, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.insertion import insert_into
from replaydb.database.tables.expressions import among, server_time
from replaydb.database.tables.records import PayloadRecord
from replaydb.database.tables.schema import (
    LATE_PART,
    compatibility,
    episode,
    episode_group,
    group,
    payload,
    trajectory,
    turn,
)
from replaydb.database.tables.turn_records import part_of
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import (
    ClaimExpiredError,
    DuplicateEpisodeError,
    DuplicateTurnError,
    GroupClosedError,
    InvalidInputError,
    ReplayDBError,
    SchemaOutOfDateError,
    TrajectoryClaimedError,
    UnknownGroupError,
    UnknownTurnError,
)

#: Columns of a trajectory that is not claimed.
NO_CLAIM: dict[str, None] = dict.fromkeys(("claim_uid", "claimed_by", "claimed_at", "expires_at"))
#: `trajectory.missing` of a position without an episode.
EPISODE = "episode"
_OF_EPISODE = trajectory.c.missing == EPISODE
#: The highest number of the part of a turn.
_MAX_PART = LATE_PART - 1


@dataclass(frozen=True, slots=True)
class Append:
    """A turn to append to a trajectory.

    Attributes:
        group_uid: Uid of the group.
        position: Position of the trajectory in the group.
        claim_uid: The claim of the caller; None: it has none.
        facts: Columns of `turn` that follow from the turn itself.
        parent: Uid of the turn that it follows, if it does.
        begins_with: Uid of the turn that has the last of the tokens with which it begins.
        payload: The turn, encoded.
    """

    group_uid: str
    position: int
    claim_uid: str | None
    facts: Mapping[str, Any]
    parent: str | None
    begins_with: str | None
    payload: PayloadRecord
    new_task_names: ClassVar[frozenset[str]] = frozenset()  # its group has a task
    #: Turns of unfinished trajectories are in the database, also beside a payload store.
    payloads: ClassVar[tuple[PayloadRecord, ...]] = ()


class Appended(NamedTuple):
    """Where a turn is.

    Attributes:
        turn: Number of the turn in its trajectory, from 0.
        is_new: Whether it was appended, and was not there already.
    """

    turn: int
    is_new: bool


def append(
    scope: Scope, session: Session, *, known_tasks: frozenset[str], several: Sequence[Append]
) -> list[Appended | ReplayDBError]:
    """Append turns to trajectories, in one transaction.

    Only the rows of the trajectories are locked. So are they by whatever closes a trajectory.

    Returns:
        For each turn where it is, or the error that prevented it.
    """
    found = _Turns(session, scope.buffer_id, several)
    outcomes: list[Appended | ReplayDBError] = []
    for one in several:
        try:
            outcomes.append(found.append(one))
        except ReplayDBError as error:
            outcomes.append(error)
    found.write()
    return outcomes


class _Turns:
    """Locked trajectories, and turns on their way into them."""

    def __init__(self, session: Session, buffer_id: int, several: Sequence[Append]) -> None:
        self._session = session
        self._buffer_id = buffer_id
        uids = sorted({one.group_uid for one in several})
        names = {one.facts["turn_uid"] for one in several}
        names |= {name for one in several for name in (one.parent, one.begins_with) if name}
        # A concurrent transaction that appends a turn of the same uid violates the unique key.
        self._known: dict[tuple[str, str], tuple[int, int]] = {
            (row.group_uid, row.turn_uid): (row.position, row.turn)
            for row in session.run(select_known_turns(buffer_id, uids, sorted(names)))
        }
        keys = sorted({_key(one.group_uid, one.position) for one in several})
        rows = session.run(lock_trajectories(buffer_id, uids, keys))
        self._rows = {(row.group_uid, row.position): row for row in rows}
        self._num_turns = {key: row.num_turns for key, row in self._rows.items()}
        self._now = time_of(rows, session)
        self._new: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def append(self, one: Append) -> Appended:
        """Append a turn, unless it is there already."""
        where = one.group_uid, one.position
        row = self._rows.get(where)
        if row is None:
            explain_missing(self._session, self._buffer_id, *where)
        uid = one.facts["turn_uid"]
        known = self._known.get((one.group_uid, uid))
        if known is not None and known[0] == one.position:
            return Appended(known[1], is_new=False)
        if known is not None:
            raise DuplicateTurnError(one.group_uid, known[0], uid)
        check_open(row, one.group_uid, row.group_status, one.claim_uid, self._now)
        revisions.check_usable(row.min_client)
        if row.write_format < one.payload.codec_version:
            raise SchemaOutOfDateError(
                f"the store was downgraded to payload format {row.write_format} while a turn was "
                "on its way; nothing was stored"
            )
        parent = self._parent(one, one.parent)
        self._parent(one, one.begins_with)
        number = self._num_turns[where]
        part = part_of(one.position, number, row.expected_episodes)
        if part > _MAX_PART:
            raise InvalidInputError("turn", f"at most {number} turns in this trajectory", number)
        self._num_turns[where] += 1
        self._known[one.group_uid, uid] = one.position, number
        facts = {
            "group_id": row.group_id,
            "position": one.position,
            "turn": number,
            "parent": parent,
            "appended_at": self._now,
            **one.facts,
        }
        stored = {**one.payload.row(row.group_id), "part": part, "of_part": one.position}
        self._new.append((facts, stored))
        return Appended(number, is_new=True)

    def _parent(self, one: Append, uid: str | None) -> int | None:
        """Return the number of a turn of the same trajectory."""
        if uid is None:
            return None
        position, number = self._known.get((one.group_uid, uid), (None, None))
        if position != one.position:
            raise UnknownTurnError(one.group_uid, one.position, uid)
        return number

    def write(self) -> None:
        """Write the new turns."""
        if not self._new:
            return
        changed = {(facts["group_id"], facts["position"]) for facts, _ in self._new}
        counts = [
            {"of_group": row.group_id, "at": row.position, "num_turns": self._num_turns[key]}
            for key, row in self._rows.items()
            if (row.group_id, row.position) in changed
        ]
        self._session.postpone(
            Write(insert_into(payload), [part for _, part in self._new]),
            Write(insert_into(turn), [facts for facts, _ in self._new]),
            Write(update_each_trajectory, counts),
        )


def time_of(rows: Sequence[Any], session: Session) -> datetime:
    """Return the time of the database's clock: when rows were read, if it was read as well."""
    return (rows[0].read_at if rows else None) or session.now()


def check_open(
    row: Any, group_uid: str, group_status: str, claim_uid: str | None, now: datetime
) -> None:
    """Check that a trajectory of a group, given by their rows, is open to the caller.

    Args:
        row: Row of the trajectory.
        group_uid: Uid of the group.
        group_status: Its status.
        claim_uid: The claim of the caller; None: it has none.
        now: Time of the database's clock.

    Raises:
        GroupClosedError: The group is not pending.
        ClaimExpiredError: The claim of the caller has ended.
        TrajectoryClaimedError: Another process has claimed the trajectory.
        InvalidInputError: The trajectory cannot be used.
    """
    if group_status != GroupStatus.PENDING:
        raise GroupClosedError(group_uid, group_status)
    is_live = row.claim_uid is not None and row.expires_at > now
    if claim_uid is not None and (row.claim_uid != claim_uid or not is_live):
        raise ClaimExpiredError(claim_uid)
    if claim_uid is None and is_live:
        raise TrajectoryClaimedError(group_uid, row.position, row.claimed_by)
    if row.unusable_reason is not None:
        actual = f"{row.position}: {row.unusable_reason}"
        raise InvalidInputError("position", "one that is usable", actual)


def explain_missing(session: Session, buffer_id: int, group_uid: str, position: int) -> NoReturn:
    """Raise the error for a position without a trajectory.

    Raises:
        UnknownGroupError: The group does not exist.
        InvalidInputError: The position is not below `expected_episodes`.
        DuplicateEpisodeError: The position has an episode.
        GroupClosedError: The group is not incremental.
    """
    found = session.run(select_position(buffer_id, group_uid, position))
    if not found:
        raise UnknownGroupError([group_uid])
    [row] = found
    if row.expected_episodes is not None and position >= row.expected_episodes:
        expected = f"below expected_episodes = {row.expected_episodes}"
        raise InvalidInputError("position", expected, position)
    if row.has_episode:
        raise DuplicateEpisodeError(group_uid, position)
    raise GroupClosedError(group_uid, row.group_status)


def versions_of(rows: Iterable[Any]) -> list[str]:
    """Return the keys with which `delete_trajectories` finds rows that have not changed."""
    return [f"{r.group_id}/{r.position}/{r.num_turns}/{r.claim_uid or ''}" for r in rows]


def _key(group_uid: str, position: int) -> str:
    return f"{position}/{group_uid}"


@prepared
def lock_trajectories(buffer_id: Any, uids: Any, keys: Any) -> Select[Any]:
    """Select trajectories by keys "POSITION/GROUP_UID" of groups with some uids, and lock them."""
    key = cast(trajectory.c.position, Text) + "/" + group.group_uid
    return (
        select(
            trajectory,
            group.group_uid,
            group.group_status,
            group.expected_episodes,
            server_time().label("read_at"),
            compatibility.c.write_format,
            compatibility.c.min_client,
        )
        .join_from(trajectory, episode_group, group.id == trajectory.c.group_id)
        .join(compatibility, compatibility.c.id == 1)
        .where(group.buffer_id == buffer_id, among(group.group_uid, uids), among(key, keys))
        .where(_OF_EPISODE)
        .order_by(trajectory.c.group_id, trajectory.c.position)
        .with_for_update(of=trajectory)
    )


@prepared
def select_known_turns(buffer_id: Any, uids: Any, turn_uids: Any) -> Select[Any]:
    """Select the places of turns of groups, by their uids."""
    return (
        select(group.group_uid, turn.c.turn_uid, turn.c.position, turn.c.turn)
        .join_from(turn, episode_group, group.id == turn.c.group_id)
        .where(
            group.buffer_id == buffer_id,
            among(group.group_uid, uids),
            among(turn.c.turn_uid, turn_uids),
        )
    )


@prepared
def select_position(buffer_id: Any, group_uid: Any, position: Any) -> Select[Any]:
    """Select the status of a group, and whether it has an episode at a position."""
    has_episode = select(episode.c.group_id).where(
        episode.c.group_id == group.id, episode.c.position == position
    )
    return select(
        group.group_status, group.expected_episodes, has_episode.exists().label("has_episode")
    ).where(group.buffer_id == buffer_id, group.group_uid == group_uid)


@prepared
def select_trajectories(ids: Any) -> Select[Any]:
    """Select the trajectories of groups, and which values their episodes lack, in order."""
    return (
        select(trajectory)
        .where(among(trajectory.c.group_id, ids))
        .order_by(trajectory.c.group_id, trajectory.c.position, trajectory.c.missing)
    )


@prepared
def delete_trajectories(ids: Any, versions: Any) -> Delete:
    """Delete trajectories of groups that have not changed since they were read."""
    seen = (trajectory.c.group_id, trajectory.c.position, trajectory.c.num_turns)
    version: ColumnElement[str] = literal("")
    for column in seen:
        version = version + cast(column, Text) + "/"
    version += func.coalesce(trajectory.c.claim_uid, "")
    some = (among(trajectory.c.group_id, ids), among(version, versions))
    return delete(trajectory).where(_OF_EPISODE, *some)


@prepared
def delete_turn_parts(group_id: Any, parts: Any) -> Delete:
    """Delete the parts of turns of a group, which are in the database."""
    return delete(payload).where(payload.c.group_id == group_id, among(payload.c.part, parts))


@prepared
def discard_turns(of_group: Any, at: Any, uids: Any) -> Update:
    """Mark turns of a trajectory that are not trained on."""
    mine = (turn.c.group_id == of_group, turn.c.position == at)
    return update(turn).where(*mine, among(turn.c.turn_uid, uids)).values(is_discarded=True)


@prepared
def close_trajectory(of_group: Any, at: Any, reason: Any) -> Update:
    """Record why a trajectory gets no episode, unless it is closed already."""
    this = (trajectory.c.group_id == of_group, trajectory.c.position == at)
    is_open = _OF_EPISODE & trajectory.c.unusable_reason.is_(None)
    return update(trajectory).where(*this, is_open).values(unusable_reason=reason, **NO_CLAIM)


@prepared
def close_trajectories(ids: Any, reason: Any) -> Update:
    """Record why the open trajectories of groups get no episodes, and episodes no values."""
    is_open = trajectory.c.unusable_reason.is_(None)
    return (
        update(trajectory)
        .where(among(trajectory.c.group_id, ids), is_open)
        .values(unusable_reason=reason, **NO_CLAIM)
    )


update_each_trajectory = update(trajectory).where(
    trajectory.c.group_id == bindparam("of_group"),
    trajectory.c.position == bindparam("at"),
    _OF_EPISODE,
)
