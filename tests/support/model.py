"""In-memory model of a buffer: a dict of groups and a dict of leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from replaydb import BufferFullError, GroupLeasedError, InvalidInputError, PayloadGoneError

DEAD = {"expired", "failed", "filtered"}
IDLE = {"completed", "aborted"}


class FullError(Exception):
    """There are no groups left to evict."""


@dataclass
class Row:
    id: int
    task: str
    status: str
    version: int | None = None
    newest: int | None = None
    priority: float = 1.0
    times: int = 0
    attempts: int = 0
    leased_from: str = ""
    rewards: list[float] = field(default_factory=list)
    expected: int = 0
    least: int = 0
    closes: bool = False
    #: Uid of the claim of all its open positions.
    claim: str | None = None
    #: Claims of each open position that have expired.
    claims_expired: int = 0
    has_payload: bool = True

    @property
    def is_empty(self) -> bool:
        return self.expected > 0 and not self.rewards


@dataclass
class Model:
    """The rules of a buffer; `capacity` is in groups."""

    capacity: int | None
    max_staleness: int | None
    max_attempts: int | None
    max_times: int | None
    returns: bool
    eviction: str
    expire_by: str
    version: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    leases: dict[int, set[str]] = field(default_factory=dict)

    def of(self, *statuses: str, task: str | None = None) -> list[str]:
        """Return the uids of groups with these statuses, oldest first."""
        found = [
            uid
            for uid, row in self.rows.items()
            if row.status in statuses and task in (None, row.task)
        ]
        return sorted(found, key=lambda uid: self.rows[uid].id)

    def put(self, newcomers: Mapping[str, Row]) -> None:
        """Add or replace groups, or raise and change nothing."""
        before = {uid: replace(row) for uid, row in self.rows.items()}
        for uid in newcomers:
            self.rows.pop(uid, None)
        useful = {uid for uid, row in newcomers.items() if row.status not in (*DEAD, "archived")}
        try:
            if self.eviction == "lowest_priority":
                self.rows |= newcomers
                if useful & self.evict(0) and not self.of(*IDLE):
                    raise FullError
            else:
                self.evict(len(useful))
                self.rows |= newcomers
                self.evict(0)  # no other group is evicted for one that cannot be drawn
        except FullError:
            self.rows = before
            raise

    def evict(self, count: int, spared: Iterable[str] = ()) -> set[str]:
        """Evict groups until `count` more fit into the capacity; return the uids of the evicted."""
        stored = sum(row.status != "archived" for row in self.rows.values())
        excess = 0 if self.capacity is None else max(0, stored + count - self.capacity)
        spared = set(spared)
        idle = self.of(*IDLE)
        if self.eviction == "newest":
            idle.reverse()
        elif self.eviction == "lowest_priority":
            idle.sort(key=lambda uid: self.rows[uid].priority)
        victims = [uid for uid in self.of(*DEAD) + idle if uid not in spared][:excess]
        if len(victims) < excess:
            raise FullError
        for uid in victims:
            self.rows[uid].status = "archived"
            self.rows[uid].has_payload = False
        return set(victims)

    def update(self, uids: Iterable[str], status: str) -> type[Exception] | None:
        """Update the status of groups as `Buffer.update` does; return the type of its error."""
        rows = {uid: self.rows[uid] for uid in uids}
        if any(row.status == "leased" for row in rows.values()):
            return GroupLeasedError
        dropped = [row for row in rows.values() if row.status == "archived" and row.is_empty]
        if status != "archived" and (dropped or not all(row.has_payload for row in rows.values())):
            return PayloadGoneError
        if status == "completed" and any(row.is_empty for row in rows.values()):
            return InvalidInputError
        changed = [row for row in rows.values() if row.status != status]
        unarchived = [row for row in changed if row.status == "archived"]
        usable = sum(self.is_usable(status, row) for row in unarchived)
        if usable:
            try:
                self.evict(usable, spared=rows)
            except FullError:
                return BufferFullError
        for uid, row in rows.items():
            if row in changed:
                self.release(uid)
                row.attempts = 0 if status == "completed" else row.attempts
                self.set_status(row, status)
        if unarchived and status != "archived":
            self.evict(0)
        return None

    def is_usable(self, status: str, row: Row) -> bool:
        """Whether a group with this status counts as usable, so that others are evicted for it."""
        row = replace(row)
        self.set_status(row, status)
        return row.status not in DEAD

    def set_status(self, row: Row, status: str) -> None:
        """Set the status of a group, or "expired" if it is too stale to be drawn."""
        limit = self.max_staleness
        token = row.newest if self.expire_by == "newest_token" else row.version
        too_old = None not in (token, limit) and self.version - (token or 0) > (limit or 0)
        row.status = "expired" if status in IDLE and too_old else status

    def advance(self, version: int) -> int:
        self.version = version
        before = self.of(*IDLE)
        for uid in before:
            self.set_status(self.rows[uid], self.rows[uid].status)
        return len(before) - len(self.of(*IDLE))

    def sample(self, uids: Iterable[str]) -> None:
        for uid in uids:
            row = self.rows[uid]
            row.times += 1
            if self.max_times is not None and row.times >= self.max_times:
                row.status = "archived"

    def lease(self, lease_id: int, uids: list[str]) -> None:
        self.leases[lease_id] = set(uids)
        for uid in uids:
            row = self.rows[uid]
            row.leased_from, row.status, row.times = row.status, "leased", row.times + 1

    def release(self, uid: str) -> None:
        """Remove a group from its lease, if any."""
        for leased in self.leases.values():
            leased.discard(uid)

    def ack(self, uid: str) -> None:
        row = self.rows[uid]
        self.release(uid)
        if not self.returns or (self.max_times is not None and row.times >= self.max_times):
            row.status = "archived"
        else:
            row.attempts = 0
            self.set_status(row, row.leased_from)

    def undo(self, uid: str) -> None:
        row = self.rows[uid]
        self.release(uid)
        row.attempts, row.times = row.attempts + 1, row.times - 1
        if self.max_attempts is not None and row.attempts >= self.max_attempts:
            row.status = "failed"
        else:
            self.set_status(row, row.leased_from)

    def complete(self, uid: str) -> None:
        row = self.rows[uid]
        self.release(uid)
        row.attempts = 0
        self.set_status(row, "completed")

    def time_passes(self) -> None:
        """Let all leases and claims expire and all deadlines pass."""
        for leased in list(self.leases.values()):
            for uid in list(leased):
                self.undo(uid)
        for uid in self.of("pending"):
            row = self.rows[uid]
            row.claims_expired += row.claim is not None
            row.claim = None
            closes = row.closes or row.claims_expired == self.max_attempts
            if closes and len(row.rewards) >= row.least:
                self.complete(uid)
            elif closes:
                row.status = "failed"
