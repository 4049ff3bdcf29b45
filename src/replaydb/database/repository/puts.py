"""Puts: insertion, replacement and renewal of groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from sqlalchemy import Delete, Select, delete, select

from replaydb.database.repository import (
    buffers,
    capacity,
    limits,
    missing_values,
    packs,
    tags,
    tasks,
    transitions,
)
from replaydb.database.repository.buffers import RunRow
from replaydb.database.repository.capacity import Size
from replaydb.database.repository.locked import LockedBuffer, Scope
from replaydb.database.repository.locking import tasks_locked
from replaydb.database.repository.tasks import GroupSums
from replaydb.database.runtime.prepared import Bound, Write, prepared
from replaydb.database.runtime.protocol import LostRaceError
from replaydb.database.runtime.session import Identified, Session
from replaydb.database.statements.candidates import Partition, order_of, select_first
from replaydb.database.statements.insertion import insert_into
from replaydb.database.statements.payload import delete_payloads, delete_transcripts
from replaydb.database.statements.selections import EXPIRING, TOO_STALE, selection
from replaydb.database.tables.column_types import Damaged
from replaydb.database.tables.expressions import among
from replaydb.database.tables.records import GroupRecord, PayloadRecord
from replaydb.database.tables.schema import (
    episode,
    episode_group,
    group,
    payload,
    task,
    trajectory,
    transcript,
    turn,
)
from replaydb.database.tables.staleness import staleness_of
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.policies import TopPriority
from replaydb.domain.results import etag_of
from replaydb.errors import (
    ConsumedGroupError,
    ContentChangedError,
    DatabaseError,
    DuplicateGroupError,
    ReplayDBError,
)

OnDuplicate = Literal["error", "ignore", "replace", "renew"]

#: The highest priorities of up to this many tasks are read in the round trip that locks them.
MOST_FIRST_READS = 8

#: Values of `on_duplicate` that replace stored content.
OVERWRITING = ("replace", "renew")


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Groups and cursors that are stored together or not at all; no uid occurs twice.

    It is equal to itself only: to compare all there is of several would take longer than a put.

    Attributes:
        records: The groups.
        on_duplicate: What to do about those that are stored already.
        cursors: JSON values by name.
        if_match: For groups that are overwritten, by uid, the etag that they must have.
        was_refused: It did not fit, or was held back by a rate limit, when it was last tried.
        of_run: Whose groups they are, where they are copies of what another run has put.
    """

    records: Sequence[GroupRecord]
    on_duplicate: OnDuplicate
    cursors: Mapping[str, Any] = field(default_factory=dict)
    if_match: Mapping[str, str] = field(default_factory=dict)
    was_refused: bool = False
    of_run: RunRow | None = None

    @property
    def payloads(self) -> list[PayloadRecord]:
        """The payloads of all groups."""
        return [part for record in self.records for part in record.payloads]

    @property
    def new_task_names(self) -> set[str]:
        """Names of tasks that it may insert."""
        return {record.task_name for record in self.records}


class RefusedError(Exception):
    """All puts of a transaction were refused: there is nothing to commit or announce.

    An announcement would wake the blocked puts, including these, in an endless cycle.
    """

    def __init__(self, outcomes: Sequence[list[int] | ReplayDBError]) -> None:
        super().__init__()
        self.outcomes = outcomes

    @classmethod
    def check(cls, outcomes: Sequence[list[int] | ReplayDBError]) -> None:
        """Raise it if no put has succeeded."""
        if all(isinstance(outcome, ReplayDBError) for outcome in outcomes):
            raise cls(outcomes)


def put(
    scope: Scope, session: Session, *, known_tasks: frozenset[str], several: Sequence[Put]
) -> list[list[int] | ReplayDBError]:
    """Store several puts in one transaction. No uid may occur in two of them.

    Returns:
        For each put the ids of its groups, in their order, or why it was left out whole.

    Raises:
        RefusedError: All were left out.
    """
    records = [record for put in several for record in put.records]
    in_packs = [part for record in records for part in record.payloads if part.pack is not None]
    counted = packs.enter(session, in_packs) if in_packs else {}
    # Puts that a limit refused are not sent again with every try.
    early = [record for put in several if not put.was_refused for record in put.records]
    uids = [record.uid for record in records]
    found, generated, _, taken_error = _identify(session, scope.buffer_id, uids, early)
    task_names = {record.task_name for record in records}
    new_tasks: set[str] = set()  # only of puts that are refused, in the end
    if unseen := task_names - known_tasks:
        new_tasks.update(buffers.ensure_tasks(session, scope.buffer_id, scope.buffer_name, unseen))
    # What is overwritten may be of any task.
    anywhere = any(
        put.on_duplicate in OVERWRITING and record.uid in found
        for put in several
        for record in put.records
    )
    reads = [select_kept_on_replace(list(found.values()))] if found else []
    first = [*reads, *_first_reads(scope.buffer_id, records)]
    with tasks_locked(session, scope, None if anywhere else task_names, reads=first) as buffer:
        buffer.check_formats(part for record in records for part in record.payloads)
        capacity.evict_surplus(buffer)
        stored = {row.group_uid: row for read in reads for row in session.run(read)}
        if gone := found.keys() - stored.keys():
            stored |= _renewed(buffer, gone, anywhere)
        new = dict(zip(uids, generated, strict=True))
        written = {record.uid for record in early if record.uid not in found}
        storing = _Storing(buffer, new, stored, written, taken_error)
        outcomes = [storing.outcome_of(put) for put in several]
        if in_packs:
            taken = [part for record in storing.accepted for part in record.payloads]
            packs.settle(buffer.shares, counted, taken)
        storing.flush()
        RefusedError.check(outcomes)
        for put, outcome in zip(several, outcomes, strict=True):
            if not isinstance(outcome, ReplayDBError):
                new_tasks -= put.new_task_names
        if new_tasks:
            session.run(delete_tasks(buffer.id, sorted(new_tasks)))
    return outcomes


def _identify(
    session: Session, buffer_id: int, uids: Sequence[str], early: Sequence[GroupRecord]
) -> Identified:
    """Find which groups are stored, and insert the large rows of those that are not.

    Payloads and episodes are written before the locks are taken: a client that stalls in the middle
    of them blocks no other.
    """
    positions = {uid: position for position, uid in enumerate(uids, 1)}
    children = (
        _children(buffer_id, ((positions[record.uid], record) for record in early))
        if session.sends_together
        else []
    )
    identified = session.identify(buffer_id, uids, children=children)
    if not identified.has_children:
        new = dict(zip(uids, identified.new, strict=True))
        others = (record for record in early if record.uid not in identified.stored)
        session.postpone(*_children(buffer_id, ((new[record.uid], record) for record in others)))
    return identified


def _first_reads(buffer_id: int, records: Iterable[GroupRecord]) -> list[Bound[Any]]:
    """Return the statements that read the highest priorities to put groups with."""
    compared = {record.task_name for record in records if record.facts["priority"] is None}
    return [
        read
        for task_name in sorted(compared)[:MOST_FIRST_READS]
        for read in _select_highest(buffer_id, task_name)
    ]


def _renewed(buffer: LockedBuffer, gone: Collection[str], anywhere: bool) -> dict[str, Any]:
    """Find those groups that another put renewed since, so that they have other ids, by uid.

    Of the groups that are gone, the others were deleted, perhaps by maintenance.

    Raises:
        LostRaceError: `anywhere`, and the task of a group was created after tasks were locked.
    """
    rows = buffer.session.run(select_kept_by_uid(buffer.id, sorted(gone)))
    if anywhere and any(row.task_name not in buffer.task_states for row in rows):
        raise LostRaceError("another transaction put a group into a new task")
    return {row.group_uid: row for row in rows}


@dataclass(slots=True)
class _Storing:
    """Several puts on their way into a locked buffer.

    Attributes:
        buffer: The buffer.
        new: An id for each group that is stored as a new one, by uid.
        stored: Columns of the groups that were stored before the first put, by uid.
        written: Uids of the groups whose payloads, episodes and texts are written already.
        taken_error: Why the new ids cannot be used, if they cannot.
        accepted: The groups stored so far.
        highest: The highest priority of the completed and leased groups of tasks, as far as it is
            known; negative if they have none.
        rows: Rows of `episode_group` that are not written yet; in a limited buffer there are none.
        missing: Rows of `trajectory` of those that wait for values, by id.
    """

    buffer: LockedBuffer
    new: Mapping[str, int]
    stored: Mapping[str, Any]
    written: set[str]
    taken_error: DatabaseError | None
    accepted: list[GroupRecord] = field(default_factory=list)
    highest: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def outcome_of(self, put: Put) -> list[int] | ReplayDBError:
        """Store one put, and return the ids of its groups, or why it is left out.

        Raises:
            ReplayDBError: It has written something: the transaction must be rolled back.
        """
        try:
            return self.store(put)
        except ReplayDBError as error:
            is_early = isinstance(error, DuplicateGroupError | ContentChangedError)
            if not (self.buffer.settings.is_limited or is_early):
                raise
            self.delete_children(put)
            return error

    def store(self, put: Put) -> list[int]:
        """Store one put, and return the ids of its groups.

        If this raises in a limited buffer, everything is rolled back.
        """
        known = {
            record.uid: self.stored[record.uid]
            for record in put.records
            if record.uid in self.stored
            and self.stored[record.uid].id not in self.buffer.erased  # for a put before this one
        }
        if known and put.on_duplicate == "error":
            opens = put.records[0].facts["group_status"] == GroupStatus.PENDING
            raise DuplicateGroupError(list(known), opens=opens)
        changed = [
            uid
            for uid, etag in put.if_match.items()
            if uid not in known or _etag(known[uid]) != etag
        ]
        if changed:
            raise ContentChangedError(changed)
        consumed = [uid for uid, row in known.items() if row.is_consumed]
        if consumed and put.on_duplicate == "replace":
            raise ConsumedGroupError(consumed)
        renewed = {
            record.uid: known.pop(record.uid)
            for record in put.records
            if record.uid in known and self._renews(put, record, known[record.uid])
        }
        if self.taken_error is not None and len(known) < len(put.records):
            raise self.taken_error
        ids = {
            record.uid: known[record.uid].id if record.uid in known else self.new[record.uid]
            for record in put.records
        }
        accepted = [
            record
            for record in put.records
            if put.on_duplicate in OVERWRITING or record.uid not in known
        ]
        if accepted and self.buffer.settings.is_limited:
            self.highest.clear()  # the put before may have evicted groups
            with self.buffer.savepoint():
                rows, rivals = self._count(put, accepted, known, renewed, ids)
                self._write(rows)  # what is in can be a victim: of the next put, or at once
                capacity.evict_excess(self.buffer, rivals)
        elif accepted:
            rows, _ = self._count(put, accepted, known, renewed, ids)
            self.rows += rows
        self.accepted += accepted
        archived = {
            record.uid
            for record in accepted
            if record.facts["group_status"] == GroupStatus.ARCHIVED
        }
        self.buffer.kept |= {
            group_id: None
            for uid, group_id in ids.items()
            if uid in known or uid in archived or group_id in self.buffer.evicted
        }
        self.buffer.cursors |= put.cursors
        return list(ids.values())

    def flush(self) -> None:
        """Write the rows of the puts stored so far."""
        self._write(self.rows)
        self.rows = []

    def delete_children(self, put: Put) -> None:
        """Delete what was written of a put that is refused, before the groups were locked."""
        ids = [self.new[record.uid] for record in put.records if record.uid in self.written]
        if ids:
            for delete in (
                delete_payloads,
                delete_episodes,
                delete_transcripts,
                delete_turns,
                delete_open_positions,
            ):
                self.buffer.session.postpone(delete(ids))

    def _renews(self, put: Put, record: GroupRecord, row: Any) -> bool:
        """Return whether a stored group, given by its row, gets a new id when it is overwritten.

        Under the old id, new content would be removed because of the age of the old.
        """
        if put.on_duplicate != "replace":
            return put.on_duplicate == "renew"
        if row.is_evicted or row.id in self.buffer.evicted:
            return True
        if record.facts["group_status"] == GroupStatus.ARCHIVED:
            return self.buffer.settings.keep_archived is not None
        return capacity.is_old(self.buffer, row)

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows of groups, with new keys."""
        by_task: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_task.setdefault(row["task_name"], []).append(row)
        for name, mine in by_task.items():
            task = self.buffer.task_states[name]
            for clock in tasks.CLOCKS:
                tasks.set_back_if_late(self.buffer.session, task, clock)
            weights = np.array([row["weight"] for row in mine])
            waits = (wait.tolist() for wait in task.waits(self.buffer.settings, weights))
            for row, uniform, prioritized in zip(mine, *waits, strict=True):
                row["uniform_key"] = task.uniform_clock + uniform
                row["priority_key"] = task.priority_clock + prioritized
        missing = [one for row in rows for one in self.missing.pop(row["id"], ())]
        self.buffer.session.postpone(
            Write(insert_into(episode_group), rows), Write(insert_into(trajectory), missing)
        )
        if rows and self.buffer.settings.indexed_tags:
            tags.enter(self.buffer, [row["id"] for row in rows])

    def _count(
        self,
        put: Put,
        accepted: Sequence[GroupRecord],
        known: Mapping[str, Any],
        renewed: Mapping[str, Any],
        ids: Mapping[str, int],
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Check a put against the limits, free space for it, and count it.

        Args:
            put: The put.
            accepted: Its groups that are to be stored.
            known: Columns of its groups that are stored already and keep their ids, by uid.
            renewed: Columns of those that get new ids, by uid.
            ids: Ids of all of its groups, by uid.

        Returns:
            Rows of its groups to write, and ids of those without freed space: see `evict_excess`.
        """
        highest = {
            record.task_name: self._highest(record.task_name)
            for record in accepted
            if record.facts["priority"] is None
        }
        replaced = known if put.on_duplicate == "replace" else {}
        self._delete(renewed)
        num_new = len(accepted) - len(replaced)
        limits.check_put(self.buffer, num_new)
        self._delete(replaced)
        states = {record.uid: self._state_columns(record, put.of_run) for record in accepted}
        # Space is freed for groups that can be drawn, unless they can themselves be evicted for it.
        usable = [one for one in accepted if states[one.uid]["group_status"] not in _NOT_DRAWN]
        rivals, others = [], usable
        if self.buffer.settings.keeps_best:
            rivals = [
                one for one in usable if states[one.uid]["group_status"] != GroupStatus.PENDING
            ]
            others = [
                one for one in usable if states[one.uid]["group_status"] == GroupStatus.PENDING
            ]
        for record in rivals:
            (size,) = _sizes([record]).values()
            capacity.check_fits(self.buffer, record.task_name, size)
        ignored = known.values() if put.on_duplicate == "ignore" else ()
        capacity.free_space(
            self.buffer,
            _sizes(others),
            protected=[row.id for row in ignored],
        )
        unwritten = [record for record in accepted if record.uid not in self.written]
        children = _children(self.buffer.id, ((ids[record.uid], record) for record in unwritten))
        self.buffer.session.postpone(*children)
        self.buffer.row.limited_inserts += num_new
        kept = {
            ids[record.uid]: _kept(replaced[record.uid], record)
            for record in accepted
            if record.uid in replaced
        }
        rows = [
            row | kept.get(row["id"], {"times_replaced": 0})
            for row in self._group_rows(accepted, put.of_run, ids, highest, states)
        ]
        for row in rows:
            self.buffer.task_states[row["task_name"]].num_replaced += row["id"] in kept
        return rows, [ids[record.uid] for record in rivals]

    def _delete(self, known: Mapping[str, Any]) -> None:
        """Delete groups that are overwritten."""
        if known:
            if self.highest:  # it may be that of these groups
                self.flush()
                self.highest.clear()
            old = selection(self.buffer.id, ids=[row.id for row in known.values()])
            transitions.replace(self.buffer, old)

    def _highest(self, task_name: str) -> float:
        """Return the highest priority of the completed and leased groups of a task, or 1.0."""
        if task_name not in self.highest:
            self.flush()
            found = (
                row.key
                for read in _select_highest(self.buffer.id, task_name)
                for row in self.buffer.session.run(read)
            )
            self.highest[task_name] = max(found, default=-1.0)
        known = self.highest[task_name]
        return 1.0 if known < 0.0 else known

    def _group_rows(
        self,
        records: Sequence[GroupRecord],
        of_run: RunRow | None,
        ids: Mapping[str, int],
        highest: Mapping[str, float],
        states: Mapping[str, Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        """Return rows of groups, and add them to the counters of their tasks."""
        rows = []
        for task_name in dict.fromkeys(record.task_name for record in records):
            task = self.buffer.task_states[task_name]
            members = [record for record in records if record.task_name == task_name]
            for record in members:
                priority = record.facts["priority"]
                priority = highest[task_name] if priority is None else priority
                weight = self.buffer.settings.weight(priority)
                row = record.facts | {
                    "priority": priority,
                    "id": ids[record.uid],
                    "buffer_id": self.buffer.id,
                    "run_id": (of_run or self.buffer.scope.run).id,
                    "weight": weight,
                    **states[record.uid],
                    "created_at": self.buffer.now,
                }
                waits = record.is_completed and row["group_status"] == GroupStatus.PENDING
                if waits:
                    self.missing[row["id"]] = self._missing(record, row["id"])
                    row |= missing_values.limits(self.buffer)
                is_completed = record.is_completed and not waits
                row["completed_at"] = self.buffer.now if is_completed else None
                archived = row["group_status"] == GroupStatus.ARCHIVED
                row["archived_at"] = self.buffer.now if archived else None
                if record.time_limit is not None:
                    row["deadline"] = self.buffer.now + record.time_limit
                sums = GroupSums(1, weight, row["num_tokens"], row["num_bytes"])
                task.enter(row["group_status"], sums)
                task.num_inserted += 1
                if task_name in self.highest and row["group_status"] == GroupStatus.COMPLETED:
                    self.highest[task_name] = max(self.highest[task_name], priority)
                rows.append(row)
        return sorted(rows, key=lambda row: int(row["id"]))

    def _state_columns(self, record: GroupRecord, of_run: RunRow | None) -> dict[str, Any]:
        """Return the status, staleness and comparable version of a group when it is put.

        A copied group keeps its comparable version if its lineage is that of the buffer. If the
        lineage is unknown, its version is not comparable.
        """
        oldest, newest = (record.facts[f"{bound}_policy_version"] for bound in ("min", "max"))
        span = None if oldest is None else newest - oldest
        if of_run is None:
            is_comparable = self.buffer.is_comparable
        else:
            is_comparable = of_run.lineage is not None
            is_comparable &= of_run.lineage == self.buffer.row.policy_lineage
        if not is_comparable:
            oldest = None
        staleness = staleness_of(oldest, self.buffer.row.policy_version)
        status, reason = record.facts["group_status"], None
        too_stale = self.buffer.is_too_stale(record.task_name, staleness, span)
        if status in EXPIRING and too_stale:
            status, reason = GroupStatus.EXPIRED.value, TOO_STALE
        elif (
            self.buffer.settings.requires
            and record.is_completed
            and (missing := self._missing(record))
        ):
            names = [one["missing"] for one in missing]
            text = missing_values.described(names, len(record.episodes))
            status, reason = GroupStatus.PENDING.value, f"waits for {text}"
        return {
            "comparable_version": oldest,
            "staleness": staleness,
            "group_status": status,
            "status_reason": reason,
        }

    def _missing(self, record: GroupRecord, group_id: int = 0) -> list[dict[str, Any]]:
        """Return a row of `trajectory` for each required value that an episode does not have."""
        return missing_values.rows_of(self.buffer, record.task_name, group_id, record.episodes)


_NOT_DRAWN = (*capacity.UNSAMPLABLE, GroupStatus.ARCHIVED)


def _select_highest(buffer_id: int, task_name: str) -> list[Bound[Any]]:
    """Return the statements that select the highest priorities, as `key`, of groups of a task."""
    order = order_of(TopPriority())
    statuses = (GroupStatus.COMPLETED, GroupStatus.LEASED)
    return [select_first(Partition(buffer_id, task_name, one.value), order, 1) for one in statuses]


def _etag(row: Any) -> str:
    """Return the etag of a stored group, given as a row of `_select_kept`."""
    return etag_of(row.id, row.times_replaced - 1, row.times_annotated, row.num_episodes)


def _kept(row: Any, record: GroupRecord) -> dict[str, Any]:
    """Return the columns that a group keeps when its content is replaced."""
    kept = {"created_at": row.created_at, "times_replaced": row.times_replaced}
    if not record.is_completed:  # else as if it was completed by its last episode, or by an update
        kept["attempts"] = row.attempts
    return {key: value for key, value in kept.items() if not isinstance(value, Damaged)}


def _sizes(records: Iterable[GroupRecord]) -> dict[str, Size]:
    """Return the total size of groups, by task."""
    sizes: dict[str, Size] = {}
    for record in records:
        size = sizes.setdefault(record.task_name, Size())
        size.add(record.facts["num_tokens"], record.facts["num_bytes"])
    return sizes


def _children(buffer_id: int, records: Iterable[tuple[int, GroupRecord]]) -> list[Write]:
    """Return the rows that belong to groups, given what `group_id` is: payloads, episodes, ..."""
    rows = list(records)
    parts = [part.row(i) for i, record in rows for part in record.payloads]
    episodes = [{"group_id": i, **child} for i, record in rows for child in record.episodes]
    texts = [{"group_id": i, **child} for i, record in rows for child in record.transcripts]
    open_positions = [
        {"group_id": i, "position": position, "buffer_id": buffer_id}
        for i, record in rows
        if record.facts["group_status"] == GroupStatus.PENDING.value
        for position in range(record.facts["expected_episodes"])
    ]
    turns = [{"group_id": i, **child} for i, record in rows for child in record.turns]
    writes = [
        Write(insert_into(payload), parts),
        Write(insert_into(episode), episodes),
        Write(insert_into(turn), turns),
        Write(insert_into(transcript), texts),
        Write(insert_into(trajectory), open_positions),
    ]
    return [write for write in writes if write.rows]


@prepared
def select_kept_on_replace(ids: Any) -> Select[Any]:
    """Select the columns that groups keep when their content is replaced.

    In addition, their task, and why they were archived: `is_consumed` or `is_evicted`.
    """
    return _select_kept().where(among(group.id, ids))


@prepared
def select_kept_by_uid(buffer_id: Any, uids: Any) -> Select[Any]:
    """As `select_kept_on_replace`, by uid."""
    return _select_kept().where(group.buffer_id == buffer_id, among(group.group_uid, uids))


def _select_kept() -> Select[Any]:
    is_archived = group.group_status == GroupStatus.ARCHIVED.value
    return select(
        group.id,
        group.group_uid,
        group.task_name,
        group.attempts,
        group.created_at,
        (group.times_replaced + 1).label("times_replaced"),
        group.times_annotated,
        group.num_episodes,
        (is_archived & ~group.is_evicted).label("is_consumed"),
        (is_archived & group.is_evicted).label("is_evicted"),
    )


@prepared
def delete_episodes(ids: Any) -> Delete:
    """Delete the episode rows of groups."""
    return delete(episode).where(among(episode.c.group_id, ids))


@prepared
def delete_turns(ids: Any) -> Delete:
    """Delete the rows of the turns of groups."""
    return delete(turn).where(among(turn.c.group_id, ids))


@prepared
def delete_open_positions(ids: Any) -> Delete:
    """Delete the open positions of groups."""
    return delete(trajectory).where(among(trajectory.c.group_id, ids))


@prepared
def delete_tasks(buffer_id: Any, names: Any) -> Delete:
    """Delete tasks by name, which have no groups."""
    return delete(task).where(task.c.buffer_id == buffer_id, among(task.c.task_name, names))
