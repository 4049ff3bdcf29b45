"""The locked buffer, through which all changes of groups are made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from replaydb.database.repository.buffers import BufferRow, RunRow
from replaydb.database.repository.packs import Share, Shares
from replaydb.database.repository.tasks import TaskState
from replaydb.database.runtime.protocol import Backend
from replaydb.database.runtime.session import Session
from replaydb.database.tables.records import PayloadRecord
from replaydb.domain.settings import BufferSettings
from replaydb.errors import SchemaOutOfDateError

logger = logging.getLogger(__name__)

#: About how many groups of each kind maintenance changes in one transaction.
MAINTAINED_AT_ONCE = 256


@dataclass(slots=True)
class Scope:
    """Buffer and run of a call.

    Attributes:
        backend: Backend of the database.
        buffer_id: Id of the buffer.
        buffer_name: Name of the buffer.
        run: The run of the caller.
        row: Row of the buffer as cached in this process.
        on_read: Called with the row of the buffer whenever it is read.
        messages: Log messages about maintenance, as level and text.
        held: Ids of leases that the caller holds. It knows which of their groups it deletes or
            replaces, so this is not recorded.
    """

    backend: Backend
    buffer_id: int
    buffer_name: str
    run: RunRow
    row: BufferRow
    on_read: Callable[[BufferRow], None]
    messages: list[tuple[int, str]] = field(default_factory=list)
    held: Container[int] = ()

    def log_messages(self) -> None:
        """Log the messages. Call this after the commit, so that only durable changes are logged."""
        for level, text in self.messages:
            logger.log(level, "buffer %r: %s", self.buffer_name, text)


def scope_of(backend: Backend, row: BufferRow) -> Scope:
    """Return the scope of a transaction on a buffer, on behalf of no run."""
    return Scope(backend, row.id, row.name, RunRow(0, None), row, lambda _: None)


class UnfinishedMaintenanceError(Exception):
    """Raised by a call that finds more maintenance than one transaction should do.

    It is done in transactions of their own, then the call is run again.

    Attributes:
        task_names: The tasks.
        evicts: Whether groups beyond a lowered capacity are to be evicted, too.
    """

    def __init__(self, buffer: LockedBuffer, *, evicts: bool = False) -> None:
        super().__init__()
        self.task_names = frozenset(buffer.task_states)
        self.evicts = evicts


class Found(NamedTuple):
    """What the statement that takes the locks has found besides rows.

    Attributes:
        has_overdue: Whether a lease has expired, or a deadline has passed; None if unknown.
        draw_id: Id for a draw; None if none was generated.
        lease_id: Id for a lease; None if none was generated.
    """

    has_overdue: bool | None
    draw_id: int | None
    lease_id: int | None

    @property
    def may_have_overdue(self) -> bool:
        """Whether leases or deadlines have to be checked."""
        return self.has_overdue is not False


class LockedBuffer:
    """A buffer with some tasks locked until the transaction ends.

    Made by the context managers of `repository.locking`, which write changed task counters, and
    all other changes recorded here, back to the tables.

    Attributes:
        session: The transaction.
        scope: Buffer and run of the call.
        id: Id of the buffer.
        row: Current row of the buffer.
        found: What else was found when the locks were taken.
        task_states: Locked tasks, by name.
        erased: Ids of groups that were deleted to free space or because of their age.
        evicted: Ids of groups that were archived for these reasons.
        kept: Ids of groups that a call reports as stored, at least of those that are archived:
            retention does not delete them yet.
        shares: Changes of the counters of packs.
        cursors: Cursors to write, by name.
        messages: Log messages of this transaction, as level and text.
    """

    def __init__(
        self,
        session: Session,
        scope: Scope,
        row: BufferRow,
        found: Found,
        task_states: dict[str, TaskState],
    ) -> None:
        self.session = session
        self.scope = scope
        self.id = row.id
        self.row = row
        self.found = found
        self.task_states = task_states
        self.erased: dict[int, None] = {}
        self.evicted: dict[int, None] = {}
        self.kept: dict[int, None] = {}
        self.shares: Shares = {}
        self.cursors: dict[str, Any] = {}
        self.messages: list[tuple[int, str]] = []

    def check_formats(self, payloads: Iterable[PayloadRecord]) -> None:
        """Check that payloads, which were encoded before the lock, may be stored.

        Raises:
            SchemaOutOfDateError: Their format is later than the store's: it was downgraded since.
        """
        for one in payloads:
            if one.codec_version > self.row.write_format:
                raise SchemaOutOfDateError(
                    f"the store was downgraded to payload format {self.row.write_format} while a "
                    f"payload of format {one.codec_version} was on its way; nothing was stored"
                )

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Roll back the changes of the block, in the tables and in this object, if it raises.

        All attributes are restored, including any that are added to the class later.
        """
        before = {name: _copy(value) for name, value in vars(self).items()}
        try:
            with self.session.savepoint():
                yield
        except BaseException:
            vars(self).update(before)
            raise

    @property
    def settings(self) -> BufferSettings:
        """Settings of the buffer."""
        return self.row.settings

    @cached_property
    def now(self) -> datetime:
        """Time of the database's clock, read once, while the locks are held."""
        return self.row.time(self.session)

    @property
    def is_comparable(self) -> bool:
        """Whether policy versions of the caller's run are comparable with the buffer's."""
        mine, followed = self.scope.run.lineage, self.row.policy_lineage
        return mine is None or followed is None or mine == followed

    def is_too_stale(self, task_name: str, staleness: int | None, version_span: int | None) -> bool:
        """Return whether a group exceeds the `max_staleness` of its task.

        Args:
            task_name: Task of the group.
            staleness: Staleness of its oldest token; None: unknown, so the group does not expire.
            version_span: Version of its newest token minus that of its oldest.
        """
        limit = self.task_states[task_name].max_staleness
        if limit is None or staleness is None:
            return False
        if self.settings.expire_by == "newest_token":
            staleness -= version_span or 0
        return staleness > limit

    def report(self, level: int, text: str) -> None:
        """Add a log message, which is logged after the commit."""
        self.messages.append((level, text))


def _copy(value: Any) -> Any:
    """Copy values that are changed in place; return others, such as a session, as they are."""
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(value)
    if isinstance(value, BufferRow | Share | TaskState):
        return replace(value)
    return value
