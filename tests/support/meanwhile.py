"""Something else that happens in the middle of a transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from sqlalchemy.util import await_only

T = TypeVar("T")


def wait_here(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Wait for it inside a function of the repository, wherever the engine runs that.

    SQLite's run in the thread of their connection, PostgreSQL's beside the event loop.
    """
    if threading.current_thread() is threading.main_thread():
        return await_only(coroutine)
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
