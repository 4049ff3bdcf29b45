"""The right to change groups: locks, in the one order that everybody takes them in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncConnection

from replaydb.database.repository import buffers, tasks
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.tasks import TaskAccount
from replaydb.settings import BufferSettings

logger = logging.getLogger(__name__)


class SettingsChangedError(Exception):
    """Another process changed settings that decide what must be locked: begin again."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a call works.

    Attributes:
        buffer_id: The buffer.
        buffer_name: Its name.
        run: The run that calls.
        settings: The buffer's settings as this process last saw them.
        saw: Told of the buffer whenever it is read.
        news: What upkeep has done, for the log: level and text.
    """

    buffer_id: int
    buffer_name: str
    run: RunRow
    settings: BufferSettings
    saw: Callable[[BufferRow], None]
    news: list[tuple[int, str]] = field(default_factory=list)

    async def lock(
        self, connection: AsyncConnection, names: Collection[str] | None
    ) -> tuple[BufferRow, dict[str, TaskAccount]]:
        """Lock some or all tasks, or the whole buffer where its settings ask for that.

        Returns:
            The buffer as it is now, and the accounts of the tasks (those that do not exist are
            left out).

        Raises:
            SettingsChangedError: The settings ask for other locks than were taken.
        """
        self.news.clear()  # a transaction that lost a race is run again
        if self.settings.is_exclusive:
            # The buffer first: whoever makes a task locks it too, so there is none to miss.
            state = await buffers.state(connection, self.buffer_id, self.buffer_name, lock=True)
            accounts = await tasks.lock(connection, self.buffer_id)
        else:
            accounts = await tasks.lock(connection, self.buffer_id, names)
            # Read after the locks are held: nobody can advance the policy now.
            state = await buffers.state(connection, self.buffer_id, self.buffer_name)
        self.saw(state)
        if (state.settings.is_exclusive, state.settings.is_limited) != (
            self.settings.is_exclusive,
            self.settings.is_limited,
        ):
            raise SettingsChangedError
        return state, accounts

    def tell(self) -> None:
        """Log what upkeep has done. To be called after the commit: what is not kept is no news."""
        for level, text in self.news:
            logger.log(level, "buffer %r: %s", self.buffer_name, text)

    def compares(self, state: BufferRow) -> bool:
        """Whether this run's policy versions can be compared with the buffer's."""
        return (
            self.run.lineage is None
            or state.policy_lineage is None
            or self.run.lineage == state.policy_lineage
        )
