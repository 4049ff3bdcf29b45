"""Concurrent actions in the middle of a transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from sqlalchemy.util import await_only

T = TypeVar("T")


def await_in_transaction(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Wait for a coroutine inside a function of the repository, on either engine.

    SQLite runs these functions in the thread of the connection, PostgreSQL in a greenlet of the
    event loop.
    """
    if threading.current_thread() is threading.main_thread():
        return await_only(coroutine)
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
