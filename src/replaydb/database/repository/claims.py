"""Claims: trajectories that one process continues until it ends them, or the claim expires.

The same for episodes that lack a value.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, Update, select, update

from replaydb.database.repository import incremental_groups, trajectories
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.repository.trajectories import EPISODE
from replaydb.database.runtime import revisions
from replaydb.database.runtime.prepared import prepared
from replaydb.database.runtime.session import Session
from replaydb.database.statements.selections import of_tasks
from replaydb.database.tables.expressions import among
from replaydb.database.tables.schema import compatibility, episode_group, group, trajectory
from replaydb.domain.episodes import GroupStatus
from replaydb.errors import ClaimExpiredError

_this = trajectory.c


class ClaimTerms(NamedTuple):
    """What a claim is made for.

    Attributes:
        owner: Name of the process.
        ttl: Seconds until it expires.
        whole_groups: Whether a claim is made of all open trajectories of a group.
        where: Condition that groups must meet.
        missing: What is claimed: the name of a value that episodes lack, or `EPISODE`.
    """

    owner: str
    ttl: float
    whole_groups: bool = False
    where: ColumnElement[bool] | None = None
    missing: str = EPISODE


def claim(buffer: LockedBuffer, terms: ClaimTerms, uids: Sequence[str]) -> dict[str, list[Any]]:
    """Claim trajectories of locked tasks, those of the oldest groups first.

    Args:
        buffer: The buffer.
        terms: What the claims are made for.
        uids: A uid for each claim that may be made.

    Returns:
        The rows of the trajectories of each claim, by its uid, before they were claimed.
    """
    rows = buffer.session.run(_select_free(buffer, terms, len(uids)))
    by_claim: dict[Any, list[Any]] = {}
    for row in rows:
        key = row.group_id if terms.whole_groups else (row.group_id, row.position)
        by_claim.setdefault(key, []).append(row)
    claims = dict(zip(uids, by_claim.values(), strict=False))
    for uid, mine in claims.items():
        positions = [row.position for row in mine]
        values = uid, terms.owner, buffer.now, buffer.now + timedelta(seconds=terms.ttl)
        group_id = mine[0].group_id
        buffer.session.postpone(claim_trajectories(group_id, positions, terms.missing, *values))
    return claims


def may_claim(session: Session, buffer_id: int, missing: str) -> bool:
    """Whether something that is missing in a buffer may be free. A read without locks."""
    is_free = _this.claim_uid.is_(None) | (_this.expires_at <= session.now())
    is_free &= (_this.missing == missing) & _this.unusable_reason.is_(None)
    mine = (_this.buffer_id == buffer_id, is_free)
    [(found,)] = session.run(select(select(_this.group_id).where(*mine).exists()))
    return bool(found)


def extend(session: Session, claim_uid: str, ttl: float) -> None:
    """Extend a claim to `ttl` seconds from now.

    Raises:
        ClaimExpiredError: It has ended.
        ClientTooOldError: The store has come to need a newer replaydb.
    """
    now = session.now()
    rows: Any = session.run(extend_claim(claim_uid, now, now + timedelta(seconds=ttl)))
    if not rows:
        raise ClaimExpiredError(claim_uid)
    revisions.check_usable(rows[0].min_client)


def release(
    buffer: LockedBuffer,
    claim_uid: str,
    reason: str | None,
    *,
    attempts: int,
    is_last: bool = False,
) -> None:
    """End a claim of trajectories of locked tasks. They can be claimed again, unless `is_last`.

    Raises:
        ClaimExpiredError: It has ended.
    """
    rows = buffer.session.run(select_claimed(buffer.id, claim_uid))
    if not rows or any(row.expires_at <= buffer.now for row in rows):
        raise ClaimExpiredError(claim_uid)
    _end(buffer, rows, reason or "released", attempts, is_last=is_last)


def reap(buffer: LockedBuffer, most: int) -> bool:
    """End up to `most` expired claims of trajectories of locked tasks.

    Returns:
        Whether there are no others.
    """
    rows = buffer.session.run(select_overdue(buffer.id, buffer.task_states, buffer.now, most))
    for uid in dict.fromkeys(row.claim_uid for row in rows):
        mine = [row for row in rows if row.claim_uid == uid]
        where = ", ".join(f"{row.group_id}/{row.position}" for row in mine)
        text = f"claim {uid} of {mine[0].claimed_by!r} expired: group/position {where}"
        buffer.report(logging.WARNING, text)
    _end(buffer, rows, "claim expired", 1)
    return len(rows) < most


def _end(
    buffer: LockedBuffer,
    rows: Sequence[Any],
    reason: str,
    attempts: int,
    *,
    is_last: bool = False,
) -> None:
    """End the claims of trajectories, given by their rows, and count attempts."""
    limit = buffer.settings.max_attempts
    closed: set[int] = set()
    begin: set[int] = set()
    for row in rows:
        tried = row.attempts + attempts
        why = reason if is_last else None
        if attempts > 0 and limit is not None and tried >= limit:
            why = f"{reason} (attempt {tried} of {limit})"
        where = row.group_id, row.position, row.missing
        buffer.session.postpone(release_trajectory(*where, tried, why))
        if why is not None:
            closed.add(row.group_id)
            begin |= {row.group_id} if row.missing == EPISODE else set()
            text = f"group {row.group_id}: position {row.position} gets no {row.missing}: {why}"
            buffer.report(logging.WARNING, text)
    incremental_groups.settle_all(buffer, closed, begin=begin)


def task_names(session: Session, buffer_id: int, claim_uid: str) -> set[str]:
    """Return the names of the tasks of the trajectories of a claim."""
    return {row.task_name for row in session.run(select_claimed_tasks(buffer_id, claim_uid))}


def _select_free(buffer: LockedBuffer, terms: ClaimTerms, most: int) -> Select[Any]:
    """Select the trajectories for up to `most` claims."""
    is_free = _this.unusable_reason.is_(None) & _this.claim_uid.is_(None)
    is_free &= _this.missing == terms.missing
    eligible = (
        (group.buffer_id == buffer.id)
        & (group.group_status == GroupStatus.PENDING.value)
        & of_tasks(buffer.task_states)
    )
    if terms.where is not None:
        eligible &= terms.where
    columns = (trajectory, group.group_uid, group.task_name)
    statement = (
        select(*columns)
        .join_from(trajectory, episode_group, group.id == _this.group_id)
        .where(_this.buffer_id == buffer.id, is_free, eligible)
        .order_by(_this.group_id, _this.position)
    )
    if not terms.whole_groups:
        return statement.limit(most)
    other = trajectory.alias()
    is_claimed = select(other.c.position).where(
        other.c.group_id == group.id,
        other.c.missing == terms.missing,
        other.c.claim_uid.is_not(None),
    )
    some = (
        select(_this.group_id)
        .join_from(trajectory, episode_group, group.id == _this.group_id)
        .where(_this.buffer_id == buffer.id, is_free, eligible, ~is_claimed.exists())
        .group_by(_this.group_id)
        .order_by(_this.group_id)
        .limit(most)
        .cte("claimable")
        .prefix_with("MATERIALIZED", dialect="postgresql")  # else run for each row, without ANALYZE
    )
    return statement.where(_this.group_id.in_(select(some.c.group_id)))


@prepared
def claim_trajectories(
    of_group: Any, positions: Any, what: Any, uid: Any, owner: Any, now: Any, end: Any
) -> Update:
    """Claim what is missing at some positions of a group."""
    return (
        update(trajectory)
        .where(_this.group_id == of_group, among(_this.position, positions), _this.missing == what)
        .values(claim_uid=uid, claimed_by=owner, claimed_at=now, expires_at=end)
    )


@prepared
def extend_claim(uid: Any, now: Any, end: Any) -> Any:
    """Extend a claim that has not expired. Return what the store requires of clients."""
    needed = select(compatibility.c.min_client).scalar_subquery().label("min_client")
    mine = (_this.claim_uid == uid, _this.expires_at > now)
    return update(trajectory).where(*mine).values(expires_at=end).returning(needed)


@prepared
def release_trajectory(of_group: Any, at: Any, what: Any, tried: Any, reason: Any) -> Update:
    """End the claim of what is missing at a position. With a reason, it stays missing."""
    return (
        update(trajectory)
        .where(_this.group_id == of_group, _this.position == at, _this.missing == what)
        .values(attempts=tried, unusable_reason=reason, **trajectories.NO_CLAIM)
    )


@prepared
def select_claimed(buffer_id: Any, uid: Any) -> Select[Any]:
    """Select the trajectories of a claim, and lock them."""
    return (
        select(trajectory)
        .where(_this.buffer_id == buffer_id, _this.claim_uid == uid)
        .order_by(_this.group_id, _this.position)
        .with_for_update()
    )


@prepared
def select_claimed_tasks(buffer_id: Any, uid: Any) -> Select[Any]:
    """Select the names of the tasks of the trajectories of a claim."""
    return (
        select(group.task_name)
        .join_from(trajectory, episode_group, group.id == _this.group_id)
        .where(_this.buffer_id == buffer_id, _this.claim_uid == uid)
        .distinct()
    )


def select_overdue(buffer_id: int, tasks: Collection[str], now: datetime, most: int) -> Select[Any]:
    """Select up to `most` trajectories of tasks whose claim has expired, and lock them."""
    return (
        select(trajectory)
        .join_from(trajectory, episode_group, group.id == _this.group_id)
        .where(_this.buffer_id == buffer_id, _this.expires_at <= now, of_tasks(tasks))
        .order_by(_this.group_id, _this.position)
        .limit(most)
        .with_for_update(of=trajectory)
    )


def overdue_claims(buffer_id: Any, now: Any) -> Select[Any]:
    """Select the trajectories of a buffer whose claim has expired."""
    return select(_this.group_id).where(
        _this.buffer_id == buffer_id, _this.expires_at <= now, _this.expires_at.is_not(None)
    )
