"""Threads in which a blocking call must not wait, because it could wait for itself.

Your code runs in the threads of a store, too: functions that are passed to calls, logging handlers,
and what the garbage collector finalizes. The collector runs in any thread at any time, even while
that thread holds a lock that a store needs, such as the one of a logging handler.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping


class _Current(threading.local):
    is_of_a_store = False
    is_collecting = False


_current = _Current()


def enter() -> None:
    """Mark the current thread as one of a store, until the thread ends."""
    _current.is_of_a_store = True


def is_of_a_store() -> bool:
    """Whether the current thread is one of a store."""
    return _current.is_of_a_store


def can_wait() -> bool:
    """Whether this is neither a thread of a store nor called by the garbage collector."""
    return not (_current.is_of_a_store or _current.is_collecting)


def _note_collection(phase: str, info: Mapping[str, int]) -> None:
    _current.is_collecting = phase == "start"


gc.callbacks.append(_note_collection)
