"""Objects that are opened with `await` or `async with`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T", bound=AbstractAsyncContextManager[Any])


class Opening(Coroutine[Any, Any, T]):
    """A coroutine that returns a `T`, and an async context manager that also closes it.

    Like every coroutine it runs once, and starts only when awaited or entered.
    """

    def __init__(self, opened: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._opened = opened
        self._it: T | None = None

    @cached_property
    def _coroutine(self) -> Coroutine[Any, Any, T]:
        return self._opened()  # created late: Python warns of coroutines never awaited

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Resume the coroutine, see `collections.abc.Coroutine`."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the coroutine, see `collections.abc.Coroutine`."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Close the coroutine. A `T` that was opened stays open."""
        self._coroutine.close()

    async def __aenter__(self) -> T:
        self._it = await self._coroutine
        await self._it.__aenter__()
        return self._it

    async def __aexit__(self, *exc_info: Any) -> None:
        if self._it is not None:
            await self._it.__aexit__(*exc_info)
