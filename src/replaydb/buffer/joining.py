"""Completed incremental groups whose episodes are joined in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from replaydb import codec
from replaydb.database.payloads import Payloads
from replaydb.database.repository.buffers import BufferRow
from replaydb.database.repository.rewriting import with_repeated_prompts
from replaydb.database.rewriting import rewrite
from replaydb.database.runtime.transactions import BULK_SECONDS, end_in
from replaydb.errors import ReplayDBError

logger = logging.getLogger(__name__)

#: A group that was changed while it was read, such as by an annotation, is read this often.
ATTEMPTS = 3


class Joining:
    """Stores once what the episodes of completed incremental groups have in common.

    Each episode was stored when it was added, with its prompt. A group that is not joined, because
    the process was killed or the store was not available, is read in the same way, and
    `replaydb db rewrite-payloads` joins it later.
    """

    def __init__(self, payloads: Payloads, row: Callable[[], BufferRow]) -> None:
        self._payloads = payloads
        self._row = row
        self._uids: list[str] = []
        self._task: asyncio.Task[None] | None = None

    def join_soon(self, group_uid: str) -> None:
        """Join the episodes of a completed group if much of what they store is their prompt."""
        if self._row().write_format < codec.VERSION:
            return
        self._uids.append(group_uid)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._join())

    async def drain(self) -> None:
        """Wait until all are joined."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Join no others. The current transaction is rolled back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _join(self) -> None:
        while self._uids:
            uids, self._uids = self._uids, []
            try:
                row, end = self._row(), end_in(BULK_SECONDS)
                find = partial(with_repeated_prompts, buffer_id=row.id, group_uids=uids)
                for one in await self._payloads.database.read(find, end=end):
                    for _ in range(ATTEMPTS):
                        if await rewrite(self._payloads, row, [one], end_in(BULK_SECONDS)):
                            break
            except ReplayDBError as error:
                logger.warning("buffer %r: groups were not joined: %s", self._row().name, error)
            except Exception:
                logger.exception("buffer %r: groups were not joined", self._row().name)
