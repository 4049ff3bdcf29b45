"""Requests that are larger than the messages of PostgreSQL's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg
from sqlalchemy.exc import DBAPIError

#: A server closes the connection when it receives a message of 2^30 bytes or more.
MAX_BYTES = 1_000_000_000


def is_too_large(error: BaseException) -> bool:
    """Whether the parameters of a statement that has failed do not fit into one message.

    The server does not say so, and asyncpg only of messages of 2^31 bytes and more.
    """
    if isinstance(error, BufferError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    sent: Any = error.params
    if isinstance(sent, list | tuple):  # a statement that SQLAlchemy has run
        return message_bytes(sent) > MAX_BYTES
    return isinstance(sent, dict) and sent.get("num_bytes", 0) > MAX_BYTES  # set by the session


def refusal(error: BaseException) -> str | None:
    """Return why no server can accept a statement that has failed; None if that is not the reason.

    asyncpg itself refuses some, such as one with too many parameters.
    """
    if is_too_large(error):
        return (
            f"a statement has more than {MAX_BYTES} bytes, which PostgreSQL does not accept. "
            "Nothing was stored: use smaller values"
        )
    if not isinstance(error, DBAPIError) or error.connection_invalidated or error.orig is None:
        return None
    is_asyncpgs = isinstance(error.orig.__cause__, asyncpg.InterfaceError)
    return str(error.orig) if is_asyncpgs else None


def message_bytes(parameters: Sequence[Any]) -> int:
    """Return the size of the parameters of a statement, or of the largest row of parameters."""
    rows = [row for row in parameters if isinstance(row, tuple)]  # each is a message
    return max(map(_num_bytes, rows), default=_num_bytes(parameters))


def _num_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0
