"""Advances of the policy version, and changes of settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Update, cast, null, update

from replaydb.database.repository import aging, buffers, groups, tags
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.prepared import Write
from replaydb.database.statements.episode_group import select_scalars
from replaydb.database.statements.insertion import insert_into
from replaydb.database.statements.selections import comparable_runs, selection
from replaydb.database.tables.schema import episode_group, group, policy_change
from replaydb.database.tables.staleness import staleness_at
from replaydb.errors import InvalidInputError, InvalidSettingsError

#: Groups updated in the transaction that advances the policy version.
AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Advance:
    """What an advance of the policy has done in its first transaction.

    Attributes:
        row: The row of the buffer.
        before: The number of groups that had ever expired before it.
        after: The number of groups that have ever expired since.
        is_behind: Whether the rows of some groups are still to be updated.
    """

    row: BufferRow
    before: int
    after: int
    is_behind: bool


def advance(
    buffer: LockedBuffer, version: int, *, rewind: bool = False, take_over: bool = False
) -> Advance:
    """Set the policy version. The rows of live groups are updated in steps: see `aging`.

    Raises:
        InvalidInputError: The buffer follows another lineage, or the version is lower than the
            buffer's, and the argument that permits it was not given.
    """
    row, run = buffer.row, buffer.scope.run
    if not (buffer.is_comparable or take_over):
        raise InvalidInputError(
            "run",
            f"a run of lineage {row.policy_lineage!r}, which this buffer follows "
            "(or take_over=True)",
            f"a run of lineage {run.lineage!r}",
        )
    if version < row.policy_version and buffer.is_comparable and not rewind:
        raise InvalidInputError(
            "version",
            f"at least the buffer's policy version {row.policy_version} (or rewind=True)",
            version,
        )
    lineage = run.lineage or row.policy_lineage
    before, is_behind = aging.progress(buffer.task_states.values())
    if (version, lineage) == (row.policy_version, row.policy_lineage):
        return Advance(row, before, before, is_behind)
    if lineage is not None and lineage != row.policy_lineage:
        for statement in relate_versions(buffer.id, lineage, version):
            buffer.session.run(statement)
    buffer.row = replace(row, policy_version=version, policy_lineage=lineage)
    aging.mark(buffer, buffer.task_states)
    aging.step(buffer, AT_ONCE)
    # After the reads of this step, so that these rows are written together with those of groups.
    # The step takes the new version from `buffer.row`, not from the table.
    values = {"policy_version": version, "policy_lineage": lineage}
    buffers.save(buffer.session, buffer.id, values)
    change: dict[str, object] = {
        "buffer_id": buffer.id,
        "run_id": run.id,
        "policy_version": version,
        "lineage": lineage,
        "began_at": buffer.now,
    }
    buffer.session.postpone(Write(insert_into(policy_change), [change]))
    after, is_behind = aging.progress(buffer.task_states.values())
    return Advance(buffer.row, before, after, is_behind)


def apply_settings(buffer: LockedBuffer, changes: Mapping[str, Any]) -> BufferRow:
    """Store changed settings and update the groups accordingly.

    Returns:
        The current row of the buffer.

    Raises:
        InvalidSettingsError: A setting is unknown or invalid.
    """
    before = buffer.settings
    settings = before.updated(changes)
    if settings == before:
        return buffer.row
    buffer.row = replace(buffer.row, settings=settings)
    values: dict[str, object] = {"settings": settings}
    if settings.rate_limit != before.rate_limit:
        values |= {"limited_inserts": 0, "limited_samples": 0}
    buffers.save(buffer.session, buffer.id, values)
    for task in buffer.task_states.values():
        task.max_staleness = settings.max_staleness_of(task.task_name)
        if settings.seed != before.seed:
            task.random_counter = 0
    tags.plan(buffer, before.indexed_tags)
    if (settings.max_staleness, settings.expire_by) != (before.max_staleness, before.expire_by):
        for task in buffer.task_states.values():
            task.is_expiring = task.max_staleness is not None
        aging.step(buffer, AT_ONCE)
    if settings.priority_exponent != before.priority_exponent:
        _recompute_weights(buffer)
    return buffer.row


def _recompute_weights(buffer: LockedBuffer) -> None:
    """Recompute the weights of all groups from their priorities, after a change of the exponent.

    Raises:
        InvalidSettingsError: A weight would be out of range.
    """
    condition = selection(buffer.id)
    rows = buffer.session.run(select_scalars(condition))
    priorities = {row.id: row.priority for row in rows}
    try:
        groups.update_priorities(buffer, rows, priorities)
    except InvalidInputError as error:
        raise InvalidSettingsError(f"the priority of a stored group is invalid: {error}") from None


def relate_versions(buffer_id: int, lineage: str, policy_version: int) -> tuple[Update, ...]:
    """Set which groups have a comparable version when a buffer begins to follow a lineage.

    Versions of the groups themselves do not change, nor does the staleness of groups that no
    longer age.
    """
    comparable = comparable_runs(lineage)
    mine = update(episode_group).where(group.buffer_id == buffer_id)
    changed = group.comparable_version.is_distinct_from(group.min_policy_version)
    known = group.comparable_version.is_not(None)

    def related(version: ColumnElement[int]) -> dict[Any, Any]:
        return {
            group.comparable_version: version,
            group.staleness: staleness_at(policy_version, version),
        }

    return (
        mine.where(group.run_id.in_(comparable), changed).values(related(group.min_policy_version)),
        mine.where(group.run_id.not_in(comparable), known).values(
            related(cast(null(), BigInteger()))
        ),
    )
