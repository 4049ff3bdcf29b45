"""Calls that change stored groups, the policy version and settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from sqlalchemy import ColumnElement

from replaydb.batch.stored import StoredGroup
from replaydb.buffer.drawing import check_intact
from replaydb.buffer.inspecting import Inspecting
from replaydb.buffer.requests import named
from replaydb.database.repository import buffers, groups, tags, transitions
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import buffer_locked
from replaydb.database.repository.policy import Advance, advance, apply_settings
from replaydb.database.repository.updates import Update, apply
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.database.statements.episode_group import select_scalars_by_id
from replaydb.database.tables.records import PUTTABLE
from replaydb.domain import checks
from replaydb.domain.episodes import GroupStatus
from replaydb.domain.results import RunInfo
from replaydb.domain.settings import BufferSettings, SettingsChanges, all_changes
from replaydb.errors import InvalidInputError


class Managing(Inspecting):
    """Delete, update and copy groups; advance the policy; change settings."""

    async def delete(
        self,
        ids: Iterable[int] | None = None,
        *,
        uids: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
    ) -> int:
        """Delete groups of any status, with their episodes. Give at least one condition.

        Recorded draws of the groups stay. Leased groups are deleted too: they get the outcome
        `lost`.

        Args:
            ids: Only groups with these ids. Ids that do not exist are ignored.
            uids: Only groups with these uids.
            tasks: Only groups of these tasks.
            statuses: Only groups with these statuses.
            where: Only groups that meet this condition over `replaydb.col`.

        Returns:
            Number of groups deleted.

        Raises:
            InvalidInputError: No condition was given, or an argument is invalid.
        """
        if all(given is None for given in (ids, uids, tasks, statuses, where)):
            raise InvalidInputError("delete", "ids, uids, tasks, statuses or where", "no condition")
        which = self._selection(tasks, statuses, where, ids, uids)

        def work(scope: Scope, session: Session) -> int:
            with buffer_locked(session, scope) as buffer:
                condition = tags.narrowed(session, buffer.row, which)
                return transitions.delete(buffer, condition, "deleted")

        return await self._write(work, end_in(BULK_SECONDS))

    async def update_priorities(self, ids: Iterable[int], priorities: Iterable[float]) -> int:
        """Set the sampling priorities of groups. The next draw uses them.

        Args:
            ids: Ids of the groups. Ids that do not exist are ignored. If an id occurs twice, its
                last priority counts.
            priorities: One finite number >= 0 per id.

        Returns:
            Number of groups updated.

        Raises:
            InvalidInputError: The lengths differ, a priority is NaN, infinite or negative, or its
                weight (`priority ** priority_exponent`) is neither 0 nor in [1e-150, 1e150].
                Nothing was changed.
        """
        wanted = checks.ids("ids", ids)
        given = checks.priorities("priorities", priorities, len(wanted))
        new = dict(zip(wanted, given, strict=True))
        if not new:
            return 0

        def work(scope: Scope, session: Session) -> int:
            read = select_scalars_by_id(self.id, sorted(new))
            with buffer_locked(session, scope, reads=[read]) as buffer:
                rows = session.run(read)
                archived = (row.id for row in rows if row.group_status == GroupStatus.ARCHIVED)
                buffer.kept |= dict.fromkeys(archived)
                return groups.update_priorities(buffer, rows, new)

        return await self._write(work)

    async def update(
        self,
        ids: Iterable[int] | None = None,
        *,
        uids: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        priority: float | Iterable[float] | None = None,
        tags: Mapping[str, Any] | None = None,
        status: GroupStatus | str | None = None,
        reason: str | None = None,
    ) -> int:
        """Change priority, tags or status of groups, all of them or none.

        You can set any status except `pending` and `leased`. Groups that leave the archive need
        capacity, as in a put. A group that becomes `completed` or `aborted` but is too stale
        becomes `expired`. A `pending` group whose status is set accepts no more episodes, and
        claims of its trajectories end.

        Args:
            ids: Ids of the groups. Ids that do not exist are ignored.
            uids: Uids of the groups, instead of `ids`.
            statuses: Only groups that have one of these statuses when the update runs. Others are
                left unchanged.
            priority: One priority for all groups, or one per group.
            tags: Tags to set, JSON values by name. Tags with other names stay.
            status: New status.
            reason: New `status_reason`. If `status` is given without `reason`, a group whose status
                changes loses its reason.

        Returns:
            Number of groups that exist and have one of `statuses`.

        Raises:
            GroupLeasedError: `status` was given and some groups are leased.
            PayloadGoneError: `status` was given and some groups have lost their payloads, so they
                must stay archived.
            BufferFullError: There is no capacity for the groups that leave the archive.
            InvalidInputError: An argument is invalid, or a group without episodes would become
                `completed`.
        """
        names = named(ids, uids)
        if names is None:
            raise InvalidInputError("ids", "ids or uids", "neither")
        if priority is None and tags is None and status is None and reason is None:
            raise InvalidInputError("update", "priority, tags, status or reason", "no change")
        change = Update(
            names,
            checks.some_of("statuses", statuses, GroupStatus),
            checks.optional(checks.priority_of_each, "priority", priority, len(names)),
            checks.json_object("tags", tags),
            checks.optional(checks.one_of, "status", status, sorted(PUTTABLE)),
            checks.optional(checks.string, "reason", reason),
        )

        def work(scope: Scope, session: Session) -> int:
            with buffer_locked(session, scope) as buffer:
                return apply(buffer, change)

        return await self._write(work, end_in(BULK_SECONDS))

    async def advance_policy(
        self, version: int, *, rewind: bool = False, take_over: bool = False
    ) -> int:
        """Set the policy version that is being trained.

        From then on, the staleness of every pending, completed, leased or aborted group is
        `version` minus its `comparable_version`. Groups that exceed the `max_staleness` of their
        task are no longer drawn. Rows are updated in short transactions until the call returns.
        Other calls can write between them. If the call is interrupted between two of these
        transactions, the new version is already in effect. Later puts and draws, or a repeated
        call, update the remaining rows.

        Versions are comparable only within a lineage. The first named run that advances a buffer
        sets the lineage of the buffer. Groups put by runs of other lineages have unknown staleness
        in this buffer.

        Args:
            version: New version, from 0 to 2**31 - 1. If it is the current version, the call
                has no effect.
            rewind: Whether to allow a lower version, for a trainer that resumed from an older
                checkpoint. Expired groups stay expired, and groups of later versions have negative
                staleness.
            take_over: Whether to switch the buffer to the lineage of this run. `version` may then
                be lower than the current version. If the buffer already follows this lineage, a
                lower version still needs `rewind`.

        Returns:
            Number of groups that expired.

        Raises:
            InvalidInputError: `version` is invalid, or lower than the current version without
                `rewind`, or the buffer follows another lineage and `take_over` is False. Nothing
                was changed.
        """
        number = checks.policy_version("version", version)
        rewind, take_over = checks.flag("rewind", rewind), checks.flag("take_over", take_over)

        def work(scope: Scope, session: Session) -> Advance:
            with buffer_locked(session, scope) as buffer:
                return advance(buffer, number, rewind=rewind, take_over=take_over)

        return await self._advance(work)

    async def update_settings(
        self, settings: BufferSettings | None = None, **changes: Unpack[SettingsChanges]
    ) -> None:
        """Change settings for all processes, and apply them to the stored groups.

        A smaller capacity takes effect at the next put.

        Args:
            settings: A complete set of settings. Default: settings not in `changes` keep their
                values.
            changes: Single fields of `BufferSettings`. They override `settings`.

        Raises:
            InvalidSettingsError: A setting is unknown or invalid. Nothing was changed.
        """
        wanted = all_changes(settings, changes)

        def work(scope: Scope, session: Session) -> tuple[bool, BufferRow]:
            with buffer_locked(session, scope) as buffer:
                apply_settings(buffer, wanted)
                return any(one.is_expiring for one in buffer.task_states.values()), buffer.row

        end = end_in(BULK_SECONDS)
        expiring, row = await self._write(work, end)
        self._set_row(row)
        if expiring:
            await self._catch_up(end, expiring=True)
        if "indexed_tags" in wanted:
            await self._index_tags()

    async def _index_tags(self) -> None:
        """Build and remove tag indexes as the settings require, in short transactions."""

        def work(scope: Scope, session: Session) -> BufferRow:
            with buffer_locked(session, scope) as buffer:
                tags.continue_indexing(buffer)
                return buffer.row

        while self._row.pending_tags:
            self._set_row(await self._write(work, announces=False))
            await self._database.let_others_in()

    async def copy_to(
        self,
        other: Any,
        *,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Copy groups to another buffer, of this or another store.

        The copies get new ids and keep their run, so they have a staleness if the other buffer
        follows the lineage of that run. Leases and draws are not copied. Leased, pending and
        archived groups are skipped, and so are groups whose uid is already in the other buffer. You
        can therefore repeat an interrupted copy. To copy a whole store, use `replaydb copy`.

        Args:
            other: The buffer to copy to.
            tasks: Only groups of these tasks.
            statuses: Only groups with these statuses.
            where: Only groups that meet this condition over `replaydb.col`.
            progress: Function that is called with the number of groups done and the total number.

        Returns:
            Number of the selected groups that are now in the other buffer.

        Raises:
            CorruptPayloadError: The stored bytes of some groups are damaged. Earlier groups were
                copied.
            InvalidInputError: An argument is invalid.
        """
        can_put = inspect.iscoroutinefunction(getattr(other, "_put_copies", None))
        if not can_put or inspect.isclass(other) or other is self:
            raise InvalidInputError("other", "a Buffer other than this one", repr(other))
        checks.optional(checks.function, "progress", progress)
        which = self._selection(tasks, statuses, where)

        def chosen(session: Session) -> Sequence[int]:
            condition = tags.narrowed(session, self._row, which)
            return groups.ids(session, condition & groups.COPYABLE)

        ids = await self._database.read(chosen)
        runs = await self._origins()
        done = 0
        for start in range(0, len(ids), COPY_PAGE):
            page = ids[start : start + COPY_PAGE]
            end = end_in(BULK_SECONDS)
            stored = await self._read(partial(groups.fetch, buffer_id=self.id, ids=page), end)
            decoded = await self._decoded(stored, end)
            check_intact(decoded.corrupt)
            by_run: dict[int | None, list[StoredGroup]] = {}
            for _, one in sorted(decoded.groups.items()):
                by_run.setdefault(one.run_id, []).append(one)
            for run_id, members in by_run.items():
                await other._put_copies(members, None if run_id is None else runs.get(run_id))
            done += len(decoded.groups)
            if progress is not None:
                progress(min(start + COPY_PAGE, len(ids)), len(ids))
        return done

    async def _origins(self) -> dict[int, RunInfo]:
        """Return runs by id as another store should record them.

        A run without a lineage gets the lineage that this buffer follows.
        """
        row, runs = await self._database.read(
            lambda session: (
                buffers.state(session, self.id, self.name),
                buffers.all_runs(session),
            )
        )
        return {
            one.id: replace(one, lineage=one.lineage or row.policy_lineage or one.name)
            for one in runs
        }


#: Groups that `copy_to` holds in memory at once.
COPY_PAGE = 32
