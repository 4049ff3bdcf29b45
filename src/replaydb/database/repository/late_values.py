"""Values that arrive after episodes were stored (`Buffer.annotate`), and their history."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Select,
    bindparam,
    case,
    select,
    update,
)

from replaydb import codec
from replaydb.database.repository import incremental_groups, missing_values, transitions
from replaydb.database.repository.locked import LockedBuffer, Scope
from replaydb.database.repository.locking import groups_locked
from replaydb.database.repository.trajectories import EPISODE
from replaydb.database.runtime.prepared import Bound, Write, prepared
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.runtime.session import Session
from replaydb.database.statements.episode_group import select_scalars, update_each_group
from replaydb.database.statements.insertion import insert_into
from replaydb.database.statements.selections import selection
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import PayloadRecord, late_values, reward_facts
from replaydb.database.tables.schema import (
    LATE_PART,
    OF_EPISODE,
    annotation,
    episode,
    episode_group,
    group,
    payload,
    turn,
)
from replaydb.domain.annotations import NUMBERS, Annotation, has_value
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import etag_of
from replaydb.errors import (
    ClaimExpiredError,
    ContentChangedError,
    CorruptPayloadError,
    InvalidInputError,
    UnknownGroupError,
    UnknownTurnError,
)


@dataclass(frozen=True, slots=True)
class Annotating:
    """A call of `Buffer.annotate`.

    Attributes:
        annotations: The new values.
        if_match: For some groups, by uid, the etag that they must have.
        author: Who made the values.
        policy_version: Policy version of the model that made them.
        claim_uid: The claim of the caller; None: it has none.
    """

    annotations: Sequence[Annotation]
    if_match: Mapping[str, str]
    author: str | None
    policy_version: int | None
    claim_uid: str | None = None


@dataclass(slots=True)
class _Target:
    """An episode or a turn whose values are set.

    Attributes:
        row: Its row.
        numbers: The new rewards and advantages, by name.
        metadata: The new metadata, by name.
    """

    row: Any
    numbers: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def add(self, one: Annotation) -> None:
        """Set the values that differ from those of the row, and not the others."""
        for name, value in one.numbers.items():
            self.numbers.pop(name, None)
            if getattr(self.row, name) != value:
                self.numbers[name] = value
        before = self.row.metadata
        for name, value in one.metadata.items():
            self.metadata.pop(name, None)
            if name not in before or _text(before[name]) != _text(value):
                self.metadata[name] = value

    def columns(self, *, with_metadata: bool) -> dict[str, Any]:
        """Return the columns of the row that can change."""
        names = [name for name in NUMBERS if hasattr(self.row, name)]
        found = {name: self.numbers.get(name, getattr(self.row, name)) for name in names}
        return found | ({"metadata": self.row.metadata | self.metadata} if with_metadata else {})


class Annotated(NamedTuple):
    """The outcome of a call.

    Attributes:
        etags: The etags of the groups afterwards, by uid.
        completed: Uids of the incremental groups that waited for the last of these values.
    """

    etags: dict[str, str]
    completed: list[str]


def annotate(scope: Scope, session: Session, call: Annotating) -> Annotated:
    """Set values of episodes and turns, all of them or none.

    Raises:
        UnknownGroupError: A group does not exist.
        UnknownTurnError: A turn does not exist.
        ContentChangedError: A group has another etag than it must have.
        InvalidInputError: There is no episode at a position, or a turn gets a reward and its
            episode has none.
        ClaimExpiredError: The claim of the caller has ended.
        CorruptPayloadError: Values that are stored cannot be read.
        LostRaceError: Some groups were deleted or replaced before their tasks were locked.
    """
    uids = sorted({one.group_uid for one in call.annotations} | call.if_match.keys())
    of = scope.buffer_id, uids
    reads = [
        select_annotated(*of),
        select_episode_values(*of),
        select_late_parts(*of),
        missing_values.select_missing(*of),
        *_select_turns(call.annotations, *of),
    ]
    with groups_locked(session, scope, uids, reads=reads) as buffer:
        rows, episodes, parts, missing, *turns = [session.run(read) for read in reads]
        found = {row.group_uid: row for row in rows}
        if unknown := [uid for uid in uids if uid not in found]:
            raise UnknownGroupError(unknown)
        if any(row.task_name not in buffer.task_states for row in rows):
            raise LostRaceError("another transaction renewed a group in another task")
        changed = [uid for uid, etag in call.if_match.items() if _etag(found[uid]) != etag]
        if changed:
            raise ContentChangedError(changed)
        work = _Work(buffer, rows, episodes, parts, missing)
        work.set(call, {uid: row.id for uid, row in found.items()}, chain.from_iterable(turns))
        work.write(call)
        statuses = work.settle()
        return Annotated(
            {uid: work.etag(row.id) for uid, row in found.items()},
            [
                uid
                for uid, row in found.items()
                if row.expected_episodes is not None
                and statuses.get(row.id) is GroupStatus.COMPLETED
            ],
        )


def _select_turns(
    annotations: Sequence[Annotation], buffer_id: int, group_uids: Sequence[str]
) -> list[Bound[Any]]:
    """Return the statement that selects the turns of annotations; none if there are no turns."""
    wanted = [one for one in annotations if one.turn is not None]
    if not wanted:
        return []
    positions = sorted({one.position for one in wanted})
    numbers = sorted({one.turn for one in wanted if isinstance(one.turn, int)})
    uids = sorted({one.turn for one in wanted if isinstance(one.turn, str)})
    return [select_turn_values(buffer_id, group_uids, positions, numbers, uids)]


class _Work:
    """The values of some groups, and what a call changes of them."""

    def __init__(
        self,
        buffer: LockedBuffer,
        rows: Sequence[Any],
        episodes: Sequence[Any],
        parts: Sequence[Any],
        missing: Sequence[Any],
    ) -> None:
        self._missing = missing
        self._buffer = buffer
        self._facts = {row.id: row for row in rows}
        self._episodes: dict[int, dict[int, Any]] = {row.id: {} for row in rows}
        for row in episodes:
            self._episodes[row.group_id][row.position] = row
        self._with_payload = {row.group_id for row in parts if row.part != LATE_PART}
        self._late = {row.group_id: row._asdict() for row in parts if row.part == LATE_PART}
        # By group, and by position and number of the turn.
        self._targets: dict[int, dict[tuple[int, int], _Target]] = {}
        self._changed_ids: list[int] = []
        self._group_changes: dict[int, dict[str, Any]] = {}

    def etag(self, group_id: int) -> str:
        """Return the etag of a group afterwards."""
        return _etag(self._facts[group_id], group_id in self._changed_ids)

    def set(self, call: Annotating, ids: Mapping[str, int], turns: Iterable[Any]) -> None:
        """Set the new values.

        Args:
            call: The call.
            ids: Ids of the groups, by uid.
            turns: Rows of the turns.

        Raises:
            UnknownTurnError: A turn does not exist.
            InvalidInputError: There is no episode at a position, or a turn gets a reward and its
                episode has none.
            ClaimExpiredError: The claim of the caller has ended.
            CorruptPayloadError: Metadata that is stored cannot be read.
        """
        known: dict[tuple[int, int, Any], Any] = {}
        for row in turns:
            known |= dict.fromkeys(
                [(row.group_id, row.position, name) for name in (row.turn, row.turn_uid)], row
            )
        for i, one in enumerate(call.annotations):
            group_id, number = ids[one.group_uid], OF_EPISODE
            row = self._episodes[group_id].get(one.position)
            if call.claim_uid is not None:
                self._check_claim(call.claim_uid, group_id, one.position)
            if row is None:
                expected = f"that of an episode of group {one.group_uid!r}"
                raise InvalidInputError(f"annotations[{i}].position", expected, one.position)
            if one.turn is not None:
                row = known.get((group_id, one.position, one.turn))
                if row is None:
                    raise UnknownTurnError(one.group_uid, one.position, str(one.turn))
                number = row.turn
            if not isinstance(row.metadata, dict):
                raise CorruptPayloadError("metadata can not be read", [group_id])
            mine = self._targets.setdefault(group_id, {})
            mine.setdefault((one.position, number), _Target(row)).add(one)
        for i, one in enumerate(call.annotations):
            alone = one.turn is not None and one.reward is not None
            if alone and self._reward(ids[one.group_uid], one.position) is None:
                expected = "an annotation with the reward of the episode as well, which has none"
                raise InvalidInputError(f"annotations[{i}].reward", expected, one.reward)
        self._changed_ids = sorted(
            group_id
            for group_id, mine in self._targets.items()
            if any(target.numbers or target.metadata for target in mine.values())
        )

    def write(self, call: Annotating) -> None:
        """Write what is changed; nothing if all values are there already."""
        if not self._changed_ids:
            return
        if any(self._facts[one].first_sampled_at is not None for one in self._changed_ids):
            drawn = selection(self._buffer.id, ids=self._changed_ids)
            self._buffer.session.run(transitions.keep_annotated(drawn))
        every = [target for mine in self._targets.values() for target in mine.values()]
        with_metadata = any(target.metadata for target in every)
        episodes, turns, history, new_parts, parts = [], [], [], [], []
        for group_id in self._changed_ids:
            for (position, number), target in self._targets[group_id].items():
                row = {"of_group": group_id, "at": position}
                row |= target.columns(with_metadata=with_metadata)
                if number == OF_EPISODE:
                    episodes.append(row)
                else:
                    turns.append({**row, "of_turn": number})
                history += self._history(group_id, position, number, target, call)
            part = self._late_part(group_id)
            if part is not None and group_id in self._late:
                replaced = {name: part[name] for name in ("data", "checksum", "codec_version")}
                parts.append({"of_group": group_id, **replaced})
            elif part is not None:
                new_parts.append(part)
            self._group_changes[group_id] = self._group(group_id, part)
        self._buffer.session.postpone(
            Write(update_each_episode, episodes),
            Write(update_each_turn, turns),
            Write(insert_into(annotation), history),
            Write(insert_into(payload), new_parts),
            Write(update_each_late_part, parts),
        )

    def settle(self) -> dict[int, GroupStatus]:
        """Write the columns of groups, and complete those that have all required values now.

        Returns:
            The statuses of the groups that have all their episodes, by id.
        """
        given = [row for row in self._missing if self._has(row)]
        ids = sorted({row.group_id for row in given})
        left: dict[int, list[Any]] = {
            one: [] for one in ids if self._facts[one].group_status == GroupStatus.PENDING
        }
        for row in self._missing:
            if row.group_id in left and row not in given:
                left[row.group_id].append(row)
        if given:
            keys = [missing_values.key_of(row) for row in given]
            self._buffer.session.postpone(missing_values.delete_missing(ids, keys))
        settled = incremental_groups.settle(
            self._buffer, left, scalars=self._facts, changes=self._group_changes
        )
        others = [
            {"group_id": one, **values}
            for one, values in self._group_changes.items()
            if one not in settled
        ]
        self._buffer.session.postpone(Write(update_each_group(), others))
        return settled

    def _has(self, missing: Any) -> bool:
        """Whether a value that was missing is there now."""
        place = missing.position, OF_EPISODE
        target = self._targets.get(missing.group_id, {}).get(place)
        if target is None or missing.missing == EPISODE:
            return False
        return has_value(missing.missing, target.columns(with_metadata=True))

    def _check_claim(self, claim_uid: str, group_id: int, position: int) -> None:
        """Check that an episode is claimed.

        Raises:
            ClaimExpiredError: The claim has ended.
        """
        mine = (
            row.expires_at > self._buffer.now
            for row in self._missing
            if (row.claim_uid, row.group_id, row.position) == (claim_uid, group_id, position)
        )
        if not any(mine):
            raise ClaimExpiredError(claim_uid)

    def _history(
        self, group_id: int, position: int, number: int, target: _Target, call: Annotating
    ) -> list[dict[str, Any]]:
        """Return the rows of `annotation` of what is changed of an episode or turn."""
        common = {
            "group_id": group_id,
            "number": self._facts[group_id].times_annotated + 1,
            "position": position,
            "turn": number,
            "value": None,
            "previous": None,
            "changes": None,
            "author": call.author,
            "policy_version": call.policy_version,
            "run_id": self._buffer.scope.run.id or None,
            "created_at": self._buffer.now,
        }
        found = [
            {**common, "name": name, "value": value, "previous": getattr(target.row, name)}
            for name, value in target.numbers.items()
        ]
        if target.metadata:
            before = target.row.metadata
            changes = {
                name: {"to": value} | ({"from": before[name]} if name in before else {})
                for name, value in target.metadata.items()
            }
            found.append({**common, "name": "metadata", "changes": changes})
        return found

    def _late_part(self, group_id: int) -> dict[str, Any] | None:
        """Return the row of the part with late values of a group; None without a payload."""
        if group_id not in self._with_payload:  # it was dropped: only rows are left
            return None
        before, version = self._late.get(group_id), self._buffer.row.write_format
        late = {} if before is None else late_values(before)
        for (position, number), target in self._targets[group_id].items():
            values = late.setdefault(str(position), {})
            if number != OF_EPISODE:
                values = values.setdefault("turns", {}).setdefault(str(number), {})
            values |= target.numbers
            if target.metadata:
                values["metadata"] = {**values.get("metadata", {}), **target.metadata}
        data = codec.late.encode(late, version)
        return PayloadRecord(LATE_PART, data, codec.checksum_of(data), version).row(group_id)

    def _group(self, group_id: int, part: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the columns of a group that change, given its part with late values."""
        row, before = self._facts[group_id], self._late.get(group_id)
        grown = 0 if part is None else len(part["data"])
        grown -= 0 if before is None else len(before["data"])
        if row.group_status != GroupStatus.ARCHIVED:
            self._buffer.task_states[row.task_name].stored_bytes += grown
        rewards = [self._reward(group_id, position) for position in self._episodes[group_id]]
        known = np.array([one for one in rewards if one is not None], np.float64)
        return {
            "times_annotated": row.times_annotated + 1,
            "num_bytes": row.num_bytes + grown,
            **reward_facts(known),
        }

    def _reward(self, group_id: int, position: int) -> float | None:
        """Return the reward of an episode afterwards."""
        stored = self._episodes[group_id][position]
        target = self._targets[group_id].get((position, OF_EPISODE), _Target(stored))
        reward: float | None = target.numbers.get("reward", stored.reward)
        return reward


def _etag(row: Any, is_annotated: bool = False) -> str:
    """Return the etag of a group, given by its scalars: before or after it is annotated."""
    return etag_of(row.id, row.times_replaced, row.times_annotated + is_annotated, row.num_episodes)


def _text(value: Any) -> str:
    """Return JSON text, which is equal for equal values of equal types."""
    return json.dumps(value, sort_keys=True)


@prepared
def select_annotated(buffer_id: Any, uids: Any) -> Select[Any]:
    """Select the scalars of groups, and when they were first drawn, by uid."""
    more = (group.group_uid, group.first_sampled_at)
    return select_scalars(_are(buffer_id, uids)).add_columns(*more)


@prepared
def select_episode_values(buffer_id: Any, uids: Any) -> Select[Any]:
    """Select the values of the episodes of groups that can be changed."""
    columns = ("group_id", "position", "reward", "advantage", "metadata")
    return (
        select(*(episode.c[name] for name in columns))
        .join_from(episode_group, episode, episode.c.group_id == group.id)
        .where(_are(buffer_id, uids))
    )


@prepared
def select_turn_values(
    buffer_id: Any, group_uids: Any, positions: Any, numbers: Any, uids: Any
) -> Select[Any]:
    """Select the values of turns that can be changed, by number or uid."""
    columns = ("group_id", "position", "turn", "turn_uid", "reward", "metadata")
    return (
        select(*(turn.c[name] for name in columns))
        .join_from(episode_group, turn, turn.c.group_id == group.id)
        .where(
            _are(buffer_id, group_uids),
            among(turn.c.position, positions),
            among(turn.c.turn, numbers) | among(turn.c.turn_uid, uids),
        )
    )


@prepared
def select_late_parts(buffer_id: Any, uids: Any) -> Select[Any]:
    """Select the parts of groups, and the bytes of those with late values."""
    data: ColumnElement[Any] = case((payload.c.part == LATE_PART, payload.c.data), else_=None)
    columns = (payload.c.group_id, payload.c.part, payload.c.checksum, payload.c.pack_id)
    return (
        select(*columns, data.label("data"))
        .join_from(episode_group, payload, payload.c.group_id == group.id)
        .where(_are(buffer_id, uids))
    )


def _are(buffer_id: Any, uids: Any) -> Any:
    return (group.buffer_id == buffer_id) & among(group.group_uid, uids)


update_each_late_part = update(payload).where(
    payload.c.group_id == bindparam("of_group"), payload.c.part == LATE_PART
)
update_each_episode = update(episode).where(
    episode.c.group_id == bindparam("of_group"), episode.c.position == bindparam("at")
)
update_each_turn = update(turn).where(
    turn.c.group_id == bindparam("of_group"),
    turn.c.position == bindparam("at"),
    turn.c.turn == bindparam("of_turn"),
)
