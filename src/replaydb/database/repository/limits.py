"""Rate limits: whether puts and draws may go on. The buffer and all its tasks must be locked."""

from __future__ import annotations

from typing import assert_never

from replaydb.database.repository import aging
from replaydb.database.repository.locked import LockedBuffer
from replaydb.errors import InvalidInputError, RateLimitedError
from replaydb.settings import MinSize, Queue, SamplesPerInsert


def check_put(buffer: LockedBuffer, count: int) -> None:
    """Whether `count` groups more may come in.

    Raises:
        RateLimitedError: Not now.
        InvalidInputError: Never.
    """
    limit = buffer.settings.rate_limit
    match limit:
        case None | MinSize():
            return
        case Queue(size=size):
            if count > size:
                raise InvalidInputError("groups", f"no more at once than {limit} lets in", count)
            arriving = sum(account.num_pending for account in buffer.accounts.values())
            waiting = _available(buffer) + arriving
            if waiting + count > size:
                aging.check_expired(buffer)  # what is too stale does not wait
                raise RateLimitedError(f"{waiting} groups wait to be drawn ({limit})")
        case SamplesPerInsert():
            inserts = buffer.row.limited_inserts + count
            if inserts <= limit.min_size:
                return
            highest = limit.min_size * limit.ratio + limit.error_buffer
            if count * limit.ratio > 2 * limit.error_buffer:
                raise InvalidInputError("groups", f"no more at once than {limit} lets in", count)
            if inserts * limit.ratio - buffer.row.limited_samples > highest:
                raise RateLimitedError(
                    f"{buffer.row.limited_inserts} groups put, {buffer.row.limited_samples} drawn: "
                    f"{count} more must wait for draws ({limit})"
                )
        case _:
            assert_never(limit)


def check_draw(buffer: LockedBuffer, count: int) -> None:
    """Whether `count` groups may be drawn.

    Raises:
        RateLimitedError: Not now.
        InvalidInputError: Never.
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
                raise InvalidInputError("n", f"at most what {limit} lets out at once", count)
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
    return sum(account.num_available for account in buffer.accounts.values())
