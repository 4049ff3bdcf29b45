"""Runs, buffers and tasks: found by name, made when new."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from sqlalchemy import Connection

from replaydb.database.prepared import inserted_id
from replaydb.database.statements import buffers as statements
from replaydb.errors import UnknownBufferError
from replaydb.results import BufferInfo, RunInfo
from replaydb.settings import BufferSettings


@dataclass(slots=True)
class BufferRow:
    """A row of the `buffer` table; its counters are written back by `save_limits`.

    Attributes:
        id: Its id.
        name: Its name.
        policy_version: The policy being trained.
        policy_lineage: The lineage its versions count in; None until a named run advances it.
        limited_inserts: Groups put since the rate limit was set.
        limited_samples: Groups drawn since the rate limit was set.
        settings: Its settings.
    """

    id: int
    name: str
    policy_version: int
    policy_lineage: str | None
    limited_inserts: int
    limited_samples: int
    settings: BufferSettings

    @classmethod
    def of(cls, row: Any) -> Self:
        """From the table."""
        return cls(
            row.id,
            row.name,
            row.policy_version,
            row.policy_lineage,
            row.limited_inserts,
            row.limited_samples,
            BufferSettings.from_json(row.settings),
        )


@dataclass(frozen=True, slots=True)
class RunRow:
    """Identity of a run, and the lineage in which its policy versions count."""

    id: int
    lineage: str | None


def find_or_add_run(
    connection: Connection,
    name: str,
    lineage: str | None,
    metadata: Mapping[str, Any],
    now: datetime,
) -> RunRow:
    """The run of this name, made if there is none."""
    row = connection.execute(statements.find_run(name)).one_or_none()
    if row is not None:
        return RunRow(row.id, row.lineage)
    values = {"name": name, "lineage": lineage, "started_at": now, "metadata": dict(metadata)}
    return RunRow(inserted_id(connection, statements.insert_run(), values), lineage)


def find(connection: Connection, name: str) -> BufferRow | None:
    """The buffer of this name, if there is one."""
    row = connection.execute(statements.find_buffer(name)).one_or_none()
    return None if row is None else BufferRow.of(row)


def create(connection: Connection, name: str, settings: BufferSettings, now: datetime) -> None:
    """A new, empty buffer at policy version 0."""
    values = {
        "name": name,
        "settings": settings.to_json(),
        "policy_version": 0,
        "limited_inserts": 0,
        "limited_samples": 0,
        "created_at": now,
    }
    connection.execute(statements.insert_buffer(), values)


def state(connection: Connection, buffer_id: int, name: str, *, lock: bool = False) -> BufferRow:
    """Policy version and settings as they are now.

    Raises:
        UnknownBufferError: The buffer was deleted.
    """
    statement = statements.lock_buffer if lock else statements.buffer_state
    row = connection.execute(*statement(buffer_id)).one_or_none()
    if row is None:
        raise UnknownBufferError(name)
    return BufferRow.of(row)


def pin(connection: Connection, buffer_id: int) -> None:
    """Let a snapshot begin, which it does with its first statement."""
    connection.execute(*statements.buffer_state(buffer_id))


def save_limits(connection: Connection, state: BufferRow) -> None:
    """Write back what a locked buffer's rate limit goes by; without a limit nothing is counted."""
    if state.settings.rate_limit is not None:
        values = {
            "limited_inserts": state.limited_inserts,
            "limited_samples": state.limited_samples,
        }
        connection.execute(statements.save_buffer(state.id), values)


def ensure_tasks(
    connection: Connection, buffer_id: int, name: str, task_names: Collection[str]
) -> None:
    """Make the tasks that the buffer has not seen. To be called before any task is locked."""
    settings = (state(connection, buffer_id, name, lock=True)).settings
    seen = set(connection.scalars(statements.task_names(buffer_id)).all())
    missing = [task_name for task_name in task_names if task_name not in seen]
    if missing:
        connection.execute(
            statements.insert_tasks(),
            [
                {
                    "buffer_id": buffer_id,
                    "task_name": task_name,
                    "max_staleness": settings.max_staleness_of(task_name),
                    "uniform_clock": 0.0,
                    "priority_clock": 0.0,
                    "random_counter": 0,
                    "num_available": 0,
                    "total_weight": 0.0,
                    "weight_error": 0.0,
                    "num_pending": 0,
                    "num_leased": 0,
                    "stored_groups": 0,
                    "stored_tokens": 0,
                    "stored_bytes": 0,
                    "num_inserted": 0,
                    "num_sampled": 0,
                }
                for task_name in missing
            ],
        )


def available(connection: Connection, buffer_id: int) -> dict[str, int]:
    """Groups of every task that can be drawn, or could be once upkeep has been done."""
    rows = connection.execute(statements.available(buffer_id))
    return {row.task_name: row.num_available + row.num_leased + row.num_pending for row in rows}


def all_buffers(connection: Connection) -> list[BufferInfo]:
    """Every buffer, by name."""
    rows = connection.execute(statements.all_buffers())
    return [
        BufferInfo(
            row.name,
            row.policy_version,
            BufferSettings.from_json(row.settings),
            row.created_at,
            row.num_groups,
        )
        for row in rows
    ]


def all_runs(connection: Connection) -> list[RunInfo]:
    """Every run, the oldest first."""
    rows = connection.execute(statements.all_runs())
    return [RunInfo(**row) for row in rows.mappings()]
