"""Groups that cannot be decoded or stored, such that they do not block the others.

A group that cannot be decoded is released, its attempt count is incremented (`Lease.fail`), and it
becomes `failed` at `max_attempts`. For a lease, the other groups are released unchanged and the
error is raised. A sample can be the last one of its groups, so its other groups are returned.

If a trainer would generate a group that cannot be stored again and again, an empty group that is
`failed` is stored in its place, with the error as its `status_reason`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import replaydb as rdb
from replaydb import blocking

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SECONDS = 60.0
#: Statuses of groups that can be read without a lease.
_STATUSES = ("completed", "aborted", "expired", "failed", "filtered")


def decoded(lease: blocking.Lease, decode: Callable[[rdb.StoredGroup], T]) -> list[T]:
    """Decode the groups of a lease. End the lease if a group cannot be decoded.

    Raises:
        Exception: The error of `decode` for the first group that it could not decode.
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
    """Decode the group of a lease of one, like `decoded`, without blocking the event loop."""
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
    """Decode groups that are not leased. Errors are logged if some groups can be decoded.

    No attempt is counted for a group that was leased since it was read, or sampled for the last
    time.

    Raises:
        Exception: The error of `decode` for the first group, if no group could be decoded.
    """
    found, errors = _attempt(groups, decode)
    if errors:
        which = rdb.col.id.in_(list(errors))
        with suppress(rdb.ReplayDBError):  # such as a rate limit: the decoding error matters more
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
    """Return the decoded groups, and the errors of the other groups by id."""
    found, errors = [], {}
    for group in groups:
        try:
            found.append(decode(group))
        except Exception as error:
            error.add_note(f"while group {group.id} of task {group.task_name!r} was decoded")
            errors[group.id] = error
    return found, errors


def _reason(errors: dict[int, Exception]) -> str:
    """Return a status reason with the first error."""
    return reason_of("decoded", next(iter(errors.values())))


def put_failed(buffer: blocking.Buffer, error: Exception, task_name: str, **fields: Any) -> None:
    """Put an empty `failed` group in place of a group that cannot be stored, and log the error.

    Args:
        buffer: The buffer.
        error: The error, which becomes the `status_reason`.
        task_name: Task of the group.
        fields: Other arguments of `EpisodeGroup`.
    """
    logger.error("a group cannot be stored, %s: %s", fields, error)
    empty = rdb.EpisodeGroup(task_name, [], status="failed", **fields)
    ids = buffer.put(empty, on_duplicate="ignore")
    buffer.update(ids, statuses="failed", reason=reason_of("stored", error))


def reason_of(what: str, error: Exception) -> str:
    """Return an error as a status reason, in ASCII: the group cannot be `what`."""
    return f"cannot be {what}: {type(error).__name__}: {ascii(str(error))[1:-1]}"[:500]
