"""Resumable copy of a whole store to another database, engine or payload location.

A pass reads a snapshot of the source and compares it with the target, table by table in the order
of foreign keys, and writes the differences to the target. Rows that already match are kept, so an
interrupted copy resumes. Passes repeat until one is short, because few rows have changed since the
one before. Users of the source are not blocked. The target cannot be opened until the copy is
complete and verified.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import URL

from replaydb.database import copying, migrations
from replaydb.database.engines import backend_for
from replaydb.database.payloads import Payloads
from replaydb.database.repository import packs, payload_location, row_differences, sequences
from replaydb.database.repository.row_differences import Difference, Values
from replaydb.database.runtime.protocol import Backend
from replaydb.database.runtime.session import Session, Work
from replaydb.database.runtime.transactions import (
    BULK_SECONDS,
    PATIENCE_SECONDS,
    Database,
    Snapshot,
    allowance,
    end_in,
)
from replaydb.database.statements.insertion import insert_into
from replaydb.database.statements.table_ranges import Family, families
from replaydb.database.tables.records import PayloadRecord
from replaydb.database.tables.schema import episode_group, payload
from replaydb.domain import checks
from replaydb.errors import CorruptPayloadError, DatabaseError
from replaydb.operations.reading import Part, Read, batches, every_payload, fetch

#: Rows of a table with ids that are compared at once, with their child rows.
PAGE: Final = 200
#: Time limit of a pass, in seconds.
PASS_SECONDS: Final = 7 * 86_400.0
#: Passes repeat until one takes less than this many seconds, or is not much shorter than the last.
SHORT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Progress or result of `copy`.

    Attributes:
        num_passes: Number of passes over both databases, including the current one.
        num_groups: Groups in the source when the last pass began.
        num_seen: Groups of these that the last pass has compared.
        num_rows: Rows inserted, updated or deleted in the target.
        num_payloads: Parts of payloads written to the target.
        num_bytes: Bytes of these parts.
        num_checked: Payloads of the target read back and compared with their checksums.
        is_finished: Whether the copy is complete, so that the target can be opened.
    """

    num_passes: int = 0
    num_groups: int = 0
    num_seen: int = 0
    num_rows: int = 0
    num_payloads: int = 0
    num_bytes: int = 0
    num_checked: int = 0
    is_finished: bool = False


async def copy(
    source: str | URL,
    target: str | URL,
    *,
    payloads: str | None = None,
    finish: bool = True,
    progress: Callable[[CopyReport], object] | None = None,
) -> CopyReport:
    """Copy a whole store: every row of every buffer, with ids, times, counters and random state.

    The source may be in use and is only read, from snapshots. The finished target equals the last
    snapshot. To resume an interrupted copy, make the same call again. The target cannot be opened
    until the copy is complete: all rows compared once more, all payloads of the target read back.

    Args:
        source: URL of the store to copy. Its tables must be of this version.
        target: URL of a new SQLite file, a database without tables or with empty ones, or the
            target of an unfinished copy.
        payloads: Payload location of the target, as in `Store.open`. None (default) stores
            payloads in the target database, wherever the source has them.
        finish: Whether to complete the copy, so that the target can be opened. With False, the
            target is brought up to date with the source, and a later call has little left to copy.
        progress: Called repeatedly with the report so far.

    Returns:
        Counts of the whole call.

    Raises:
        InvalidInputError: The target is not empty and not an unfinished copy, or `payloads`
            differs from the payload location of the earlier call.
        CorruptPayloadError: The source has damaged payloads; the error names their groups. All
            other data was copied, and the copy is not finished. Or payloads of the target were
            read back damaged; copy again to rewrite them.
        SchemaError: The tables of the source or target are not of this version. Or another copy
            into the target began during this call; only that one continues.
        PayloadsUnavailableError: A payload store cannot be reached or used.
        DatabaseError: A database cannot be read or written, or the user may not read the sequences
            of the source.
    """
    payloads = checks.optional(checks.string, "payloads", payloads)
    finish = checks.flag("finish", finish)
    progress = checks.optional(checks.function, "progress", progress)
    origin, destination = backend_for(source, read_only=True), backend_for(target)
    await migrations.prepare(origin, migrate=False, knows_all="they cannot be copied")
    await destination.schema.check_target()
    async with _opened(origin) as ours:
        # Before anything is written: a copy needs the right to read sequences.
        await ours.database.read(lambda session: sequences.positions(origin, session))
        mark = await copying.begin_copy(destination)
        async with _opened(destination) as theirs:
            if payloads is not None:
                await theirs.set_location(payloads, end_in(allowance()))
            task = _Copying(ours, theirs, mark, progress)
            await task.run(finish=finish)
    if finish:
        await copying.end_copy(destination, mark)
        task.update_report(is_finished=True)
    return task.report


@asynccontextmanager
async def _opened(backend: Backend) -> AsyncIterator[Payloads]:
    payloads = Payloads(Database(backend))
    try:
        yield payloads
    finally:
        end = end_in(PATIENCE_SECONDS)
        await payloads.database.close(end)
        await payloads.close(end)


@dataclass
class _Copying:
    source: Payloads
    target: Payloads
    mark: str
    progress: Callable[[CopyReport], object] | None
    report: CopyReport = field(default_factory=CopyReport)

    async def run(self, *, finish: bool) -> None:
        damaged: dict[int, str] = {}
        seconds = math.inf
        again = True
        while again:
            before, previous, began = damaged, seconds, time.monotonic()
            async with self.source.database.snapshot(end_in(PASS_SECONDS)) as snapshot:
                self.update_report(num_passes=1)
                damaged = await self._pass(snapshot)
                seconds = time.monotonic() - began
                # A damaged group, or its pack, may have been deleted after the snapshot began.
                again = SHORT_SECONDS < seconds < previous / 2 or damaged.keys() != before.keys()
                if not again and damaged:
                    raise CorruptPayloadError(_reasons(damaged), sorted(damaged))
                if not again and finish:
                    await self._finish(snapshot)
        if finish:
            await self._read_back()

    async def _pass(self, snapshot: Snapshot) -> dict[int, str]:
        """Make the target equal to a snapshot. Returns reasons of damaged payloads by group id."""
        total = await snapshot.read(lambda session: row_differences.count(session, episode_group))
        self.report = replace(self.report, num_groups=total, num_seen=0)
        outside = await self.target.database.read(payload_location.payload_store) is not None
        damaged: dict[int, str] = {}
        for family in families():
            async for seen, differences in self._compared(family, snapshot.read):
                await self._apply(differences)
                for one in differences:
                    if one.table is payload:
                        wanted = [*one.missing, *(new for _, new in one.changed)]
                        damaged |= await self._copy_payloads(snapshot.read, wanted, outside=outside)
                if family.root is episode_group:
                    self.update_report(num_seen=seen)
        return damaged

    async def _compared(
        self, family: Family, read: Read
    ) -> AsyncIterator[tuple[int, list[Difference]]]:
        """Yield, for each range of ids, the number of source rows and the differences by table."""
        after, most = 0, checks.INT64[1]
        while after < most:

            def page(session: Session, after: int = after) -> list[Values]:
                return row_differences.roots(session, family.root, after, PAGE)

            wanted, found = await read(page), await self.target.database.read(page)
            # Compare up to the id that both pages reach.
            last = min(most, *(some[-1][0] for some in (wanted, found) if len(some) == PAGE), most)
            wanted, found = ([row for row in some if row[0] <= last] for some in (wanted, found))

            def children(
                session: Session, after: int = after, last: int = last
            ) -> list[list[Values]]:
                return [
                    row_differences.children(session, one, after, last) for one in family.children
                ]

            ours, theirs = await read(children), await self.target.database.read(children)
            differences = [row_differences.compare(family.root, wanted, found)]
            for one, our_rows, their_rows in zip(family.children, ours, theirs, strict=True):
                differences.append(row_differences.compare(one, our_rows, their_rows))
            yield len(wanted), differences
            after = last

    async def _apply(self, differences: Sequence[Difference]) -> None:
        number = sum(one.num_rows for one in differences)
        if number:
            await self._write(lambda one: row_differences.apply(one, differences))
            self.update_report(num_rows=number)

    async def _write(self, work: Work[None], end: float | None = None) -> None:
        """Write to the target; raise `SchemaError` if another copy into it has begun."""
        database = self.target.database

        def ours(session: Session) -> None:
            copying.check_copy(database.backend, session, self.mark)
            work(session)

        await database.write(ours, end=end)

    async def _copy_payloads(
        self, read: Read, wanted: Sequence[Values], *, outside: bool
    ) -> dict[int, str]:
        """Copy payloads to the target. Returns reasons of damaged ones by group id."""
        damaged: dict[int, str] = {}
        for batch in batches(wanted):
            fetched = await fetch(read, self.source, batch)
            damaged |= {group_id: why for (group_id, _), why in fetched.damaged.items()}
            if fetched.sound:
                await self._store(fetched.sound, outside=outside)
        return damaged

    async def _store(
        self, sound: Sequence[tuple[Part, bytes | memoryview]], *, outside: bool
    ) -> None:
        records = [
            PayloadRecord(
                one.part,
                data,
                one.checksum,
                one.codec_version,
                one.field,
                one.of_part,
                one.expanded_bytes,
            )
            for one, data in sound
        ]
        size = sum(len(record.data) for record in records)
        end = end_in(allowance(size))
        if outside:
            await self.target.put([one for one in records if not one.is_inside], end)

        def insert(session: Session) -> None:
            packs.enter(session, records)
            inside: list[dict[str, Any]] = []
            packed: list[dict[str, Any]] = []
            for record, (one, _) in zip(records, sound, strict=True):
                rows = inside if record.pack is None else packed
                rows.append(record.row(one.group_id))
            session.run_many(insert_into(payload), inside)
            session.run_many(insert_into(payload), packed)

        await self._write(insert, end)
        self.update_report(num_payloads=len(records), num_bytes=size)

    async def _finish(self, snapshot: Snapshot) -> None:
        """Set sequences, pack counters and grace period; then check that no row differs."""
        source, target = self.source.database.backend, self.target.database.backend
        ids = await snapshot.read(lambda session: sequences.positions(source, session))
        location = await snapshot.read(payload_location.payload_store)

        def settle(session: Session) -> None:
            target.administration.advance_sequences(session, ids)
            packs.recount(session, session.now())
            if location is not None:
                payload_location.set_grace(session, location.grace_seconds)

        await self._write(settle, end_in(BULK_SECONDS))
        for family in families():
            async for _, differences in self._compared(family, snapshot.read):
                for one in differences:
                    if one.num_rows:
                        shown = f"{one.num_rows} rows of {one.table.name} differ"
                        raise DatabaseError(f"{target.shown}: after the copy, {shown}; copy again")
        behind = await self.target.database.read(
            lambda session: sequences.behind(target, session, ids)
        )
        if behind:
            shown = f"of table {behind[0].table} {behind[0]}"
            raise DatabaseError(f"{target.shown}: after the copy, {shown}; copy again")

    async def _read_back(self) -> None:
        """Compare every payload of the target with its checksum.

        Raises:
            CorruptPayloadError: Some are damaged or missing. Damaged ones were deleted from the
                target, so that the next copy writes them again.
        """
        expected = await self.target.database.read(
            lambda session: row_differences.count(session, payload)
        )
        damaged: list[Values] = []
        async for fetched in every_payload(self.target):
            damaged += fetched.damaged
            self.update_report(num_checked=len(fetched.sound))
        if self.report.num_checked == expected:
            return
        lost = Difference(payload, surplus=damaged)
        await self._write(
            lambda session: row_differences.apply(session, [lost]), end_in(BULK_SECONDS)
        )
        number = expected - self.report.num_checked
        raise CorruptPayloadError(
            f"{number} of {expected} payloads of the target were damaged when read back, and were "
            "deleted there; copy again",
            sorted({group_id for group_id, _ in damaged}),
        )

    def update_report(self, *, is_finished: bool = False, **more: int) -> None:
        """Add counts to the report and call `progress`."""
        counted = {name: getattr(self.report, name) + number for name, number in more.items()}
        self.report = replace(self.report, is_finished=is_finished, **counted)
        if self.progress is not None:
            self.progress(self.report)


def _reasons(damaged: Mapping[int, str]) -> str:
    return f"in the source: {', '.join(sorted(set(damaged.values())))}"
