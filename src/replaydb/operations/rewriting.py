"""Payloads of older formats, or of episodes added one by one, rewritten as those of new groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from replaydb.database.repository import buffers, rewriting
from replaydb.database.rewriting import rewrite
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.domain import checks
from replaydb.operations.reading import BATCH_BYTES, PAGE
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
    payloads, end = store._payloads, end_in(BULK_SECONDS)
    row = await payloads.database.read(partial(buffers.find, name=name), end=end)
    if row is None:
        return report
    sizes = await rewrite(payloads, row, some, end)
    return replace(
        report,
        num_groups=report.num_groups + len(sizes),
        bytes_before=report.bytes_before + sum(one.num_bytes for one in some if one.id in sizes),
        bytes_after=report.bytes_after + sum(sizes.values()),
        num_skipped=report.num_skipped + len(some) - len(sizes),
    )
