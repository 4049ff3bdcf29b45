"""Decoding of drawn groups, so that one that cannot be decoded does not block the others.

A group whose decoding fails goes back with one more attempt (`Lease.fail`), and becomes `failed` at
`max_attempts`. The other groups of a lease go back unchanged and the error is raised. A sample may
have been the last one of its groups, so the other groups of a sample are returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import replaydb as rdb
from replaydb import blocking

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SECONDS = 60.0
#: Statuses that groups are read in without a lease.
_STATUSES = ("completed", "aborted", "expired", "failed", "filtered")


def decoded(lease: blocking.Lease, decode: Callable[[rdb.StoredGroup], T]) -> list[T]:
    """Decode the groups of a lease, which ends if one of them cannot be decoded.

    Raises:
        Exception: What `decode` raised for the first group that it could not decode.
    """
    try:
        found, errors = _attempt(lease.batch, decode)
    except BaseException:  # interrupted: no group is at fault
        lease.fail([], reason="interrupted")
        raise
    if errors:
        lease.fail(list(errors), reason=_reason(errors))
        raise next(iter(errors.values()))
    return found


async def decoded_one(lease: rdb.Lease, decode: Callable[[rdb.StoredGroup], T]) -> T:
    """Do the same as `decoded` for a lease of one group, without blocking the event loop."""
    found, errors = _attempt(lease.batch, decode)
    if errors:
        await lease.fail(list(errors), reason=_reason(errors))
        raise next(iter(errors.values()))
    return found[0]


def decoded_sample(
    buffer: blocking.Buffer,
    groups: Iterable[rdb.StoredGroup],
    decode: Callable[[rdb.StoredGroup], T],
) -> list[T]:
    """Decode groups that no lease holds. Errors are logged if some groups can be decoded.

    A group that was taken since it was read, or sampled for the last time, has no more attempts.

    Raises:
        Exception: What `decode` raised for the first group, if no group could be decoded.
    """
    found, errors = _attempt(groups, decode)
    if errors:
        which = rdb.col.id.in_(list(errors))
        with suppress(rdb.ReplayDBError):  # such as a rate limit: what is raised says more
            lease = buffer.lease(
                len(errors), ttl=_SECONDS, statuses=_STATUSES, where=which, at_least=0
            )
            lease.fail(lease.batch.ids, reason=_reason(errors))
        if not found:
            raise next(iter(errors.values()))
        for group_id, error in errors.items():
            logger.error("Group %d cannot be decoded and is left out", group_id, exc_info=error)
    return found


def _attempt(
    groups: Iterable[rdb.StoredGroup], decode: Callable[[rdb.StoredGroup], T]
) -> tuple[list[T], dict[int, Exception]]:
    """What could be decoded; and the errors of the other groups by their ids."""
    found, errors = [], {}
    for group in groups:
        try:
            found.append(decode(group))
        except Exception as error:
            error.add_note(f"while group {group.id} of task {group.task_name!r} was decoded")
            errors[group.id] = error
    return found, errors


def _reason(errors: dict[int, Exception]) -> str:
    """The first error, in characters that any database stores."""
    error = next(iter(errors.values()))
    return f"cannot be decoded: {type(error).__name__}: {ascii(str(error))[1:-1]}"[:500]
