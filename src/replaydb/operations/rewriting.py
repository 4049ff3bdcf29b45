"""Payloads of older formats, or of episodes added one by one, rewritten as those of new groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from replaydb.database.repository import buffers, groups, rewriting
from replaydb.database.repository.locking import tasks_locked
from replaydb.database.repository.packs import PackGoneError, record_unused
from replaydb.database.runtime.session import Session
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.database.tables.records import PayloadRecord, from_rows, payload_records
from replaydb.domain import checks
from replaydb.operations.reading import BATCH_BYTES, PAGE
from replaydb.operations.recovery import scope_of
from replaydb.util.chunks import chunks

if TYPE_CHECKING:
    from replaydb.buffer import Store


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """Progress or result of `rewrite_payloads`.

    Attributes:
        num_groups: Number of groups that were rewritten.
        bytes_before: Size of their payloads before.
        bytes_after: Size of their payloads now.
        num_skipped: Number of groups that another process changed meanwhile, whose payload is
            damaged (see `verify`), or that took too long to write. Call it again for the others.
    """

    num_groups: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    num_skipped: int = 0


async def rewrite_payloads(
    store: Store, *, progress: Callable[[RewriteReport], object] | None = None
) -> RewriteReport:
    """Rewrite payloads of older formats in the format that new payloads have.

    In format 2, episodes that were added one by one are joined to one part, so that a prompt that
    they have in common is stored once.

    Groups keep their ids, draws and counters. Each transaction rewrites up to 16 MB, or one group,
    and locks their tasks meanwhile. Other processes can use the store. After an interruption, call
    it again: it continues with the groups that are left. On SQLite the file does not shrink: see
    `vacuum`.

    Args:
        store: The store, opened for writing.
        progress: Called repeatedly with the report so far.

    Raises:
        PayloadsUnavailableError: The payload store cannot be reached or used.
        DatabaseReadOnlyError: The store was opened read-only.
        DatabaseError: The database cannot be read or written.
    """
    show = checks.optional(checks.function, "progress", progress)
    report, after = RewriteReport(), 0
    database = store._payloads.database
    while True:
        page = partial(rewriting.old_groups, after=after, most=PAGE)
        found = await database.read(page, end=end_in(BULK_SECONDS))
        if not found:
            return report
        for some in chunks(found, lambda row: int(row.num_bytes), BATCH_BYTES):
            for name in sorted({row.buffer for row in some}):
                mine = [row for row in some if row.buffer == name]
                report = await _rewrite(store, name, mine, report)
            if show is not None:
                show(report)
        after = found[-1].id


async def _rewrite(
    store: Store, name: str, some: Sequence[Any], report: RewriteReport
) -> RewriteReport:
    """Rewrite the payloads of some groups of a buffer, and add them to a report."""
    payloads = store._payloads
    database = payloads.database
    end = end_in(BULK_SECONDS)
    row = await database.read(partial(buffers.find, name=name), end=end)
    if row is None:
        return report
    ids = [one.id for one in some]
    stored = await database.read(partial(groups.fetch, buffer_id=row.id, ids=ids), end=end)
    whole = await payloads.read(stored, end)
    compression, version = row.settings.compression, row.write_format

    def encode() -> dict[int, list[PayloadRecord]]:
        found: dict[int, list[PayloadRecord]] = {}
        for group_id, group in from_rows(*whole).groups.items():
            episodes = dict(zip(group.positions, group.episodes, strict=True))
            found[group_id] = payload_records(episodes, group.context, compression, version)
        return found

    several = await asyncio.to_thread(encode)
    before: dict[int, set[tuple[int, int]]] = {}
    for part in stored.payloads:
        before.setdefault(part["group_id"], set()).add((part["part"], part["checksum"]))
    every = [part for parts in several.values() for part in parts]
    if row.uses_payload_store:
        await payloads.put(every, end)

    def work(session: Session) -> set[int]:
        scope = scope_of(database, row)
        names = {one.task_name for one in some}
        with tasks_locked(session, scope, names, sweeps=False) as buffer:
            known = {one: frozenset(parts) for one, parts in before.items()}
            return rewriting.rewrite(buffer, several, known)

    done: set[int] = set()
    with suppress(PackGoneError):  # written too long ago: the groups are left for another call
        done = await database.write(work, end=end)
    if not done and row.uses_payload_store:
        with suppress(PackGoneError):
            await database.write(partial(record_unused, payloads=every), end=end)
    sizes = {one.id: int(one.num_bytes) for one in some}
    return replace(
        report,
        num_groups=report.num_groups + len(done),
        bytes_before=report.bytes_before + sum(sizes[one] for one in done),
        bytes_after=report.bytes_after + sum(len(p.data) for one in done for p in several[one]),
        num_skipped=report.num_skipped + len(ids) - len(done),
    )
