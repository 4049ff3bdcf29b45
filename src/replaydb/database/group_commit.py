"""Group commit: calls that arrive while a transaction runs share the next one."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from replaydb.cancellation import to_the_end
from replaydb.errors import DatabaseUnavailableError, OutcomeUnknownError, StoreClosedError

Item = TypeVar("Item")
Result = TypeVar("Result")

#: What one transaction takes at most, so that nobody waits long for the commit of others.
MOST_BYTES = 32 << 20
MOST_ITEMS = 512
#: A shared transaction is rolled back for callers who leave it so often; then each gets its own.
SHARED_ATTEMPTS = 2


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


class WithdrawnError(Exception):
    """A caller left while its transaction ran: it is to be rolled back."""


class _Waiting(Generic[Item, Result]):
    """A submission, and the caller who waits for its answer."""

    def __init__(self, submission: Submission[Item], since: float, end: float) -> None:
        self.submission = submission
        self.since = since
        self.end = end
        self.answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()


class Gate:
    """Whether callers may still leave a transaction that is under way for them.

    It is entered by what runs in the transaction, which may be in another thread than the callers,
    and shut when that ends: then they have to wait for what becomes of the commit.
    """

    def __init__(self, batch: Sequence[_Waiting[Any, Any]]) -> None:
        self._batch = batch
        self._is_open = True
        self._lock = threading.Lock()

    @property
    def hear_by(self) -> float:
        """When the time of the first of the callers is up."""
        return min(caller.end for caller in self._batch)

    def open(self) -> None:
        """An attempt begins, or has come to nothing: callers may leave."""
        with self._lock:
            self._is_open = True

    def __enter__(self) -> None:
        self.open()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Shut it, or raise `WithdrawnError` where callers have left."""
        if kind is not None:
            return
        with self._lock:
            if any(caller.answer.cancelled() for caller in self._batch):
                raise WithdrawnError
            self._is_open = False

    def leave(self, caller: _Waiting[Any, Any]) -> bool:
        """Let a caller go, if it is not too late: then its submission is not stored."""
        with self._lock:
            return self._is_open and caller.answer.cancel()

    def forsake(self, caller: _Waiting[Any, Any]) -> None:
        """Let a caller go who cannot be told: if it is not stored yet, it is not to be."""
        with self._lock:
            caller.answer.cancel()


@dataclass(frozen=True, slots=True)
class _Running(Generic[Item, Result]):
    """A transaction under way."""

    gate: Gate
    batch: Sequence[_Waiting[Item, Result]]
    task: asyncio.Future[Any]

    def end_if_left(self) -> None:
        """What nobody waits for must not hold up those who come next."""
        if all(caller.answer.cancelled() for caller in self.batch):
            self.task.cancel()


#: Runs items in one transaction, in time; enters the gate with every attempt. Returns a result, or
#: the error, of each item.
Commit = Callable[[Sequence[Item], Gate, float], Awaitable[Sequence[Result | Exception]]]


class GroupCommit(Generic[Item, Result]):
    """Commits submissions in the order they come, as many at a time as there are.

    One submission that fails does not fail its neighbours: they are committed again, each alone.
    One whose caller is cancelled, or runs out of time, before the commit is not stored. Where the
    database cannot be reached, all who have waited for it are told so at once.

    Args:
        commit: Runs items in one transaction.
        allowance: Seconds without any commit after which the database is given up, by the bytes
            of a transaction.
        settling_seconds: What it may take, beyond the end of a submission, to find out what became
            of its commit.
    """

    def __init__(
        self,
        commit: Commit[Item, Result],
        allowance: Callable[[int], float],
        settling_seconds: Callable[[], float],
    ) -> None:
        self._commit = commit
        self._allowance = allowance
        self._settling_seconds = settling_seconds
        self._queue: deque[_Waiting[Item, Result]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._running: _Running[Item, Result] | None = None
        self._last_commit = float("-inf")

    async def submit(self, submission: Submission[Item], end: float | None = None) -> Result:
        """Wait until the submission is durable.

        Args:
            submission: What to commit.
            end: When to stop waiting, a time of the event loop; None: when the database is given
                up.

        Raises:
            DatabaseUnavailableError: The time is up, and nothing was stored.
            OutcomeUnknownError: The time is up, and nobody could say whether it was.
            Exception: Whatever its commit raised; it left nothing behind.
        """
        now = asyncio.get_running_loop().time()
        end = math.inf if end is None else end
        one: _Waiting[Item, Result] = _Waiting(submission, now, end)
        self._queue.append(one)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            for seconds in (end - now, self._settling_seconds()):
                await _answered(one, seconds)
                if not one.answer.done() and self._leave(one):
                    raise DatabaseUnavailableError("no answer came in time; nothing was stored")
            if not one.answer.done():
                self._forsake(one)
                raise OutcomeUnknownError(
                    "nobody could say in time whether this was committed; repeating the call is "
                    "safe if it names what it writes"
                )
        except asyncio.CancelledError:
            if not self._leave(one):  # a commit that is under way must not come any later
                await to_the_end(_answered(one, self._settling_seconds()))
                one.answer.add_done_callback(_seen)
                if not one.answer.done():
                    self._forsake(one)
            raise
        return one.answer.result()

    async def drain(self) -> None:
        """Wait until everything submitted has been answered."""
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def give_up(self) -> None:
        """Answer everything submitted with an error: nobody waits for it any longer."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        while self._queue:
            _answer(self._queue.popleft(), StoreClosedError())

    def _leave(self, caller: _Waiting[Item, Result]) -> bool:
        """Whether the caller of a submission is out of it, and nothing of it is stored."""
        running = self._running
        if running is None or caller not in running.batch:
            return caller.answer.cancel()
        if not running.gate.leave(caller):
            return False
        running.end_if_left()
        return True

    def _forsake(self, caller: _Waiting[Item, Result]) -> None:
        """Nobody waits any longer for what becomes of a commit."""
        if (running := self._running) is not None:
            running.gate.forsake(caller)
            running.end_if_left()

    async def _work(self) -> None:
        while self._queue:
            batch = self._next_batch()
            for _ in range(SHARED_ATTEMPTS):
                if not await self._try(batch):
                    break
            for caller in batch:  # whoever has no answer yet gets one of its own
                await self._try([caller])

    async def _try(self, batch: Sequence[_Waiting[Item, Result]]) -> bool:
        """Commit those of a batch that are not answered yet. Returns whether some have left it."""
        batch = [caller for caller in batch if not caller.answer.done()]
        began = asyncio.get_running_loop().time()
        try:
            if batch:
                await self._attempt(batch)
        except WithdrawnError:
            return True
        except OutcomeUnknownError as error:
            _fail(batch, error)
        except DatabaseUnavailableError as error:
            _fail([*batch, *(caller for caller in self._queue if caller.since <= began)], error)
        except Exception as error:
            if len(batch) == 1:
                _fail(batch, error)
        return False

    async def _attempt(self, batch: Sequence[_Waiting[Item, Result]]) -> None:
        """Commit a batch in one transaction, and answer it."""
        gate = Gate(batch)
        num_bytes = sum(caller.submission.num_bytes for caller in batch)
        since = max(min(caller.since for caller in batch), self._last_commit)
        end = since + self._allowance(num_bytes)
        items = [caller.submission.item for caller in batch]
        running = asyncio.ensure_future(self._commit(items, gate, end))
        self._running = _Running(gate, batch, running)
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            running.cancel()
            await to_the_end(asyncio.wait([running]))
            _fail(batch, StoreClosedError())
            raise
        finally:
            self._running = None
        if running.cancelled():
            raise WithdrawnError
        outcomes = running.result()
        self._last_commit = asyncio.get_running_loop().time()
        for caller, outcome in zip(batch, outcomes, strict=True):
            _answer(caller, outcome)

    def _next_batch(self) -> list[_Waiting[Item, Result]]:
        batch: list[_Waiting[Item, Result]] = []
        keys: set[Hashable] = set()
        num_bytes = 0
        while self._queue and len(batch) < MOST_ITEMS:
            head = self._queue[0]
            if head.answer.done():
                self._queue.popleft()
                continue
            num_bytes += head.submission.num_bytes
            if batch and (num_bytes > MOST_BYTES or not keys.isdisjoint(head.submission.keys)):
                break
            keys.update(head.submission.keys)
            batch.append(self._queue.popleft())
        return batch


async def _answered(caller: _Waiting[Any, Any], seconds: float) -> None:
    """Wait for the answer to a submission, for at most this many seconds."""
    await asyncio.wait([caller.answer], timeout=None if seconds == math.inf else seconds)


def _answer(caller: _Waiting[Any, Result], outcome: Result | Exception) -> None:
    if caller.answer.done():
        return
    if isinstance(outcome, Exception):
        caller.answer.set_exception(outcome)
    else:
        caller.answer.set_result(outcome)


def _fail(several: Iterable[_Waiting[Any, Any]], error: Exception) -> None:
    for caller in several:
        _answer(caller, error)


def _seen(answer: asyncio.Future[Any]) -> None:
    """Nobody is left to be told."""
    if not answer.cancelled():
        answer.exception()
