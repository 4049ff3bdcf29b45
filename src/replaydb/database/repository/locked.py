"""A buffer that is locked: what every change of groups goes through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from sqlalchemy import Connection

from replaydb.database.engines.protocol import Backend
from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.packs import Share, Shares
from replaydb.database.repository.tasks import TaskAccount
from replaydb.settings import BufferSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Scope:
    """Who works in which buffer.

    Attributes:
        backend: Of the database.
        buffer_id: The buffer.
        buffer_name: Its name.
        run: The run that calls.
        row: The buffer as this process last saw it.
        saw: Told of the buffer whenever it is read.
        news: What upkeep has done, for the log: level and text.
    """

    backend: Backend
    buffer_id: int
    buffer_name: str
    run: RunRow
    row: BufferRow
    saw: Callable[[BufferRow], None]
    news: list[tuple[int, str]] = field(default_factory=list)

    def log_news(self) -> None:
        """To be called after the commit: what is not kept is no news."""
        for level, text in self.news:
            logger.log(level, "buffer %r: %s", self.buffer_name, text)


class LockedBuffer:
    """A buffer, some of whose tasks are locked until the transaction ends.

    Got from `tasks_locked`, `buffer_locked` and `lease_locked` of `repository.locking`, which
    write its accounts back, and whatever else has changed here.

    Attributes:
        connection: In whose transaction.
        scope: Who works in it.
        id: Its id.
        row: It as it is now.
        accounts: Its locked tasks, by name.
        shares: What changes in packs.
        cursors: Cursors to write, by name.
        news: As of `Scope`, of this transaction.
    """

    def __init__(
        self,
        connection: Connection,
        scope: Scope,
        row: BufferRow,
        accounts: dict[str, TaskAccount],
    ) -> None:
        self.connection = connection
        self.scope = scope
        self.id = row.id
        self.row = row
        self.accounts = accounts
        self.shares: Shares = {}
        self.cursors: dict[str, Any] = {}
        self.news: list[tuple[int, str]] = []

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo everything the block has changed if it raises, in the tables and in this object.

        Every attribute is restored, so that a new one cannot be forgotten.
        """
        before = {name: _copy(value) for name, value in vars(self).items()}
        try:
            with self.connection.begin_nested():
                yield
        except BaseException:
            vars(self).update(before)
            raise

    @property
    def settings(self) -> BufferSettings:
        """Its settings."""
        return self.row.settings

    @cached_property
    def now(self) -> datetime:
        """The time by the database's clock, once the locks are held."""
        return self.scope.backend.now(self.connection)

    @property
    def compares(self) -> bool:
        """Whether the policy versions of the run that calls compare with the buffer's."""
        mine, followed = self.scope.run.lineage, self.row.policy_lineage
        return mine is None or followed is None or mine == followed

    def is_too_stale(self, task_name: str, staleness: int | None, version_span: int | None) -> bool:
        """Whether a group expires. One of unknown staleness does not.

        Args:
            task_name: Its task.
            staleness: That of its oldest token.
            version_span: By how many versions its newest token is newer.
        """
        limit = self.accounts[task_name].max_staleness
        if limit is None or staleness is None:
            return False
        if self.settings.expire_by == "newest_token":
            staleness -= version_span or 0
        return staleness > limit

    def report(self, level: int, text: str) -> None:
        """Something for the log, if what it tells of is kept."""
        self.news.append((level, text))


def _copy(value: Any) -> Any:
    """A copy of what is changed in place; anything else, such as a connection, as it is."""
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(value)
    if isinstance(value, BufferRow | Share | TaskAccount):
        return replace(value)
    return value
