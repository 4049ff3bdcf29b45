"""Lineage: recorded draws and their outcomes, cursors, and statistics of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection

from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.prepared import execute, inserted_id
from replaydb.database.runtime.writes import Write, postpone, send_writes
from replaydb.database.statements.buffer import insert_cursor, select_cursor, update_cursor
from replaydb.database.statements.draw import (
    insert_draw,
    insert_draw_groups,
    insert_known_draw,
    mark_drawn_lost,
    select_drawn_groups,
    select_draws,
    select_steps,
    settle_groups,
)
from replaydb.database.statements.statistics import select_prompts
from replaydb.database.tables.column_types import Damaged
from replaydb.domain.results import DrawInfo, DrawOutcome, PromptInfo
from replaydb.errors import CorruptPayloadError

_OUTCOMES = frozenset(DrawOutcome)


def record(
    buffer: LockedBuffer, facts: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> int:
    """Record the draw of a transaction. Return its id.

    Args:
        buffer: The buffer.
        facts: Columns of `draw`.
        groups: Columns of `draw_group`, in the order of the batch.
    """
    draw_id, writes = buffer.found.draw_id, []
    if draw_id is None:
        draw_id = inserted_id(buffer.connection, insert_draw(), dict(facts))
    else:
        writes = [Write(insert_known_draw(), [{"id": draw_id, **facts}])]
    rows = [
        {"draw_id": draw_id, "position": position, **group} for position, group in enumerate(groups)
    ]
    writes.append(Write(insert_draw_groups(), rows))
    postpone(buffer.connection, *writes)
    return draw_id


def settle(
    buffer: LockedBuffer, ids: Sequence[int], outcome: DrawOutcome, reason: str | None
) -> None:
    """Record the outcome of groups whose lease ends."""
    if ids:
        postpone(buffer.connection, settle_groups(ids, outcome.value, reason, buffer.now))


def record_lost(buffer: LockedBuffer, draw_id: int, damaged: Mapping[int, str]) -> None:
    """Record that groups of a draw could not be read, with the reason by group id."""
    for reason in sorted(set(damaged.values())):
        ids = [group_id for group_id, why in damaged.items() if why == reason]
        execute(buffer.connection, mark_drawn_lost(draw_id, ids, reason, buffer.now))


def draws(connection: Connection, buffer_id: int, **which: Any) -> list[DrawInfo]:
    """Return draws of a buffer, newest first. `which` has the arguments of `select_draws`."""
    found = execute(connection, select_draws(buffer_id, **which))
    members: dict[int, list[Any]] = {row.id: [] for row in found}
    for row in execute(connection, select_drawn_groups(list(members))):
        members[row.draw_id].append(row)
    return [
        DrawInfo(
            row.id,
            row.run_name,
            row.step,
            row.policy,
            row.created_at,
            tuple(member.group_id for member in members[row.id]),
            tuple(member.probability for member in members[row.id]),
            tuple(member.weight for member in members[row.id]),
            tuple(member.staleness for member in members[row.id]),
            tuple(_outcome(member) for member in members[row.id]),
            tuple(member.outcome_reason for member in members[row.id]),
            tuple(
                row.created_at if member.outcome == DrawOutcome.SAMPLED else member.outcome_at
                for member in members[row.id]
            ),
            tuple(member.times_replaced for member in members[row.id]),
            tuple(member.task_name for member in members[row.id]),
            tuple(member.prompt_uid for member in members[row.id]),
            tuple(member.reward_mean for member in members[row.id]),
            tuple(member.group_run_name for member in members[row.id]),
            tuple(member.min_policy_version for member in members[row.id]),
        )
        for row in found
    ]


def _outcome(member: Any) -> DrawOutcome | None:
    if member.outcome is not None and member.outcome not in _OUTCOMES:
        raise CorruptPayloadError(
            f"draw {member.draw_id}: outcome can not be read: {Damaged(member.outcome)}",
            [member.group_id],
        )
    return member.outcome and DrawOutcome(member.outcome)


def steps(connection: Connection, buffer_id: int, **which: Any) -> list[int]:
    """Return the steps of draws of a buffer, ascending. `which`: arguments of `select_steps`."""
    found = execute(connection, select_steps(buffer_id, **which))
    return sorted(row.step for row in found)


def find_draw(connection: Connection, buffer_id: int, draw_id: int) -> DrawInfo | None:
    """Return one draw of a buffer; None if it is not recorded."""
    found = draws(
        connection,
        buffer_id,
        draw_id=draw_id,
        step=None,
        runs=None,
        group_id=None,
        before=None,
        limit=1,
    )
    return found[0] if found else None


def cursor(connection: Connection, buffer_id: int, name: str) -> Any:
    """Return the value of a cursor; None if it does not exist."""
    rows = execute(connection, select_cursor(buffer_id, name))
    return rows[0].value if rows else None


def set_cursors(buffer: LockedBuffer, cursors: Mapping[str, Any]) -> None:
    """Write cursors. If two transactions create the same cursor, one of them is retried."""
    for name, value in sorted(cursors.items()):  # in a fixed order, to avoid deadlocks
        changed = send_writes(buffer.connection, update_cursor(buffer.id, name, value, buffer.now))
        if changed == 0:
            row = {"buffer_id": buffer.id, "name": name, "value": value, "updated_at": buffer.now}
            postpone(buffer.connection, Write(insert_cursor(), [row]))


def prompts(connection: Connection, condition: ColumnElement[bool]) -> list[PromptInfo]:
    """Return the statistics of every prompt of the groups that meet a condition."""
    rows = execute(connection, select_prompts(condition))
    return [PromptInfo(**row._asdict()) for row in rows]
