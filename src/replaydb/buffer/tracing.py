"""OpenTelemetry spans for the calls of stores, buffers and leases.

If `opentelemetry` is installed (extra `replaydb[opentelemetry]`), every awaited public method is a
span named like `replaydb.Buffer.put`; otherwise the methods are unchanged. Without a configured
SDK, the API's no-op tracer costs about a microsecond per call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

from replaydb.errors import ReplayDBError
from replaydb.util.opening import Opening

C = TypeVar("C", bound=type)

_IS_INSTALLED = find_spec("opentelemetry") is not None and (
    find_spec("opentelemetry.trace") is not None
)


def traced(kind: C) -> C:
    """Class decorator: wrap the awaited public methods of a class in spans."""
    if not _IS_INSTALLED:
        return kind
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        span_name = f"replaydb.{kind.__name__}.{name}"
        wrap = _with_span if inspect.iscoroutinefunction(method) else _with_span_if_opening
        setattr(kind, name, wrap(span_name, method))
    return kind


def _with_span(
    name: str, method: Callable[..., Coroutine[Any, Any, Any]]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        from opentelemetry import trace

        with trace.get_tracer("replaydb").start_as_current_span(name) as span:
            if span.is_recording() and isinstance(buffer := getattr(self, "name", None), str):
                span.set_attribute("replaydb.buffer", buffer)
            try:
                result = await method(self, *args, **kwargs)
            except ReplayDBError as error:
                span.set_attribute("error.type", type(error).__name__)
                raise
            if span.is_recording() and (count := _count(result)) is not None:
                span.set_attribute("replaydb.count", count)
            return result

    return call


def _with_span_if_opening(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = method(self, *args, **kwargs)
        if not isinstance(made, Opening):
            return made
        opened = _with_span(name, lambda _: made)
        return Opening(lambda: opened(self))

    return call


def _count(result: Any) -> int | None:
    """Return the number of groups of a result, if it has one."""
    batch = getattr(result, "batch", result)
    if isinstance(batch, int) and not isinstance(batch, bool):
        return batch
    return len(batch) if hasattr(batch, "__len__") else None
