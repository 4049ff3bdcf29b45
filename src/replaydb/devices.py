"""CUDA device and stream of a thread, for work that another thread does for it.

torch is only looked up in `sys.modules`: if it is not imported, no device is in use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any


def current_stream() -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the current device and stream of this thread current in another.

    Both belong to a thread: in a new one, the first device and its default stream are current. The
    function returns a context for one thread. Without a CUDA device in use it has no effect.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return nullcontext
    return partial(torch.cuda.stream, torch.cuda.current_stream())
