"""Everything replaydb raises on purpose.

    ReplayDBError
    ├── InvalidInputError (ValueError)      an argument is wrong: field, expected, actual
    │   └── InvalidURLError                 a URL cannot be used
    ├── InvalidSettingsError (ValueError)   buffer settings that cannot work
    ├── UnknownBufferError (LookupError)    no buffer of that name
    ├── UnknownRunError (LookupError)       the run that calls was deleted
    ├── UnknownGroupError (LookupError)     no group of those ids or uids in this buffer
    ├── UnknownDrawError (LookupError)      no record of that draw in this buffer
    ├── DuplicateGroupError                 a group_uid is already in the buffer
    ├── NotEnoughGroupsError                fewer eligible groups than asked for
    ├── RateLimitedError                    a rate limit held the call back for too long
    ├── BufferFullError                     no room, and nothing that may make room
    ├── LeaseExpiredError                   the lease is over, or does not hold the group
    ├── GroupLeasedError                    somebody holds the group
    ├── GroupClosedError                    no more episodes may be added to the group
    ├── DuplicateEpisodeError               that episode of the group has been added
    ├── CorruptPayloadError                 stored bytes are not the bytes that went in
    ├── PayloadGoneError (LookupError)      what a group held was dropped, deleted or replaced
    ├── NotSupportedError                   this engine cannot do that
    ├── StoreClosedError                    the store was closed
    └── DatabaseError                       the database refused or was not there
        ├── DatabaseUnavailableError        it cannot be reached, or the connection broke
        │   ├── DatabaseReplacedError       its files, or its state, are not those that were opened
        │   ├── OutcomeUnknownError         the connection broke at the commit
        │   └── PayloadsUnavailableError    the folder or bucket of the payloads is not there
        ├── DatabaseReadOnlyError           it cannot be written
        ├── DatabaseFullError               disk or quota exhausted
        └── SchemaError                     the tables are not those this version needs
            ├── SchemaOutOfDateError        an upgrade is due, or there are no tables yet
            └── SchemaTooNewError           made by a newer replaydb

The error of the driver, where there is one, is kept as `__cause__`; passwords are hidden.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaydb.batch.batch import Batch


class ReplayDBError(Exception):
    """Base class of every error raised by replaydb."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Between processes an error is rebuilt as it is; by default its constructor would be called
        # with the message. What begins with an underscore is of use to this process only.
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return copyreg.__newobj__, (type(self), *self.args), shown  # type: ignore[attr-defined]


class InvalidInputError(ReplayDBError, ValueError):
    """An argument was refused before anything was written.

    Attributes:
        field: Name of the argument, with its position where it is one of many.
        expected: What would have been accepted.
        actual: What came.
    """

    def __init__(self, field: str, expected: str, actual: object) -> None:
        self.field = field
        self.expected = expected
        self.actual = actual
        super().__init__(f"{field}: expected {expected}, got {actual}")


class InvalidURLError(InvalidInputError):
    """A URL cannot be parsed, or names an engine or a place that is not supported."""


class InvalidSettingsError(ReplayDBError, ValueError):
    """Buffer settings that are unknown, of the wrong kind, or impossible together."""


class UnknownBufferError(ReplayDBError, LookupError):
    """The store has no buffer of that name, or no longer.

    Attributes:
        name: The name.
        known: Names of those that there are, where it was looked.
    """

    def __init__(self, name: str, known: Sequence[str] = ()) -> None:
        self.name = name
        self.known = tuple(known)
        others = f"; there are: {_some([repr(one) for one in known])}" if known else ""
        super().__init__(f"there is no buffer named {name!r}{others}")


class UnknownRunError(ReplayDBError, LookupError):
    """The run that calls was deleted while it went on; open the store again to begin it anew.

    Attributes:
        name: The name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the run {name!r} was deleted: nothing was stored; the store is to be opened again"
        )


class UnknownGroupError(ReplayDBError, LookupError):
    """Some of the groups asked for, by id or uid, are not in the buffer, or no longer.

    Attributes:
        group_ids: The ids or uids that were not found.
        batch: From `get`: the others that could be read. Otherwise None.
    """

    def __init__(self, group_ids: Iterable[int | str], batch: Batch | None = None) -> None:
        self.group_ids = tuple(group_ids)
        self.batch = batch
        super().__init__(f"no such groups in this buffer: {_some(self.group_ids)}")


class UnknownDrawError(ReplayDBError, LookupError):
    """The buffer has no record of the draw asked for.

    Attributes:
        draw_id: The id that was not found.
    """

    def __init__(self, draw_id: int) -> None:
        self.draw_id = draw_id
        super().__init__(f"no draw {draw_id} is recorded in this buffer")


class DuplicateGroupError(ReplayDBError):
    """A put named a `group_uid` that the buffer already holds; nothing of that put was stored.

    Attributes:
        group_uids: Those that are taken.
    """

    def __init__(self, group_uids: Iterable[str]) -> None:
        self.group_uids = tuple(group_uids)
        super().__init__(
            f"already in the buffer: {_some(self.group_uids)} "
            "(on_duplicate='ignore' keeps the stored group, 'replace' and 'renew' overwrite it)"
        )


class NotEnoughGroupsError(ReplayDBError):
    """Fewer groups are eligible than were asked for, within the time allowed; none was taken.

    What there is instead was counted after the call had failed, up to `COUNTED_TO` groups of a
    status, in the tasks asked for. It is empty where it could not be counted.

    Attributes:
        wanted: Groups asked for.
        available: Eligible groups there were.
        task_name: The task whose quota could not be met; None where there was one total.
        by_status: Groups by `GroupStatus`: `pending` ones still arrive, `archived` ones have been
            used or evicted.
        leased_by: Groups that somebody holds, or has claimed while they arrive, by the owner of
            the lease.
        too_stale: Groups passed over for `max_staleness`, those of unknown staleness included.
        of_other_runs: Groups passed over for `runs`.
        filtered_out: Groups passed over for `where`. Each group is in one of these three at most.
    """

    COUNTED_TO = 10_000

    def __init__(
        self,
        wanted: int,
        available: int,
        task_name: str | None = None,
        *,
        portion: object = None,
    ) -> None:
        self._portion = portion
        self.wanted = wanted
        self.available = available
        self.task_name = task_name
        self.by_status: Mapping[str, int] = {}
        self.leased_by: Mapping[str, int] = {}
        self.too_stale = self.of_other_runs = self.filtered_out = 0
        of_task = "" if task_name is None else f" of task {task_name!r}"
        self._summary = f"wanted {wanted} groups{of_task}, {available} eligible"
        super().__init__(self._summary)

    def explain(
        self,
        by_status: Mapping[str, int],
        leased_by: Mapping[str, int],
        *,
        too_stale: int = 0,
        of_other_runs: int = 0,
        filtered_out: int = 0,
    ) -> None:
        """Say what there is instead."""
        self.by_status, self.leased_by = by_status, leased_by
        self.too_stale = too_stale
        self.of_other_runs = of_other_runs
        self.filtered_out = filtered_out
        passed = {
            "too stale": too_stale,
            "of other runs": of_other_runs,
            "not what `where` asks for": filtered_out,
        }
        sentences = [
            "there are " + (self._counts(by_status) or "no groups"),
            "passed over " + self._counts(passed) if any(passed.values()) else "",
            "leased by " + _some([f"{who} ({n})" for who, n in leased_by.items()])
            if leased_by
            else "",
        ]
        self.args = ("; ".join([self._summary, *filter(None, sentences)]),)

    def _counts(self, numbers: Mapping[str, int]) -> str:
        return ", ".join(
            f"{number}{'+' if number >= self.COUNTED_TO else ''} {name}"
            for name, number in numbers.items()
            if number
        )


class RateLimitedError(ReplayDBError):
    """The buffer's rate limit held a draw or a put back until its `timeout` was over."""


class BufferFullError(ReplayDBError):
    """No room could be made: what is stored is leased or still arriving. Nothing was put."""


class LeaseExpiredError(ReplayDBError):
    """The lease is over: its groups went back and may be held by somebody else.

    Attributes:
        lease_id: Id of the lease.
        group_ids: The groups named that it does not hold; empty where the whole lease is over.
    """

    def __init__(self, lease_id: int, group_ids: Sequence[int] = ()) -> None:
        self.lease_id = lease_id
        self.group_ids = tuple(group_ids)
        of = f" on groups {_some(self.group_ids)}" if self.group_ids else ""
        super().__init__(f"lease {lease_id}{of} has expired or was given back")


class GroupLeasedError(ReplayDBError):
    """Groups that somebody holds were to get another status; nothing was changed.

    Attributes:
        group_ids: Those that are held.
    """

    def __init__(self, group_ids: Iterable[int]) -> None:
        self.group_ids = tuple(group_ids)
        super().__init__(
            f"groups {_some(self.group_ids)} are leased: what becomes of them is up to the holder"
        )


class GroupClosedError(ReplayDBError):
    """An episode was added to a group that takes no more episodes.

    Attributes:
        group_uid: Uid of the group.
        status: Status of the group.
    """

    def __init__(self, group_uid: str, status: str) -> None:
        self.group_uid = group_uid
        self.status = status
        super().__init__(f"group {group_uid!r} takes no more episodes: it is {status}")


class DuplicateEpisodeError(ReplayDBError):
    """An episode was added at a position that is taken; the stored one was kept.

    Attributes:
        group_uid: Uid of the group.
        position: Position of the episode in its group, from 0.
    """

    def __init__(self, group_uid: str, position: int) -> None:
        self.group_uid = group_uid
        self.position = position
        super().__init__(f"episode {position} of group {group_uid!r} has been added before")


class PayloadGoneError(ReplayDBError, LookupError):
    """The episodes of some groups are gone: dropped, deleted, or replaced by others since.

    Attributes:
        group_ids: Ids of these groups.
        replaced: Those of them that hold other episodes now.
        batch: From `get` and `redraw`: the other groups, still usable. Otherwise None.
    """

    def __init__(
        self,
        group_ids: Iterable[int],
        replaced: Iterable[int] = (),
        batch: Batch | None = None,
    ) -> None:
        self.group_ids = tuple(group_ids)
        self.replaced = tuple(replaced)
        self.batch = batch
        gone = [group_id for group_id in self.group_ids if group_id not in self.replaced]
        ways = (("dropped or deleted", gone), ("replaced since", self.replaced))
        said = [f"of groups {_some(ids)} were {how}" for how, ids in ways if ids]
        super().__init__(f"the payloads {' and '.join(said)}")


class CorruptPayloadError(ReplayDBError):
    """Stored bytes are truncated or altered, or were not written by replaydb.

    Attributes:
        reason: What is wrong with them.
        group_ids: Ids of the damaged groups; empty where bytes were decoded outside a store.
        batch: From `sample`, `peek`, `get` and `redraw`: the other groups, still usable.
            Otherwise None.
    """

    def __init__(
        self, reason: str, group_ids: Sequence[int] = (), batch: Batch | None = None
    ) -> None:
        self.reason = reason
        self.group_ids = tuple(group_ids)
        self.batch = batch
        where = f"groups {_some(self.group_ids)}: " if self.group_ids else ""
        super().__init__(f"{where}{reason}")


class NotSupportedError(ReplayDBError):
    """The engine, or this installation, cannot do what was asked."""


class StoreClosedError(ReplayDBError):
    """The store was closed, or has not been opened."""

    def __init__(self) -> None:
        super().__init__("the store is closed")


class DatabaseError(ReplayDBError):
    """The database reported an error; the driver's own is the `__cause__`."""


class DatabaseUnavailableError(DatabaseError):
    """The server or file cannot be reached, or the connection was lost."""


class DatabaseReplacedError(DatabaseUnavailableError):
    """The database is no longer the one that the store was opened on.

    A SQLite file was replaced, overwritten or deleted, or a PostgreSQL server lost commits that it
    had acknowledged. Repeating the call does not help. Follow the instructions in the message, then
    close the store and open it again.
    """


class OutcomeUnknownError(DatabaseUnavailableError):
    """A write was sent off to be committed, and no answer came; it may have happened or not.

    The server could not be asked in time either. Making the same call again is safe where it names
    what it writes: a put of groups with the same `group_uid` and `on_duplicate="ignore"`, an
    episode with the same `position`, a policy version, priorities, an ack.
    """


class PayloadsUnavailableError(DatabaseUnavailableError):
    """The folder or object store that holds payloads cannot be reached, or not used.

    It is down, refuses the credentials, has no such bucket or folder, or is another than the one
    that this store has written to.

    Attributes:
        url: Where payloads are; without secrets.
        reason: What is wrong.
    """

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(f"{url}: {reason}")


class DatabaseReadOnlyError(DatabaseError):
    """The file, folder or server does not accept writes."""


class DatabaseFullError(DatabaseError):
    """No space is left for the write; nothing of it was kept."""


class SchemaError(DatabaseError):
    """The tables in the database are not those that this version of replaydb works with.

    Attributes:
        current: Revision that was found; None where there are no tables.
        expected: Revision that is needed.
    """

    def __init__(self, message: str, current: str | None, expected: str) -> None:
        self.current = current
        self.expected = expected
        super().__init__(message)


class SchemaOutOfDateError(SchemaError):
    """The tables are older than this replaydb, or missing; the message says what to run."""


class SchemaTooNewError(SchemaError):
    """The tables were made by a newer or different replaydb: upgrade the package."""


def _some(items: Sequence[object], most: int = 5) -> str:
    shown = ", ".join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
