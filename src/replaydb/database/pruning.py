"""Pruning: find and remove unreferenced data in a payload store.

An object that no table lists is an orphan: the put that wrote it never committed. Only old objects
are treated as orphans, because a put may be about to commit a new one, and only if the marker of
the store is present. Packs that are mostly dead are compacted: their live parts are copied into new
packs.

Every step is atomic. An interrupted run loses nothing, and the next run completes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from replaydb.database.repository import packs
from replaydb.database.runtime import revisions
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import Database
from replaydb.domain.results import PruneReport
from replaydb.packs import Listed, PackDamage, PayloadStore, Range
from replaydb.util.cancellation import run_to_completion
from replaydb.util.chunks import chunks

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Bytes that a compaction copies at once, in one transaction; a single part may be larger.
COPY_BYTES = 32 << 20

_PAGE: Final = 500
#: A limit above the number of packs: all are read at once.
_ALL: Final = 10_000_000


@dataclass
class Pruning:
    """One run of pruning.

    Attributes:
        database: The database.
        payload_store: The payload store.
        end: Deadline of the run.
        report: The findings so far, and whether anything is removed.
        min_age: Minimum age of orphans, in seconds.
        progress: Called with the findings so far.
    """

    database: Database
    payload_store: PayloadStore
    end: float
    report: PruneReport
    min_age: float = 0.0
    progress: Callable[[PruneReport], object] | None = None

    async def run(self) -> PruneReport:
        """Find unreferenced data, and remove it unless this is a dry run.

        Raises:
            PayloadsUnavailableError: The payload store cannot be reached, or belongs to another
                store.
            PayloadsReadOnlyError: Another instance of the database owns the packs.
        """
        if self.report.dry_run:
            marker = await self.payload_store.check(self.end)
            instance = await self._read(self.database.backend.administration.instance)
            if (refused := self.payload_store.refusal(marker, instance)) is not None:
                self.report = replace(self.report, refused=str(refused))
        now = await self._read(lambda session: session.now())
        total = await self._read(lambda session: packs.removable_total(session, now))
        self._found(num_marked=total.packs, marked_bytes=total.bytes)
        if not self.report.dry_run:
            await self.remove_marked()
        await self._mark_unmarked(now)
        page: list[Listed] = []
        async for each in self.payload_store.listed(end=self.end):
            page.append(each)
            if len(page) == _PAGE:
                await self._prune_orphans(page, now)
                page.clear()
        await self._prune_orphans(page, now)
        await self.compact()
        return self.report

    async def remove_marked(self) -> None:
        """Remove the packs that were marked for deletion longer ago than the grace period.

        Raises:
            PayloadsReadOnlyError: Another instance of the database owns the packs.
        """

        def find(session: Session) -> Sequence[int]:
            return packs.removable(session, session.now(), _PAGE)

        def begin_removal(session: Session) -> Mapping[int, str]:
            return packs.begin_removal(session, ids, session.now())

        # Even if nothing can be removed: a standby that was promoted becomes the owner here.
        await self.payload_store.claim(self.end)
        while ids := await self._read(find):
            removing = await self._write(begin_removal)
            if not removing:
                break
            await self.payload_store.remove(removing.values(), end=self.end)
            await self._write(partial(packs.delete_rows, ids=removing.keys()))

    async def _mark_unmarked(self, now: datetime) -> None:
        """Count and mark the packs without live parts that were never marked for deletion."""
        total = await self._read(packs.unmarked_total)
        self._found(num_unmarked=total.packs, unmarked_bytes=total.bytes)
        if total.packs and not self.report.dry_run:
            await self._write(partial(packs.mark_unmarked, now=now))

    async def _prune_orphans(self, page: Sequence[Listed], now: datetime) -> None:
        """Count and remove the orphans among listed objects."""
        names = [each.name for each in page]
        known = await self._read(lambda session: packs.known(session, names))
        orphans = {
            each.name: each.num_bytes
            for each in page
            if each.name not in known and now - each.modified >= timedelta(seconds=self.min_age)
        }

        if orphans and not self.report.dry_run:
            claim = partial(packs.claim_orphans, names=orphans.keys(), now=now)
            claimed = await self._write(claim)
            await self.payload_store.remove(claimed.values(), end=self.end)
        self._found(
            num_packs=len(page),
            num_bytes=sum(each.num_bytes for each in page),
            num_orphans=len(orphans),
            orphan_bytes=sum(orphans.values()),
        )

    async def compact(self, skip: set[int] | None = None) -> None:
        """Copy the live parts of mostly dead packs into new packs.

        Args:
            skip: Ids of packs that were found to be damaged. They are not read again, and those
                that are found now are added.
        """
        known = set() if skip is None else skip
        for pack in await self._read(lambda session: packs.mostly_dead(session, _ALL)):
            if pack.id in known:
                continue
            if self.report.dry_run:
                freed = pack.num_bytes - pack.live_bytes
                self._found(num_compacted=1, compacted_bytes=freed)
            elif not await self._compact_one(pack.id, pack.name, pack.num_bytes):
                known.add(pack.id)

    async def _compact_one(self, pack_id: int, name: str, num_bytes: int) -> bool:
        """Copy the live parts of a pack. Returns False if one is damaged."""
        members = await self._read(lambda session: packs.members(session, pack_id))
        copied = 0
        for several in chunks(members, lambda one: one.pack_length, COPY_BYTES):
            ranges = [
                Range(name, one.pack_offset, one.pack_length, one.checksum) for one in several
            ]
            parts: list[memoryview] = []
            for part in await self.payload_store.read(ranges, end=self.end):
                if isinstance(part, PackDamage):
                    logger.warning("pack %s is damaged and is not compacted", name)
                    self._found(num_damaged=1)
                    return False
                parts.append(part)
            # If the caller is cancelled between the two steps, the new pack would be an orphan.
            copied += await run_to_completion(self._copy(pack_id, several, parts))
        if copied:
            self._found(num_compacted=1, compacted_bytes=num_bytes - copied)
        return True

    async def _copy(self, pack_id: int, members: Sequence[Any], parts: Sequence[memoryview]) -> int:
        """Write parts to a new pack, and let their rows refer to it. Returns its size, or 0."""
        new = self.payload_store.new_name()
        # Flushed whatever the durability of puts: the old pack is on the disk, and will be removed.
        offsets = await self.payload_store.write(new, parts, sync=True, end=self.end)
        size = offsets[-1] + len(parts[-1])
        moves = dict(zip((one.pack_offset for one in members), offsets, strict=True))

        def repoint(session: Session) -> int:
            now = session.now()
            return packs.repoint(session, pack_id, new, size, moves, now)

        return size if await self._write(repoint) else 0

    async def _read(self, work: Callable[[Session], T]) -> T:
        return await self.database.read(work, end=self.end)

    async def _write(self, work: Callable[[Session], T]) -> T:
        """Run a step, unless a newer replaydb may refer to packs in ways unknown to this one."""

        def checked(session: Session) -> T:
            revisions.check_still_usable(session)
            return work(session)

        return await self.database.write(checked, end=self.end)

    def _found(self, **more: int) -> None:
        """Add to the findings, and report them to `progress`."""
        counted = {name: getattr(self.report, name) + count for name, count in more.items()}
        self.report = replace(self.report, **counted)
        if self.progress is not None:
            self.progress(self.report)
