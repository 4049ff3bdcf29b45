"""Changing what is stored: groups, the policy version, settings."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from sqlalchemy import ColumnElement, Connection

from replaydb import checks
from replaydb.batch.stored import StoredGroup
from replaydb.buffer.drawing import reasons
from replaydb.buffer.inspecting import Inspecting
from replaydb.buffer.requests import named
from replaydb.database.records import PUTTABLE
from replaydb.database.repository import aging, buffers, groups, tags, tasks, transitions
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.locked import Scope
from replaydb.database.repository.locking import buffer_locked
from replaydb.database.repository.policy import advance, apply_settings
from replaydb.database.repository.updates import Update, apply
from replaydb.database.transactions import BULK_SECONDS, end_in
from replaydb.episodes import GroupStatus
from replaydb.errors import CorruptPayloadError, InvalidInputError
from replaydb.results import RunInfo
from replaydb.settings import BufferSettings, SettingsChanges, all_changes


class Managing(Inspecting):
    """Deletion, priorities, the policy version, settings."""

    async def delete(
        self,
        ids: Iterable[int] | None = None,
        *,
        uids: str | Iterable[str] | None = None,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
    ) -> int:
        """Delete groups, of any status, with everything that belongs to them.

        Args:
            ids: Only these groups; those that are gone are passed over.
            uids: Only groups of these uids.
            tasks: Only groups of these tasks.
            statuses: Only groups of these statuses.
            where: Only groups that meet this expression over `replaydb.col`.

        Returns:
            How many.

        Raises:
            InvalidInputError: No condition at all was given.
        """
        if all(given is None for given in (ids, uids, tasks, statuses, where)):
            raise InvalidInputError("delete", "ids, uids, tasks, statuses or where", "none of them")
        which = self._selection(tasks, statuses, where, ids, uids)

        def work(connection: Connection, scope: Scope) -> int:
            with buffer_locked(connection, scope) as buffer:
                condition = tags.narrowed(connection, buffer.row, which)
                return transitions.delete(buffer, condition, "deleted")

        deleted = await self._write(work, end_in(BULK_SECONDS))
        self._database.signal.announce()
        return deleted

    async def update_priorities(self, ids: Iterable[int], priorities: Iterable[float]) -> int:
        """Give groups new priorities, which count from the next draw on.

        Args:
            ids: Groups; those that are gone are passed over. Of one named twice, the last counts.
            priorities: As many finite numbers >= 0.

        Returns:
            How many groups were changed.

        Raises:
            InvalidInputError: Not as many, or NaN, infinite or negative, or a weight (priority to
                the power of `priority_exponent`) that is neither 0 nor in [1e-150, 1e150]; nothing
                was changed.
        """
        wanted = checks.ids("ids", ids)
        given = checks.priorities("priorities", priorities, len(wanted))
        new = dict(zip(wanted, given, strict=True))
        if not new:
            return 0

        def work(connection: Connection, scope: Scope) -> int:
            with buffer_locked(connection, scope) as buffer:
                rows = groups.scalars(connection, self.id, sorted(new))
                return groups.update_priorities(buffer, rows, new)

        changed = await self._write(work)
        self._database.signal.announce()
        return changed

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
        """Change groups by hand, all of them or none.

        A group gets any status but `pending` and `leased`. What comes back from the archive needs
        room, as a put does; what is made `completed` or `aborted` and is too stale becomes
        `expired`; a `pending` group takes no more episodes, claimed or not.

        Args:
            ids: Ids of the groups; those that are gone are passed over.
            uids: Uids of the groups, instead of `ids`.
            statuses: Only groups of these statuses; those that have come to another are passed
                over.
            priority: One priority for all of them, or one for each.
            tags: Written over the tags of the same names; the others stay.
            status: The status that they get.
            reason: Becomes their `status_reason`. A group that gets another status without a
                reason has none.

        Returns:
            How many of the groups are in the buffer, and of these statuses.

        Raises:
            GroupLeasedError: Some are held, and so keep their status.
            PayloadGoneError: Some have lost their payloads, and so stay archived.
            BufferFullError: There is no room for what comes back from the archive.
            InvalidInputError: An argument is wrong; or a group without episodes was to be
                completed.
        """
        names = named(ids, uids)
        if names is None:
            raise InvalidInputError("ids", "ids or uids", "neither")
        if priority is None and tags is None and status is None and reason is None:
            raise InvalidInputError("update", "priority, tags, status or reason", "none of them")
        change = Update(
            names,
            checks.some_of("statuses", statuses, GroupStatus),
            checks.optional(checks.priority_of_each, "priority", priority, len(names)),
            checks.json_object("tags", tags),
            checks.optional(checks.one_of, "status", status, sorted(PUTTABLE)),
            checks.optional(checks.string, "reason", reason),
        )

        def work(connection: Connection, scope: Scope) -> int:
            with buffer_locked(connection, scope) as buffer:
                return apply(buffer, change)

        changed = await self._write(work, end_in(BULK_SECONDS))
        self._database.signal.announce()
        return changed

    async def advance_policy(
        self, version: int, *, rewind: bool = False, take_over: bool = False
    ) -> int:
        """Tell the buffer which policy version is being trained now.

        From one moment on the staleness of every live group is `version` minus its
        `comparable_version`, and groups staler than their task allows are not drawn any more. Rows
        follow in short transactions, between which others write, until the call returns. If it is
        broken off in between, the policy has moved: to call it again, or whoever puts or draws,
        does the rest.

        Versions compare only within a lineage. The first named run to advance a buffer gives it
        its own; versions of groups put by runs of another lineage do not compare there.

        Args:
            version: The new version, from 0 to 2**31 - 1; the same again changes nothing.
            rewind: Allow a lower version, for a trainer that resumed from an older checkpoint.
                What was expired stays expired; groups of later versions have negative staleness.
            take_over: Let the buffer follow this run's lineage from now on, at any version. Where
                it does already, a lower one needs `rewind`.

        Returns:
            How many groups expired.

        Raises:
            InvalidInputError: It is no such version; or lower than the buffer's, without
                `rewind`; or the buffer follows another lineage, without `take_over`. Nothing was
                changed.
        """
        number = checks.whole_number("version", version, most=checks.INT32[1])
        rewind, take_over = checks.flag("rewind", rewind), checks.flag("take_over", take_over)

        def work(connection: Connection, scope: Scope) -> tuple[int, int, bool, BufferRow]:
            with buffer_locked(connection, scope) as buffer:
                before = advance(buffer, number, rewind=rewind, take_over=take_over)
                after, behind = aging.progress(buffer.accounts.values())
                return before, after, behind, buffer.row

        end = end_in(BULK_SECONDS)
        before, after, behind, row = await self._write(work, end)
        self._saw(row)
        self._database.signal.announce()
        if behind:
            await self._follow_policy(end)
            after, _ = await self._database.read(
                lambda connection: aging.progress(tasks.read(connection, self.id).values()), end=end
            )
        return after - before

    async def update_settings(
        self, settings: BufferSettings | None = None, **changes: Unpack[SettingsChanges]
    ) -> None:
        """Change settings, for every process; what is stored is brought in line at once.

        A smaller capacity evicts at the next put.

        Args:
            settings: All settings; by default they stay as they are.
            changes: Single fields of `BufferSettings`; the others stay as they are.

        Raises:
            InvalidSettingsError: Unknown or impossible; nothing was changed.
        """
        wanted = all_changes(settings, changes)

        def work(connection: Connection, scope: Scope) -> tuple[bool, BufferRow]:
            with buffer_locked(connection, scope) as buffer:
                apply_settings(buffer, wanted)
                return any(one.is_expiring for one in buffer.accounts.values()), buffer.row

        end = end_in(BULK_SECONDS)
        expiring, row = await self._write(work, end)
        self._saw(row)
        self._database.signal.announce()
        if expiring:
            await self._expire(end)
        if "indexed_tags" in wanted:
            await self._index_tags()

    async def _index_tags(self) -> None:
        """Fill, and empty, indexes of tags as the settings say, with others writing in between."""

        def work(connection: Connection, scope: Scope) -> BufferRow:
            with buffer_locked(connection, scope) as buffer:
                tags.go_on(buffer)
                return buffer.row

        while self._row.pending_tags:
            self._saw(await self._write(work))
            await asyncio.sleep(self._database.backend.turn_seconds)  # to others who wait

    async def copy_to(
        self,
        other: Any,
        *,
        tasks: str | Iterable[str] | None = None,
        statuses: str | Iterable[str] | None = None,
        where: ColumnElement[bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Share groups with another buffer, of this or another store.

        They are put there anew, as groups of the run that has put them here: with new ids, and
        without leases and draws. Their versions compare, and so have a staleness, where the other
        buffer follows the lineage of that run, at once or from when it does. What it has already
        is passed over, so a copy that was broken off goes on where it was. Groups that are leased,
        still arriving or archived are not copied. `replaydb copy` moves a whole store.

        Args:
            other: The other buffer.
            tasks: Only groups of these tasks.
            statuses: Only groups of these statuses.
            where: Only groups that meet this expression over `replaydb.col`.
            progress: Called with how many groups are done, and how many there are.

        Returns:
            How many groups the other buffer has of those now.
        """
        can_put = inspect.iscoroutinefunction(getattr(other, "_put_copies", None))
        if not can_put or inspect.isclass(other) or other is self:
            raise InvalidInputError("other", "another Buffer", repr(other))
        checks.optional(checks.function, "progress", progress)
        which = self._selection(tasks, statuses, where)

        def chosen(connection: Connection) -> Sequence[int]:
            condition = tags.narrowed(connection, self._row, which)
            return groups.ids(connection, condition & groups.COPYABLE)

        ids = await self._database.read(chosen)
        runs = await self._origins()
        done = 0
        for start in range(0, len(ids), COPY_PAGE):
            page = ids[start : start + COPY_PAGE]
            decoded = await self._fetch(page)
            if decoded.corrupt:
                raise CorruptPayloadError(reasons(decoded.corrupt), sorted(decoded.corrupt))
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
        """Runs by id, as another store is to know them: one without a name goes along here."""
        row, runs = await self._database.read(
            lambda connection: (
                buffers.state(connection, self.id, self.name),
                buffers.all_runs(connection),
            )
        )
        return {
            one.id: replace(one, lineage=one.lineage or row.policy_lineage or one.name)
            for one in runs
        }


#: Groups that `copy_to` holds in memory at once.
COPY_PAGE = 32
