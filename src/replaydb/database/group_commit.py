"""Group commit: calls that arrive while a transaction runs share the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

#: What one transaction takes at most, so that nobody waits long for the commit of others.
MOST_BYTES = 32 << 20
MOST_ITEMS = 512


@dataclass(frozen=True, slots=True)
class Submission(Generic[Item]):
    """Something to be committed.

    Attributes:
        item: What.
        keys: No two submissions with a key in common share a transaction.
        num_bytes: How large it is.
    """

    item: Item
    keys: Collection[Hashable]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Item, Result]):
    submission: Submission[Item]
    future: asyncio.Future[Result]


class WithdrawnError(Exception):
    """A caller was cancelled while its transaction ran: it is to be rolled back."""


#: Runs items in one transaction, and before the commit calls its second argument, which raises
#: `WithdrawnError`. Returns a result, or the error, of each item.
Commit = Callable[[Sequence[Item], Callable[[], None]], Awaitable[Sequence[Result | Exception]]]


class GroupCommit(Generic[Item, Result]):
    """Commits submissions in the order they come, as many at a time as there are.

    One submission that fails does not fail its neighbours: they are committed again, each alone.
    One whose caller is cancelled before the commit is not stored.
    """

    def __init__(self, commit: Commit[Item, Result]) -> None:
        self._commit = commit
        self._queue: deque[_Waiting[Item, Result]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, submission: Submission[Item]) -> Result:
        """Wait until the submission is durable.

        Raises:
            Exception: Whatever its commit raised; it left nothing behind.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(submission, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def drain(self) -> None:
        """Wait until everything submitted has been answered."""
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def _work(self) -> None:
        while self._queue:
            batch = self._next_batch()
            try:
                await self._settle(batch)
            except WithdrawnError:
                self._queue.extendleft(reversed(batch))
            except Exception as error:
                if len(batch) == 1:
                    _answer(batch[0], error)
                else:
                    for one in batch:
                        await self._settle_alone(one)

    async def _settle_alone(self, one: _Waiting[Item, Result]) -> None:
        try:
            await self._settle([one])
        except WithdrawnError:
            return
        except Exception as error:
            _answer(one, error)

    async def _settle(self, batch: Sequence[_Waiting[Item, Result]]) -> None:
        def check() -> None:
            if any(one.future.cancelled() for one in batch):
                raise WithdrawnError

        outcomes = await self._commit([one.submission.item for one in batch], check)
        for one, outcome in zip(batch, outcomes, strict=True):
            _answer(one, outcome)

    def _next_batch(self) -> list[_Waiting[Item, Result]]:
        batch: list[_Waiting[Item, Result]] = []
        keys: set[Hashable] = set()
        num_bytes = 0
        while self._queue and len(batch) < MOST_ITEMS:
            head = self._queue[0]
            if head.future.cancelled():
                self._queue.popleft()
                continue
            num_bytes += head.submission.num_bytes
            if batch and (num_bytes > MOST_BYTES or not keys.isdisjoint(head.submission.keys)):
                break
            keys.update(head.submission.keys)
            batch.append(self._queue.popleft())
        return batch


def _answer(one: _Waiting[Item, Result], outcome: Result | Exception) -> None:
    if one.future.cancelled():
        return
    if isinstance(outcome, Exception):
        one.future.set_exception(outcome)
    else:
        one.future.set_result(outcome)
