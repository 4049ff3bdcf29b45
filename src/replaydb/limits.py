"""Limits of memory, so that a damaged or hostile payload cannot exhaust it.

They apply to the whole process. Assign a larger number before you read larger data, for example
`replaydb.limits.MAX_ARRAY_BYTES = 2**40`.
"""

from __future__ import annotations

from replaydb.errors import InvalidInputError

#: Bytes of the columns of one part of a payload, after expansion. A part that claims more is not
#: expanded, and counts as damaged. A larger one cannot be put.
MAX_PART_BYTES = 16 << 30
#: Bytes of one array or tensor that is made from the tokens of an episode or a batch. It can be
#: much larger than what is stored, because turns can share a long context.
MAX_ARRAY_BYTES = 64 << 30


def check_array(num_bytes: int) -> None:
    """Check the size of an array before it is made.

    Raises:
        InvalidInputError: It is more than `MAX_ARRAY_BYTES`.
    """
    if num_bytes > MAX_ARRAY_BYTES:
        expected = f"at least {num_bytes}, the size of an array that this call makes"
        raise InvalidInputError("replaydb.limits.MAX_ARRAY_BYTES", expected, MAX_ARRAY_BYTES)


def check_part(num_bytes: int) -> None:
    """Check the size of a part before it is written.

    Raises:
        InvalidInputError: It is more than `MAX_PART_BYTES`.
    """
    if num_bytes > MAX_PART_BYTES:
        expected = f"at least {num_bytes}, the size of a part of a group that is put"
        raise InvalidInputError("replaydb.limits.MAX_PART_BYTES", expected, MAX_PART_BYTES)
