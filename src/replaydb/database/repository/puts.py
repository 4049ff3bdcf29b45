"""Puts: insertion, replacement and renewal of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from sqlalchemy import Connection

from replaydb.database.column_types import Damaged
from replaydb.database.engines.protocol import LostRaceError
from replaydb.database.prepared import execute
from replaydb.database.records import GroupRecord
from replaydb.database.repository import (
    buffers,
    capacity,
    limits,
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
from replaydb.database.statements.episode_group import (
    insert_groups,
    select_kept_on_replace,
)
from replaydb.database.statements.payload import (
    delete_episodes,
    delete_payloads,
    delete_transcripts,
    insert_episodes,
    insert_payloads,
    insert_transcripts,
)
from replaydb.database.statements.selections import EXPIRING, TOO_STALE, selection
from replaydb.database.writes import Write, postpone
from replaydb.episodes import GroupStatus
from replaydb.errors import DuplicateGroupError, ReplayDBError

OnDuplicate = Literal["error", "ignore", "replace", "renew"]

#: Values of `on_duplicate` that replace stored content.
_OVERWRITING = ("replace", "renew")


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Groups and cursors that are stored together or not at all; no uid occurs twice.

    It is equal to itself only: to compare all there is of several would take longer than a put.

    Attributes:
        records: The groups.
        on_duplicate: What to do about those that are stored already.
        cursors: JSON values by name.
        was_refused: It did not fit, or was held back by a rate limit, when it was last tried.
        of_run: Whose groups they are, where they are copies of what another run has put.
    """

    records: Sequence[GroupRecord]
    on_duplicate: OnDuplicate
    cursors: Mapping[str, Any] = field(default_factory=dict)
    was_refused: bool = False
    of_run: RunRow | None = None


@dataclass(frozen=True, slots=True)
class _Ids:
    """Ids of groups by uid: of groups stored before, and of new and renewed ones."""

    stored: Mapping[str, int]
    new: Mapping[str, int]

    def __getitem__(self, record: GroupRecord) -> int:
        return self.new.get(record.uid) or self.stored[record.uid]


def put(
    connection: Connection, scope: Scope, known_tasks: frozenset[str], puts: Sequence[Put]
) -> list[list[int] | ReplayDBError]:
    """Store several puts in one transaction. No uid may occur in two of them.

    Returns:
        For each put the ids of its groups, in their order, or why it was left out whole.
    """
    uids = [record.uid for put in puts for record in put.records]
    renews = any(put.on_duplicate == "renew" for put in puts)
    payloads = [part for put in puts for record in put.records for part in record.payloads]
    counted = packs.enter(connection, payloads)
    # Payloads and episodes are written before the locks are taken: a client that stalls in the
    # middle of them blocks no other. Puts that a limit refused are not sent again with every try.
    positions = {uid: position for position, uid in enumerate(uids, 1)}
    early = [record for put in puts if not put.was_refused for record in put.records]
    children = _children((positions[record.uid], record) for record in early)
    stored, new, has_children = scope.backend.identify(
        connection, scope.buffer_id, uids, renews=renews, children=children
    )
    renewing = [put for put in puts if put.on_duplicate == "renew"]
    renewed = {record.uid for put in renewing for record in _known(put, stored)}
    fresh = {uid: one for uid, one in zip(uids, new, strict=False) if uid not in stored}
    again = {uid: new[positions[uid] - 1] for uid in renewed}
    ids = _Ids(stored, fresh | again)
    task_names = {record.task_name for put in puts for record in put.records}
    early = [record for record in early if record.uid in fresh]
    if not has_children:
        _insert_children(connection, early, ids)
    written = {record.uid for record in early}
    if unseen := task_names - known_tasks:
        buffers.ensure_tasks(connection, scope.buffer_id, scope.buffer_name, unseen)
    # What is overwritten may be of any task.
    anywhere = any(put.on_duplicate in _OVERWRITING and _known(put, stored) for put in puts)
    with tasks_locked(connection, scope, None if anywhere else task_names) as buffer:
        capacity.evict_surplus(buffer)
        session = _Session(buffer, ids, written)
        outcomes: list[list[int] | ReplayDBError] = []
        for put in puts:
            known = _known(put, stored)
            if known and put.on_duplicate == "error":
                outcomes.append(DuplicateGroupError([record.uid for record in known]))
                session.delete_children(put)
                continue
            try:
                session.store(put)
                outcomes.append([ids[record] for record in put.records])
            except ReplayDBError as error:
                if not buffer.settings.is_limited:
                    raise  # what it has written, and deleted, goes with the transaction
                session.delete_children(put)
                outcomes.append(error)
        if counted or any(part.pack for part in payloads):
            taken = [
                part
                for put, outcome in zip(puts, outcomes, strict=True)
                if not isinstance(outcome, ReplayDBError)
                for record in _accepted(put, stored)
                for part in record.payloads
            ]
            packs.settle(buffer.shares, counted, taken)
        session.flush()
    return outcomes


@dataclass(slots=True)
class _Session:
    """Several puts on their way into a locked buffer.

    Attributes:
        buffer: The buffer.
        ids: Ids of the groups.
        written: Uids of the groups whose payloads, episodes and texts are written already.
        rows: Rows of `episode_group` that are not written yet; in a limited buffer there are none.
    """

    buffer: LockedBuffer
    ids: _Ids
    written: set[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def store(self, put: Put) -> None:
        """Store one put. If this raises in a limited buffer, everything is rolled back."""
        if not self.buffer.settings.is_limited:
            rows, _ = self._count(put)
            self.rows += rows
            return
        with self.buffer.savepoint():
            rows, rivals = self._count(put)
            self._add_keys(rows)
            self._write(rows)  # what is in can be a victim: of the next put, or at once
            capacity.evict_excess(self.buffer, rivals)

    def flush(self) -> None:
        """Write the rows of the puts stored so far."""
        self._add_keys(self.rows)
        self._write(self.rows)
        self.rows = []

    def delete_children(self, put: Put) -> None:
        """Delete what was written of a put that is refused, before the groups were locked."""
        ids = [self.ids[record] for record in put.records if record.uid in self.written]
        if ids:
            for delete in (delete_payloads, delete_episodes, delete_transcripts):
                postpone(self.buffer.connection, delete(ids))

    def _add_keys(self, rows: Sequence[dict[str, Any]]) -> None:
        """Give new keys to rows of groups."""
        by_task: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_task.setdefault(row["task_name"], []).append(row)
        for name, mine in by_task.items():
            task = self.buffer.task_states[name]
            for clock in tasks.CLOCKS:
                tasks.set_back_if_late(self.buffer.connection, task, clock)
            weights = np.array([row["weight"] for row in mine])
            waits = (wait.tolist() for wait in task.waits(self.buffer.settings, weights))
            for row, uniform, prioritized in zip(mine, *waits, strict=True):
                row["uniform_key"] = task.uniform_clock + uniform
                row["priority_key"] = task.priority_clock + prioritized

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        postpone(self.buffer.connection, Write(insert_groups(), rows))
        if rows and self.buffer.settings.indexed_tags:
            tags.enter(self.buffer, [row["id"] for row in rows])

    def _count(self, put: Put) -> tuple[list[dict[str, Any]], list[int]]:
        """Check a put against the limits, free space for it, and count it.

        Returns:
            Rows of its groups to write, and ids of those without freed space: see `evict_excess`.
        """
        stored = self.ids.stored
        accepted = _accepted(put, stored)
        replaced = [stored[record.uid] for record in accepted if record.uid in stored]
        if put.on_duplicate == "renew":
            if replaced:
                old = selection(self.buffer.id, ids=replaced)
                transitions.replace(self.buffer, old)
            replaced = []  # what comes in is new
        limits.check_put(self.buffer, len(accepted) - len(replaced))
        kept = self._delete_replaced(replaced) if replaced else {}
        usable = [record for record in accepted if self._is_usable(record, put.of_run)]
        rivals = [record for record in usable if self._is_rival(record)]
        for record in rivals:
            (size,) = _sizes([record]).values()
            capacity.check_fits(self.buffer, record.task_name, size)
        capacity.free_space(
            self.buffer, _sizes(record for record in usable if not self._is_rival(record))
        )
        others = [record for record in accepted if record.uid not in self.written]
        _insert_children(self.buffer.connection, others, self.ids)
        self.buffer.row.limited_inserts += len(accepted) - len(replaced)
        rows = [
            row | kept.get(row["id"], {"times_replaced": 0})
            for row in self._group_rows(accepted, put.of_run)
        ]
        self.buffer.cursors |= put.cursors
        return rows, [self.ids[record] for record in rivals]

    def _delete_replaced(self, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Delete groups that are replaced. Return the columns that their successors keep, by id."""
        condition = selection(self.buffer.id, ids=ids)
        kept = {
            row.id: {
                key: value for key, value in row._asdict().items() if not isinstance(value, Damaged)
            }
            for row in execute(self.buffer.connection, select_kept_on_replace(condition))
        }
        if len(kept) < len(ids):  # found before the locks
            raise LostRaceError("another transaction deleted a group that is to be replaced")
        transitions.replace(self.buffer, condition)
        return kept

    def _group_rows(
        self, records: Sequence[GroupRecord], of_run: RunRow | None
    ) -> list[dict[str, Any]]:
        """Return rows of groups, and add them to the counters of their tasks."""
        rows = []
        for task_name in dict.fromkeys(record.task_name for record in records):
            task = self.buffer.task_states[task_name]
            members = [record for record in records if record.task_name == task_name]
            for record in members:
                weight = self.buffer.settings.weight(record.facts["priority"])
                row = record.facts | {
                    "id": self.ids[record],
                    "buffer_id": self.buffer.id,
                    "run_id": (of_run or self.buffer.scope.run).id,
                    "weight": weight,
                    **self._status_columns(record, of_run),
                    "created_at": self.buffer.now,
                }
                row["completed_at"] = self.buffer.now if record.is_completed else None
                archived = row["group_status"] == GroupStatus.ARCHIVED
                row["archived_at"] = self.buffer.now if archived else None
                if record.time_limit is not None:
                    row["deadline"] = self.buffer.now + record.time_limit
                sums = GroupSums(1, weight, row["num_tokens"], row["num_bytes"])
                task.enter(row["group_status"], sums)
                task.num_inserted += 1
                rows.append(row)
        return sorted(rows, key=lambda row: int(row["id"]))

    def _is_usable(self, record: GroupRecord, of_run: RunRow | None) -> bool:
        """Return whether space is freed for a group by evicting others."""
        columns = self._status_columns(record, of_run)
        return columns["group_status"] not in (*capacity.UNSAMPLABLE, GroupStatus.ARCHIVED)

    def _is_rival(self, record: GroupRecord) -> bool:
        """Return whether a group can itself be evicted for space; pending groups can not."""
        pending = record.facts["group_status"] == GroupStatus.PENDING
        return self.buffer.settings.keeps_best and not pending

    def _status_columns(self, record: GroupRecord, of_run: RunRow | None) -> dict[str, Any]:
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
        staleness = None if oldest is None else self.buffer.row.policy_version - oldest
        status, reason = record.facts["group_status"], None
        too_stale = self.buffer.is_too_stale(record.task_name, staleness, span)
        if status in EXPIRING and too_stale:
            status, reason = GroupStatus.EXPIRED.value, TOO_STALE
        return {
            "comparable_version": oldest,
            "staleness": staleness,
            "group_status": status,
            "status_reason": reason,
        }


def _known(put: Put, stored: Mapping[str, int]) -> list[GroupRecord]:
    """Return the groups of a put whose uid is stored already."""
    return [record for record in put.records if record.uid in stored]


def _accepted(put: Put, stored: Mapping[str, int]) -> list[GroupRecord]:
    """Return the groups of a put that are stored if it is admitted."""
    return [
        record
        for record in put.records
        if put.on_duplicate in _OVERWRITING or record.uid not in stored
    ]


def _sizes(records: Iterable[GroupRecord]) -> dict[str, Size]:
    """Return the total size of groups, by task."""
    sizes: dict[str, Size] = {}
    for record in records:
        size = sizes.setdefault(record.task_name, Size())
        size.add(record.facts["num_tokens"], record.facts["num_bytes"])
    return sizes


def _insert_children(connection: Connection, records: Iterable[GroupRecord], ids: _Ids) -> None:
    """Insert the large rows of groups, which needs no lock."""
    postpone(connection, *_children((ids[record], record) for record in records))


def _children(records: Iterable[tuple[int, GroupRecord]]) -> list[Write]:
    """Return the large rows of groups (payloads, episodes, texts), given what `group_id` is."""
    rows = list(records)
    parts = [part.row(i, part.part) for i, record in rows for part in record.payloads]
    episodes = [{"group_id": i, **child} for i, record in rows for child in record.episodes]
    texts = [{"group_id": i, **child} for i, record in rows for child in record.transcripts]
    writes = [
        Write(insert_payloads(), parts),
        Write(insert_episodes(), episodes),
        Write(insert_transcripts(), texts),
    ]
    return [write for write in writes if write.rows]
