"""CUDA device and stream of a thread, for work that another thread does for it.

torch is only looked up in `sys.modules`: if it is not imported, no device is in use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def on_current_stream(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function so that any thread runs it on the current device and stream of this one.

    Both belong to a thread: in a new one, the first device and its default stream are current. If
    no CUDA device is in use, the function is returned unchanged.
    """
    # Another thread may be importing torch. Before it defines `cuda`, no device is in use.
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return function
    stream = cuda.current_stream()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with cuda.stream(stream):
            return function(*args, **kwargs)

    return run
