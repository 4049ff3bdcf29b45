"""Rate limits of puts and draws. The buffer and all its tasks must be locked."""

from __future__ import annotations

from typing import assert_never

from replaydb.database.repository import aging
from replaydb.database.repository.locked import LockedBuffer
from replaydb.domain.settings import MinSize, Queue, SamplesPerInsert
from replaydb.errors import InvalidInputError, RateLimitedError


def check_put(buffer: LockedBuffer, count: int) -> None:
    """Check that `count` more groups may be put.

    Raises:
        RateLimitedError: They may not be put now.
        InvalidInputError: The limit can never admit this many groups at once.
    """
    limit = buffer.settings.rate_limit
    match limit:
        case None | MinSize():
            return
        case Queue(size=size):
            if count > size:
                raise InvalidInputError("groups", f"no more at once than {limit} admits", count)
            pending = sum(task.num_pending for task in buffer.task_states.values())
            waiting = _available(buffer) + pending
            if waiting + count > size:
                aging.check_expired(buffer)  # groups that are too stale do not count
                raise RateLimitedError(f"{waiting} groups wait to be drawn ({limit})")
        case SamplesPerInsert():
            inserts = buffer.row.limited_inserts + count
            if inserts <= limit.min_size:
                return
            highest = limit.min_size * limit.ratio + limit.error_buffer
            if count * limit.ratio > 2 * limit.error_buffer:
                raise InvalidInputError("groups", f"no more at once than {limit} admits", count)
            if inserts * limit.ratio - buffer.row.limited_samples > highest:
                raise RateLimitedError(
                    f"{buffer.row.limited_inserts} groups put, {buffer.row.limited_samples} drawn: "
                    f"{count} more must wait for draws ({limit})"
                )
        case _:
            assert_never(limit)


def check_draw(buffer: LockedBuffer, count: int) -> None:
    """Check that `count` groups may be drawn.

    Raises:
        RateLimitedError: They may not be drawn now.
        InvalidInputError: The limit can never admit this many groups at once.
    """
    limit = buffer.settings.rate_limit
    match limit:
        case None | Queue():
            return
        case MinSize(size=size):
            available = _available(buffer)
            if available < size:
                raise RateLimitedError(f"{available} groups can be drawn ({limit})")
        case SamplesPerInsert():
            if count > 2 * limit.error_buffer:
                raise InvalidInputError("n", f"no more at once than {limit} admits", count)
            inserts, samples = buffer.row.limited_inserts, buffer.row.limited_samples + count
            lowest = limit.min_size * limit.ratio - limit.error_buffer
            if inserts < limit.min_size or inserts * limit.ratio - samples < lowest:
                raise RateLimitedError(
                    f"{inserts} groups put, {buffer.row.limited_samples} drawn: "
                    f"{count} more must wait for puts ({limit})"
                )
        case _:
            assert_never(limit)


def _available(buffer: LockedBuffer) -> int:
    return sum(task.num_available for task in buffer.task_states.values())
