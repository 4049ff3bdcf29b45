"""Exceptions that replaydb raises.

    ReplayDBError
    ├── InvalidInputError (ValueError)      an argument is invalid: field, expected, actual
    │   └── InvalidURLError                 a URL is not usable
    ├── InvalidSettingsError (ValueError)   a buffer setting is unknown or invalid
    ├── UnknownBufferError (LookupError)    the store has no buffer of that name
    ├── UnknownRunError (LookupError)       the calling run was deleted
    ├── UnknownGroupError (LookupError)     the buffer has no groups with those ids or uids
    ├── UnknownDrawError (LookupError)      the buffer has no record of that draw
    ├── DuplicateGroupError                 a group_uid is already in the buffer
    │   └── ConsumedGroupError              a group that a put would replace was consumed
    ├── NotEnoughGroupsError                fewer groups are eligible than requested
    ├── RateLimitedError                    the rate limit blocked the call until its timeout
    ├── BufferFullError                     the buffer is full and nothing can be evicted
    ├── LeaseExpiredError                   the lease has ended, or does not have the group
    ├── GroupLeasedError                    the group is leased, so its status cannot be changed
    ├── GroupClosedError                    the group accepts no more episodes
    ├── DuplicateEpisodeError               the group already has an episode at that position
    ├── ClaimExpiredError                   the claim has ended, so nothing more can be added
    ├── TrajectoryClaimedError              another process has claimed the position
    ├── DuplicateTurnError                  another turn of the group has the uid
    ├── UnknownTurnError (LookupError)      the trajectory has no turn of that uid
    ├── ContentChangedError                 a group is not the one that the caller has read
    ├── CorruptPayloadError                 stored bytes are damaged
    ├── PayloadGoneError (LookupError)      the episodes of a group were dropped or replaced
    ├── NotSupportedError                   the engine or this installation cannot do it
    ├── StoreClosedError                    the store is closed
    └── DatabaseError                       the database reported an error
        ├── DatabaseUnavailableError        the database cannot be reached
        │   ├── DatabaseReplacedError       the database was replaced or lost commits
        │   ├── OutcomeUnknownError         it is unknown whether a write was committed
        │   └── PayloadsUnavailableError    the payload store cannot be reached or used
        ├── DatabaseReadOnlyError           the database does not accept writes
        │   └── PayloadsReadOnlyError       another copy of the database owns the payloads
        ├── DatabaseFullError               the disk or a quota is full
        └── SchemaError                     the tables do not match this version
            ├── SchemaOutOfDateError        the tables are missing or need an upgrade
            └── ClientTooOldError           the store needs a newer version of replaydb

The driver's error, if any, is the `__cause__`. Passwords are hidden.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaydb.batch.batch import Batch


class ReplayDBError(Exception):
    """Base class of all exceptions raised by replaydb."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled errors are rebuilt from their attributes; by default the constructor would be
        # called with the message. Attributes that begin with an underscore are not pickled.
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return copyreg.__newobj__, (type(self), *self.args), shown  # type: ignore[attr-defined]


class InvalidInputError(ReplayDBError, ValueError):
    """An argument is invalid. Nothing was written.

    Attributes:
        field: Name of the argument, with an index if it is an element of a sequence.
        expected: What is accepted.
        actual: What was received.
    """

    def __init__(self, field: str, expected: str, actual: object) -> None:
        self.field = field
        self.expected = expected
        self.actual = actual
        super().__init__(f"{field}: expected {expected}, got {actual}")


class InvalidURLError(InvalidInputError):
    """A URL cannot be parsed, or names an unsupported engine or payload store."""


class InvalidSettingsError(ReplayDBError, ValueError):
    """A buffer setting is unknown, has the wrong type, or cannot be combined with another."""


class UnknownBufferError(ReplayDBError, LookupError):
    """The store has no buffer of that name, or no longer.

    Attributes:
        name: The name.
        known: Names of existing buffers; empty if they were not read.
    """

    def __init__(self, name: str, known: Sequence[str] = ()) -> None:
        self.name = name
        self.known = tuple(known)
        others = f"; there are: {_some([repr(one) for one in known])}" if known else ""
        super().__init__(f"there is no buffer named {name!r}{others}")


class UnknownRunError(ReplayDBError, LookupError):
    """The calling run was deleted. To start it again, close the store and open it again.

    Attributes:
        name: Name of the run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the run {name!r} was deleted: nothing was stored; close the store and open it again"
        )


class UnknownGroupError(ReplayDBError, LookupError):
    """Some of the requested groups are not in the buffer, or no longer.

    Attributes:
        group_ids: Ids or uids that were not found.
        batch: From `get`: the other groups that could be read. Otherwise None.
    """

    def __init__(self, group_ids: Iterable[int | str], batch: Batch | None = None) -> None:
        self.group_ids = tuple(group_ids)
        self.batch = batch
        super().__init__(f"no such groups in this buffer: {_some(self.group_ids)}")


class UnknownDrawError(ReplayDBError, LookupError):
    """The buffer has no record of the requested draw.

    Attributes:
        draw_id: Id that was not found.
    """

    def __init__(self, draw_id: int) -> None:
        self.draw_id = draw_id
        super().__init__(f"no draw {draw_id} is recorded in this buffer")


class DuplicateGroupError(ReplayDBError):
    """A `group_uid` is already in the buffer. Nothing of the call was stored.

    Attributes:
        group_uids: Uids that are already in the buffer.
    """

    def __init__(self, group_uids: Iterable[str], *, opens: bool = False) -> None:
        self.group_uids = tuple(group_uids)
        advice = (
            "add_episode adds to it while it is pending; another group needs another group_uid"
            if opens
            else "on_duplicate='ignore' keeps the stored group, 'replace' and 'renew' overwrite it"
        )
        super().__init__(f"already in the buffer: {_some(self.group_uids)} ({advice})")


class ConsumedGroupError(DuplicateGroupError):
    """A group that a put would replace was consumed. Nothing of the put was stored.

    Consumed groups are archived by an ack, by `max_times_sampled`, or by `put` or `update`.
    Replacing one would let it be trained on again. `on_duplicate="renew"` does so on purpose, and
    evicted groups can be replaced.

    Attributes:
        group_uids: Uids of the consumed groups.
    """

    def __init__(self, group_uids: Iterable[str]) -> None:
        super().__init__(group_uids)
        self.args = (
            f"consumed: {_some(self.group_uids)}; 'replace' would let them be drawn again "
            "(on_duplicate='renew' stores the groups as new ones)",
        )


class NotEnoughGroupsError(ReplayDBError):
    """Fewer groups were eligible than requested until the timeout. None was drawn.

    Attributes from `by_status` on describe the groups of the requested tasks. They are counted
    after the failure and the maintenance that was due, up to `COUNTED_TO` groups per status. If
    counting fails or takes too long, they are empty or 0 as if there were no groups, and only the
    message differs: it then ends with the number of eligible groups. Of the groups with the
    requested statuses, those that are not counted as excluded below are eligible.

    Attributes:
        wanted: Number of groups requested.
        available: Number of eligible groups, without those chosen for other parts of the batch.
        task_name: Task whose quota could not be met; None if the request was for a total.
        by_status: Number of groups by `GroupStatus`. `pending` groups may still become eligible;
            `archived` groups were used or evicted.
        leased_by: Number of leased groups by owner of the lease.
        too_stale: Groups excluded by `max_staleness`, including those with unknown staleness.
        of_other_runs: Groups excluded by `runs`.
        filtered_out: Groups excluded by `where`. A group is counted in at most one of these three.
    """

    COUNTED_TO = 10_000

    def __init__(
        self,
        wanted: int,
        available: int,
        task_name: str | None = None,
        *,
        quota: object = None,
    ) -> None:
        self._quota = quota
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
        """Add the counts of other groups to the attributes and the message."""
        self.by_status, self.leased_by = by_status, leased_by
        self.too_stale = too_stale
        self.of_other_runs = of_other_runs
        self.filtered_out = filtered_out
        excluded = {
            "too stale": too_stale,
            "of other runs": of_other_runs,
            "not matching `where`": filtered_out,
        }
        sentences = [
            "there are " + (self._counts(by_status) or "no groups"),
            "excluded " + self._counts(excluded) if any(excluded.values()) else "",
            "leased by " + _some([f"{owner} ({n})" for owner, n in leased_by.items()])
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
    """The rate limit of the buffer blocked a draw or a put until its `timeout`."""


class BufferFullError(ReplayDBError):
    """There is no space, and no group can be evicted. Nothing was stored.

    All others are leased or pending, or kept by the same `put` or `update`.
    """


class LeaseExpiredError(ReplayDBError):
    """The lease has expired or ended. Its groups were released and may be leased by others.

    Attributes:
        lease_id: Id of the lease.
        group_ids: Requested groups that the lease does not have; empty if the whole lease has
            ended.
    """

    def __init__(self, lease_id: int, group_ids: Sequence[int] = ()) -> None:
        self.lease_id = lease_id
        self.group_ids = tuple(group_ids)
        of = f" on groups {_some(self.group_ids)}" if self.group_ids else ""
        super().__init__(f"lease {lease_id}{of} has expired or has ended")


class GroupLeasedError(ReplayDBError):
    """The status of a leased group cannot be changed. Nothing was changed.

    Attributes:
        group_ids: Ids of the leased groups.
    """

    def __init__(self, group_ids: Iterable[int]) -> None:
        self.group_ids = tuple(group_ids)
        super().__init__(
            f"groups {_some(self.group_ids)} are leased: only the holder can change their status"
        )


class GroupClosedError(ReplayDBError):
    """The group accepts no more episodes, or, without a position, none of its positions is free.

    Attributes:
        group_uid: Uid of the group.
        status: Status of the group.
    """

    def __init__(self, group_uid: str, status: str) -> None:
        self.group_uid = group_uid
        self.status = status
        why = f"it is {status}"
        if status == "pending":
            why = "each of its positions has an episode or turns, is claimed, or is unusable"
        super().__init__(f"group {group_uid!r} accepts no more episodes: {why}")


class DuplicateEpisodeError(ReplayDBError):
    """The group already has an episode at this position. It was kept.

    Attributes:
        group_uid: Uid of the group.
        position: Position of the episode in its group, from 0.
    """

    def __init__(self, group_uid: str, position: int) -> None:
        self.group_uid = group_uid
        self.position = position
        super().__init__(f"group {group_uid!r} already has an episode at position {position}")


class ClaimExpiredError(ReplayDBError):
    """The claim has expired or ended. Nothing was stored. Another process may have claimed it.

    Attributes:
        claim_uid: Uid of the claim.
    """

    def __init__(self, claim_uid: str) -> None:
        self.claim_uid = claim_uid
        super().__init__(
            f"claim {claim_uid} has expired or has ended; nothing was stored. Claim again to "
            "continue a trajectory"
        )


class TrajectoryClaimedError(ReplayDBError):
    """Another process has claimed the position of the group. Nothing was stored.

    Attributes:
        group_uid: Uid of the group.
        position: The position.
        owner: Owner of the claim.
    """

    def __init__(self, group_uid: str, position: int, owner: str) -> None:
        self.group_uid = group_uid
        self.position = position
        self.owner = owner
        super().__init__(
            f"position {position} of group {group_uid!r} is claimed by {owner!r}; only the claim "
            "can add to it until it ends"
        )


class DuplicateTurnError(ReplayDBError):
    """The group has another turn with this uid. It was kept.

    Attributes:
        group_uid: Uid of the group.
        position: Position of the trajectory that has it.
        turn_uid: The uid.
    """

    def __init__(self, group_uid: str, position: int, turn_uid: str) -> None:
        self.group_uid = group_uid
        self.position = position
        self.turn_uid = turn_uid
        super().__init__(
            f"position {position} of group {group_uid!r} has another turn {turn_uid!r}; each turn "
            "of a group needs a uid of its own"
        )


class UnknownTurnError(ReplayDBError, LookupError):
    """The trajectory or episode has no such turn. Nothing was stored.

    Attributes:
        group_uid: Uid of the group.
        position: Position of the trajectory in its group.
        turn_uid: Uid of the turn, or its number as text.
    """

    def __init__(self, group_uid: str, position: int, turn_uid: str) -> None:
        self.group_uid = group_uid
        self.position = position
        self.turn_uid = turn_uid
        super().__init__(
            f"position {position} of group {group_uid!r} has no turn {turn_uid!r}; nothing was "
            "stored"
        )


class ContentChangedError(ReplayDBError):
    """Groups have another etag than the caller gave. Nothing was changed: read them again.

    Attributes:
        group_uids: Uids of these groups.
    """

    def __init__(self, group_uids: Sequence[str]) -> None:
        self.group_uids = tuple(group_uids)
        super().__init__(
            f"groups {', '.join(map(repr, group_uids))} were changed since they were read; nothing "
            "was changed. Read them again, and repeat the call with their new etags"
        )


class PayloadGoneError(ReplayDBError, LookupError):
    """The episodes of some groups are not available: they were dropped, deleted or replaced.

    Attributes:
        group_ids: Ids of these groups.
        replaced: Ids of those that have other episodes now.
        batch: From `get` and `redraw`: the other groups. Otherwise None.
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
        parts = [f"of groups {_some(ids)} were {how}" for how, ids in ways if ids]
        super().__init__(f"the payloads {' and '.join(parts)}")


class CorruptPayloadError(ReplayDBError):
    """Stored bytes are truncated or altered, or were not written by replaydb.

    Attributes:
        reason: What is wrong with the bytes.
        group_ids: Ids of the damaged groups; empty if the bytes were decoded without a store.
        batch: From `sample`, `peek`, `get` and `redraw`: the other groups. Otherwise None.
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
    """The engine or this installation does not support the call."""


class StoreClosedError(ReplayDBError):
    """The store is closed, or has not been opened."""

    def __init__(self) -> None:
        super().__init__("the store is closed")


class DatabaseError(ReplayDBError):
    """The database reported an error. The driver's error is the `__cause__`."""


class DatabaseUnavailableError(DatabaseError):
    """The server or file cannot be reached, or the connection was lost."""


class DatabaseReplacedError(DatabaseUnavailableError):
    """The database is no longer the one that the store opened.

    A SQLite file was replaced, overwritten or deleted, or a PostgreSQL server lost commits that it
    had acknowledged. Repeating the call does not help. Follow the instructions in the message, then
    close the store and open it again.
    """


class OutcomeUnknownError(DatabaseUnavailableError):
    """It is unknown whether a write was committed: the answer to the commit was lost.

    The server could not be asked in time either. It is safe to repeat the call if it identifies
    what it writes: a put of groups with the same `group_uid` and `on_duplicate="ignore"`, an
    episode with the same `position`, a policy version, priorities, an ack.
    """


class PayloadsUnavailableError(DatabaseUnavailableError):
    """The payload store (a folder or bucket) cannot be reached or used.

    It is down, refuses the credentials, does not exist, has no intact marker, or belongs to another
    store.

    Attributes:
        url: Payload location, without secrets.
        reason: What is wrong.
    """

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(f"{url}: {reason}")


class DatabaseReadOnlyError(DatabaseError):
    """The file, folder or server does not accept writes, or the store is read-only."""


class PayloadsReadOnlyError(DatabaseReadOnlyError):
    """Another copy of this database owns the payloads outside the database. This one only reads.

    A payload store has one owner, which may put and prune: the file or server that wrote to it
    first. Other copies, such as a copied file or a restored dump, would delete payloads that only
    the owner refers to.

    Attributes:
        url: Payload location, without secrets.
        owner: What identifies the owner.
        actual: What identifies the database of this store.
    """

    def __init__(self, url: str, owner: str, actual: str) -> None:
        self.url = url
        self.owner = owner
        self.actual = actual
        super().__init__(
            f"{url}: expected the database that owns these payloads ({owner}), got {actual}: this "
            "copy of it can read them, but not put or prune. If the payloads were copied too, run "
            "`replaydb db relocate` with the location of their copy. Then, or if this database has "
            "replaced the owner, run `replaydb db adopt-payloads`"
        )


class DatabaseFullError(DatabaseError):
    """There is no space left for the write. Nothing of it was kept."""


class SchemaError(DatabaseError):
    """The tables in the database do not match this version of replaydb.

    Attributes:
        current: Revision of the tables; None if there are no tables, or if it was not read.
        expected: Revision that this version requires; None if the revision is not the problem.
    """

    def __init__(
        self, message: str, current: str | None = None, expected: str | None = None
    ) -> None:
        self.current = current
        self.expected = expected
        super().__init__(message)


class SchemaOutOfDateError(SchemaError):
    """The tables are missing or older than this version. The message names the command to run."""


class ClientTooOldError(SchemaError):
    """The store, or something in it, needs a newer version of replaydb. Nothing was changed."""


def _some(items: Sequence[object], most: int = 5) -> str:
    shown = ", ".join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
