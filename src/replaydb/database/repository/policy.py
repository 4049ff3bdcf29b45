"""The policy clock of a buffer, and what follows from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from replaydb.database.prepared import execute
from replaydb.database.repository import groups, tags, transitions
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.statements.buffer import update_buffer
from replaydb.database.statements.episode_group import (
    refresh_staleness,
    relate_versions,
    select_scalars,
)
from replaydb.database.statements.selections import TOO_STALE, selection, staleness_at, too_stale
from replaydb.errors import InvalidInputError, InvalidSettingsError


def advance(buffer: LockedBuffer, version: int, *, rewind: bool, take_over: bool) -> int:
    """Move the policy version, and the staleness of every live group with it.

    Returns:
        How many groups expired.
    """
    row, run = buffer.row, buffer.scope.run
    if not (buffer.compares or take_over):
        raise InvalidInputError(
            "run",
            f"a run of lineage {row.policy_lineage!r}, whose policy this buffer follows "
            "(or take_over=True)",
            f"one of lineage {run.lineage!r}",
        )
    if version < row.policy_version and buffer.compares and not rewind:
        raise InvalidInputError(
            "version",
            f"at least the buffer's policy version {row.policy_version} (or rewind=True)",
            version,
        )
    lineage = run.lineage or row.policy_lineage
    values = {"policy_version": version, "policy_lineage": lineage}
    execute(buffer.connection, update_buffer(buffer.id, values))
    if lineage is not None and lineage != row.policy_lineage:
        for statement in relate_versions(buffer.id, lineage):
            execute(buffer.connection, statement)
    buffer.row = replace(row, policy_version=version, policy_lineage=lineage)
    expired = _expire(buffer, version)
    execute(buffer.connection, refresh_staleness(buffer.id, buffer.accounts, version))
    return expired


def apply_settings(buffer: LockedBuffer, changes: Mapping[str, Any]) -> BufferRow:
    """Store changed settings, and bring the buffer's groups in line with them.

    Returns:
        The buffer as it is now.

    Raises:
        InvalidSettingsError: Unknown or impossible.
    """
    before = buffer.settings
    settings = before.updated(changes)
    if settings == before:
        return buffer.row
    buffer.row = replace(buffer.row, settings=settings)
    values: dict[str, object] = {"settings": settings.to_json()}
    if settings.rate_limit != before.rate_limit:
        values |= {"limited_inserts": 0, "limited_samples": 0}
    execute(buffer.connection, update_buffer(buffer.id, values))
    for account in buffer.accounts.values():
        account.max_staleness = settings.max_staleness_of(account.task_name)
        if settings.seed != before.seed:
            account.random_counter = 0
    tags.plan(buffer, before.indexed_tags)
    _expire(buffer, buffer.row.policy_version)
    if settings.priority_exponent != before.priority_exponent:
        _reweigh(buffer)
    return buffer.row


def _expire(buffer: LockedBuffer, version: int) -> int:
    expired = 0
    for account in buffer.accounts.values():
        if account.max_staleness is not None:
            condition = too_stale(
                buffer.id,
                account.task_name,
                version,
                account.max_staleness,
                buffer.settings.expire_by,
            )
            values = {
                "status_reason": TOO_STALE,
                "staleness": staleness_at(version),
            }
            expired += transitions.expire(buffer, condition, values)
    return expired


def _reweigh(buffer: LockedBuffer) -> None:
    """Every group keeps its priority, under another exponent.

    Raises:
        InvalidSettingsError: One of them would have a weight that cannot be drawn by.
    """
    condition = selection(buffer.id)
    rows = execute(buffer.connection, select_scalars(condition))
    priorities = {row.id: row.priority for row in rows}
    try:
        groups.update_priorities(buffer, rows, priorities)
    except InvalidInputError as error:
        raise InvalidSettingsError(f"of a group that is stored, {error}") from None
