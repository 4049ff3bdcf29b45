"""Rows of runs, buffers and tasks: lookup by name, and creation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Self

from sqlalchemy import Select, Update, bindparam, func, select, update

from replaydb.database.runtime import revisions
from replaydb.database.runtime.prepared import Write, prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.buffer import (
    BUFFER_ROWS,
    select_buffer,
    select_run,
    turn_of_buffer,
)
from replaydb.database.statements.insertion import insert_into, insert_one_into
from replaydb.database.tables.expressions import bytewise
from replaydb.database.tables.schema import FORMATS, buffer, episode_group, run, task
from replaydb.domain.results import BufferInfo, RunInfo
from replaydb.domain.settings import BufferSettings
from replaydb.errors import UnknownBufferError


@dataclass(slots=True)
class BufferRow:
    """A row of the `buffer` table; its counters are written back by `save_limits`.

    Attributes:
        id: Its id.
        name: Its name.
        policy_version: Version of the policy being trained.
        policy_lineage: Lineage of that version; None until a named run advances it.
        limited_inserts: Groups put since the rate limit was set.
        limited_samples: Groups drawn since the rate limit was set.
        settings: Its settings.
        created_at: When it was created.
        uses_payload_store: Whether new payloads are stored outside the database.
        write_format: Format of new payloads.
        pending_tags: Tags whose index is still being filled or emptied. The value is the id below
            which groups have not been processed.
        read_at: Time of the server's clock when it was read; None if that was not read as well.
    """

    id: int
    name: str
    policy_version: int
    policy_lineage: str | None
    limited_inserts: int
    limited_samples: int
    settings: BufferSettings
    created_at: datetime
    uses_payload_store: bool
    write_format: int
    pending_tags: Mapping[str, int] = field(default_factory=dict)
    read_at: datetime | None = field(default=None, compare=False)

    def time(self, session: Session) -> datetime:
        """Return the time of the database's clock: when this was read, if it was read as well."""
        return self.read_at or session.now()

    @property
    def indexed_tags(self) -> frozenset[str]:
        """Tags whose index covers every group."""
        return frozenset(self.settings.indexed_tags) - self.pending_tags.keys()

    @classmethod
    def of(cls, row: Any) -> Self:
        """Convert a row of the table.

        Raises:
            ClientTooOldError: The store has come to need a newer replaydb.
            SchemaError: What it needs is damaged.
        """
        revisions.check_usable(row.min_client, row.write_format)
        return cls(
            row.id,
            row.name,
            row.policy_version,
            row.policy_lineage,
            row.limited_inserts,
            row.limited_samples,
            row.settings,
            row.created_at,
            bool(row.uses_payload_store),
            row.write_format or min(FORMATS),
            row.pending_tags or {},
            getattr(row, "read_at", None),
        )


@dataclass(frozen=True, slots=True)
class RunRow:
    """Id of a run, and the lineage of its policy versions."""

    id: int
    lineage: str | None


def find_or_add_run(
    session: Session,
    name: str,
    lineage: str | None,
    metadata: Mapping[str, Any],
    now: datetime,
) -> RunRow:
    """Return the run of this name; create it if it does not exist.

    Raises:
        SchemaError: As of `revisions.check_still_usable`.
    """
    revisions.check_still_usable(session)
    rows = session.run(select_run(name))
    if rows:
        return RunRow(rows[0].id, rows[0].lineage)
    values = {"name": name, "lineage": lineage, "started_at": now, "metadata": dict(metadata)}
    return RunRow(session.inserted_id(insert_one_into(run), values), lineage)


def find(session: Session, name: str) -> BufferRow | None:
    """Return the buffer of this name; None if it does not exist."""
    rows = session.run(BUFFER_ROWS.where(buffer.c.name == name))
    return BufferRow.of(rows[0]) if rows else None


def create(session: Session, name: str, settings: BufferSettings, now: datetime) -> None:
    """Insert an empty buffer at policy version 0."""
    values = {
        "name": name,
        "settings": settings,
        "policy_version": 0,
        "limited_inserts": 0,
        "limited_samples": 0,
        "created_at": now,
    }
    session.run_many(insert_into(buffer), [values])


def state(session: Session, buffer_id: int, name: str, *, lock: bool = False) -> BufferRow:
    """Return the current row of a buffer, locked or not.

    Raises:
        UnknownBufferError: The buffer was deleted, or its id belongs to another buffer because the
            database was replaced by an older state.
    """
    rows = session.run((lock_buffer if lock else select_buffer)(buffer_id))
    return checked(rows, name)


def checked(rows: Sequence[Any], name: str) -> BufferRow:
    """Return the row that was read by the id of a buffer.

    Raises:
        UnknownBufferError: There is none, or it is of another buffer: see `state`.
    """
    if not rows or rows[0].name != name:
        raise UnknownBufferError(name)
    return BufferRow.of(rows[0])


def begin_snapshot(session: Session, buffer_id: int) -> None:
    """Run a first statement of a transaction, which takes its snapshot."""
    if not session.has_snapshot:
        session.run(select_buffer(buffer_id))


def save(session: Session, buffer_id: int, values: Mapping[str, Any]) -> None:
    """Change settings, policy version or counters of a locked buffer."""
    row = {"of_buffer": buffer_id, **values}
    session.postpone(Write(update_buffers(), [row]))


def save_limits(session: Session, state: BufferRow) -> None:
    """Write back the counters of a locked buffer's rate limit, if it has one."""
    if state.settings.rate_limit is not None:
        values = {
            "limited_inserts": state.limited_inserts,
            "limited_samples": state.limited_samples,
        }
        save(session, state.id, values)


def task_names(session: Session, buffer_id: int) -> list[str]:
    """Return the names of the tasks of a buffer."""
    names = select(task.c.task_name).where(task.c.buffer_id == buffer_id)
    return [row.task_name for row in session.run(names)]


#: Columns of a new task that have no default: its clocks and counters are 0.
_ZEROS: dict[str, Any] = {
    column.name: 0
    for column in task.c
    if not (column.nullable or column.primary_key or column.server_default)
}


def ensure_tasks(session: Session, buffer_id: int, name: str, wanted: Collection[str]) -> list[str]:
    """Insert the tasks that the buffer does not have yet. Call it before any task is locked.

    Returns:
        The names of these tasks.
    """
    settings = (state(session, buffer_id, name, lock=True)).settings
    existing = task_names(session, buffer_id)
    missing = [task_name for task_name in wanted if task_name not in existing]
    if missing:
        rows = [
            _ZEROS
            | {
                "buffer_id": buffer_id,
                "task_name": task_name,
                "max_staleness": settings.max_staleness_of(task_name),
            }
            for task_name in missing
        ]
        session.run_many(insert_into(task), rows)
    return missing


def available(session: Session, buffer_id: int) -> dict[str, int]:
    """Return per task the number of groups that can be drawn now, or could be after maintenance."""
    rows = session.run(select_available(buffer_id))
    return {row.task_name: row.num_available + row.num_leased + row.num_pending for row in rows}


def buffer_names(session: Session) -> list[str]:
    """Return the names of all buffers, sorted."""
    names = select(buffer.c.name).order_by(bytewise(buffer.c.name))
    return [row.name for row in session.run(names)]


def all_buffers(session: Session) -> list[BufferInfo]:
    """Return all buffers, sorted by name."""
    rows = session.run(select_buffers())
    return [
        BufferInfo(
            row.name,
            row.policy_version,
            row.settings,
            row.created_at,
            row.num_groups,
        )
        for row in rows
    ]


def all_runs(session: Session) -> list[RunInfo]:
    """Return all runs, oldest first."""
    rows = session.run(select(run).order_by(run.c.id))
    return [RunInfo(**row._asdict()) for row in rows]


@prepared
def lock_buffer(buffer_id: Any) -> Select[Any]:
    """Select the row of a buffer by id, locked against changes."""
    mine = BUFFER_ROWS.where(buffer.c.id == buffer_id, turn_of_buffer(buffer_id))
    return mine.with_for_update(key_share=True, of=buffer)


def select_buffers() -> Select[Any]:
    """Select all buffers, sorted by name, with their number of groups of any status."""
    groups = (
        select(func.count())
        .select_from(episode_group)
        .where(episode_group.c.buffer_id == buffer.c.id)
        .scalar_subquery()
    )
    return select(buffer, groups.label("num_groups")).order_by(bytewise(buffer.c.name))


@cache
def update_buffers() -> Update:
    """Change buffers, given as dicts of `of_buffer` and the columns to change."""
    return update(buffer).where(buffer.c.id == bindparam("of_buffer"))


def select_available(buffer_id: int) -> Select[Any]:
    """Select how many groups of every task can be drawn, are leased, or are pending."""
    columns = (task.c.task_name, task.c.num_available, task.c.num_leased, task.c.num_pending)
    return select(*columns).where(task.c.buffer_id == buffer_id)
