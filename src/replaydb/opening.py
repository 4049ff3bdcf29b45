"""Things that are opened with `await` or with `async with`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar


class _Closing(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


T = TypeVar("T", bound=_Closing)


class Opening(Generic[T]):
    """A `T` about to be: `await` gives it, `async with` gives it and closes it."""

    def __init__(self, opened: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._opened = opened
        self._it: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._opened().__await__()

    async def __aenter__(self) -> T:
        self._it = await self._opened()
        return await self._it.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._it is not None:
            await self._it.__aexit__(kind, error, traceback)
