"""Concurrent actions in the middle of a transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from sqlalchemy.util import await_only

T = TypeVar("T")


def await_in_transaction(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Wait for a coroutine of the test's event loop inside a function of the repository.

    SQLite runs these functions in the thread of the connection, PostgreSQL in a greenlet of the
    event loop of its backend, which continues meanwhile.
    """
    running = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return running.result()
    return await_only(asyncio.wrap_future(running))
