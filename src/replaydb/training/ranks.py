"""Calls that the ranks of a process group make together. They exchange results and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from replaydb.errors import (
    CorruptPayloadError,
    InvalidInputError,
    PayloadGoneError,
    ReplayDBError,
)

T = TypeVar("T")


def position(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: 0 and 1 if there are no others."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


class Ranks:
    """The ranks of a process group.

    All of them make the same calls in the same order. Results that are exchanged must be plain
    values, such as numbers, text, lists and tuples.

    Attributes:
        rank: Index of this process.
        size: Number of processes.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Find the position of this process.

        Raises:
            InvalidInputError: It is not in the group.
        """
        self._group = group
        self.rank, self.size = position(group)
        if self.rank < 0:
            raise InvalidInputError("group", "a process group that this rank is in", group)

    def same(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the values of a call by name, after a comparison with those of all ranks.

        Raises:
            InvalidInputError: A value is not the same on all ranks.
            Exception: The call has failed on some rank.
        """
        given = self.on_all(call)
        mine = given[self.rank]
        for name in mine:
            # Ranks that make different calls have different names.
            values = [one.get(name) for one in given]
            if any(one != values[0] for one in values):
                received = f"{values} on ranks 0 to {self.size - 1}"
                raise InvalidInputError(name, "the same on all ranks", received)
        return mine

    def on_first(self, call: Callable[[], T]) -> T:
        """Make a call on the first rank. All ranks return its result or raise its error."""
        result, error = _tried(call) if self.rank == 0 else (None, None)
        if self.size > 1:
            sent = [(result, _portable(error))]
            first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
            dist.broadcast_object_list(sent, first, group=self._group)
            if self.rank:
                [(result, error)] = sent
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def on_all(self, call: Callable[[], T]) -> list[T]:
        """Make a call on every rank. All return the results of all, or raise the first error."""
        result, error = _tried(call)
        results = self._gathered((result, _portable(error)))
        _raise_first(error, results)
        return [one for one, _ in results]  # type: ignore[misc]  # none has failed

    def if_all(self, call: Callable[[], T]) -> T:
        """Make a call on every rank. Each returns its own result if none has failed."""
        result, error = _tried(call)
        _raise_first(error, self._gathered((None, _portable(error))))
        return result  # type: ignore[return-value]

    def _gathered(self, mine: T) -> list[T]:
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._group)
        return found


def _tried(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None) -> Exception | None:
    """Return an error as it is sent to other ranks: without groups and objects of the caller."""
    if error is None or not isinstance(error, ReplayDBError):
        return error and RuntimeError(f"{type(error).__name__}: {error}")
    sent = copy.copy(error)
    if isinstance(sent, InvalidInputError):
        sent.actual = str(sent.actual)
    if isinstance(sent, CorruptPayloadError | PayloadGoneError):
        sent.batch = None
    return sent


def _raise_first(mine: Exception | None, results: list[tuple[Any, Exception | None]]) -> None:
    """Raise this rank's own error, or else that of the first rank that has one."""
    for error in (mine, *(one for _, one in results)):
        if error is not None:
            raise error
