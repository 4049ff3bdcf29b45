"""Group commit: calls that arrive while a transaction runs share the next one."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from replaydb.errors import DatabaseUnavailableError, OutcomeUnknownError, StoreClosedError
from replaydb.util.cancellation import run_to_completion

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Limits of one transaction, so that no caller waits long for the commit of others.
MOST_BYTES = 32 << 20
MOST_ITEMS = 512
#: Attempts to commit a batch in one transaction. A withdrawal rolls an attempt back. After the last
#: one, each remaining submission gets its own transaction.
SHARED_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Submission(Generic[Item]):
    """A request to commit one item.

    Attributes:
        item: Passed to `Commit`.
        keys: No two submissions with a key in common share a transaction.
        num_bytes: Size of the item.
    """

    item: Item
    keys: Collection[Hashable]
    num_bytes: int


class WithdrawnError(Exception):
    """A caller withdrew its submission: the transaction must be rolled back."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[Item, Result]):
    """A submission, and the answer that its caller waits for."""

    submission: Submission[Item]
    since: float
    end: float
    answer: asyncio.Future[Result]


class Gate:
    """Decides whether callers may still withdraw from the running transaction.

    The transaction, which may run in another thread, closes the gate just before COMMIT is sent:
    callers must then wait for the outcome.
    """

    def __init__(self, batch: Sequence[_Waiting[Any, Any]]) -> None:
        self._batch = batch
        self._is_open = True
        self._is_refused = False
        self._lock = threading.Lock()

    @property
    def answer_by(self) -> float:
        """The earliest deadline of the callers."""
        return min(caller.end for caller in self._batch)

    def open(self) -> None:
        """Let callers withdraw again. Call it when an attempt has ended without a commit."""
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        """Let no more callers withdraw, or raise `WithdrawnError` if some have."""
        with self._lock:
            if self._is_refused or any(caller.answer.cancelled() for caller in self._batch):
                raise WithdrawnError
            self._is_open = False

    def refuse(self) -> bool:
        """Withdraw all submissions. Returns False if they may be committed at the moment."""
        with self._lock:
            self._is_refused = True
            return self._is_open

    def withdraw(self, caller: _Waiting[Any, Any]) -> bool:
        """Withdraw a submission if the gate is open. Returns True if it will not be stored."""
        with self._lock:
            return self._is_open and caller.answer.cancel()

    def abandon(self, caller: _Waiting[Any, Any]) -> None:
        """Stop waiting for an unknown outcome. A later attempt does not store the submission."""
        with self._lock:
            caller.answer.cancel()


@dataclass(frozen=True, slots=True)
class _Running(Generic[Item, Result]):
    """A running transaction."""

    gate: Gate
    batch: Sequence[_Waiting[Item, Result]]
    since: float
    task: asyncio.Future[Any]

    def cancel_if_unused(self) -> None:
        """Cancel a transaction that no caller waits for, so that it does not delay the next one."""
        if all(caller.answer.cancelled() for caller in self.batch):
            self.task.cancel()


#: Runs items in one transaction until a deadline, and closes the gate before each COMMIT. Returns
#: the result or the error of each item.
Commit = Callable[[Sequence[Item], Gate, float], Awaitable[Sequence[Result | Exception]]]


class GroupCommit(Generic[Item, Result]):
    """Commits submissions in order. All that wait share a transaction, up to its limits.

    If a shared transaction fails, each of its submissions is tried again in a separate
    transaction.
    A submission whose caller is cancelled or times out before the commit is not stored. If the
    database cannot be reached, an attempt fails all submissions that were waiting when it began.

    Args:
        shown: URL of the database, for messages.
        commit: Runs items in one transaction.
        allowance: Returns the time limit of a transaction, in seconds, from its size in bytes. It
            counts from the oldest submission, or from the last commit if that is later.
        settling_seconds: Returns how far a call may exceed its deadline to learn the outcome of a
            commit, in seconds.
    """

    def __init__(
        self,
        shown: str,
        commit: Commit[Item, Result],
        allowance: Callable[[int], float],
        settling_seconds: Callable[[], float],
    ) -> None:
        self._shown = shown
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
            end: Deadline of the caller, a time of the event loop; None: the time limit of the
                transaction alone applies.

        Raises:
            DatabaseUnavailableError: The deadline has passed, and nothing was stored.
            OutcomeUnknownError: The deadline has passed, and the submission may have been stored.
            Exception: The error of its commit; nothing was stored.
        """
        loop = asyncio.get_running_loop()
        now, end = loop.time(), math.inf if end is None else end
        one: _Waiting[Item, Result] = _Waiting(submission, now, end, loop.create_future())
        self._queue.append(one)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            for seconds in (end - now, self._settling_seconds()):
                await _done(one.answer, seconds)
                if not one.answer.done() and self._withdraw(one):
                    raise DatabaseUnavailableError(
                        f"{self._shown}: no answer in time; nothing was stored"
                    )
            if not one.answer.done():
                self._abandon(one)
                raise self._outcome_unknown()
        except asyncio.CancelledError:
            if not self._withdraw(one):  # a running commit must not take effect after the return
                await run_to_completion(_done(one.answer, self._settling_seconds()))
                one.answer.add_done_callback(_retrieve_error)
                if not one.answer.done():
                    self._abandon(one)
            raise
        return one.answer.result()

    async def drain(self) -> None:
        """Wait until every submission has its answer."""
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def give_up(self) -> None:
        """Fail every submission with `StoreClosedError`."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        while self._queue:
            _answer(self._queue.popleft(), StoreClosedError())

    def _withdraw(self, caller: _Waiting[Item, Result]) -> bool:
        """Withdraw a submission if possible. Returns True if it will not be stored."""
        running = self._running
        if running is None or caller not in running.batch:
            return caller.answer.cancel()
        if not running.gate.withdraw(caller):
            return False
        running.cancel_if_unused()
        return True

    def _abandon(self, caller: _Waiting[Item, Result]) -> None:
        """Stop waiting for the outcome of a commit."""
        if (running := self._running) is not None:
            running.gate.abandon(caller)
            running.cancel_if_unused()

    async def _work(self) -> None:
        while self._queue:
            for running in self._attempts(self._next_batch()):
                self._running = running
                try:
                    await asyncio.wait([running.task])
                except asyncio.CancelledError:
                    await run_to_completion(self._end(running))
                    raise
                finally:
                    self._running = None

    async def _end(self, running: _Running[Item, Result]) -> None:
        """Cancel a transaction, unless it is being committed, and answer its callers."""
        is_unknown = False
        if not running.gate.refuse():
            await _done(running.task, self._settling_seconds())
            is_unknown = not running.task.done()
        running.task.cancel()
        await asyncio.wait([running.task])
        self._answer_all(running)
        _fail(running.batch, self._outcome_unknown() if is_unknown else StoreClosedError())

    def _attempts(
        self, batch: Sequence[_Waiting[Item, Result]]
    ) -> Iterator[_Running[Item, Result]]:
        """Begin the transactions of a batch, one after the other. Each has ended before the next.

        Those without an answer after the shared ones get one each.
        """
        shared, each = [batch] * SHARED_ATTEMPTS, ([caller] for caller in batch)
        were_withdrawn = True
        for several in chain(shared, each):
            left = [caller for caller in several if not caller.answer.done()]
            if left and (were_withdrawn or several is not batch):
                running = self._begin(left)
                yield running
                were_withdrawn = self._answer_all(running)

    def _begin(self, batch: Sequence[_Waiting[Item, Result]]) -> _Running[Item, Result]:
        """Begin to commit a batch in one transaction."""
        now, gate = asyncio.get_running_loop().time(), Gate(batch)
        num_bytes = sum(caller.submission.num_bytes for caller in batch)
        since = max(min(caller.since for caller in batch), self._last_commit)
        end = since + self._allowance(num_bytes)
        items = [caller.submission.item for caller in batch]
        return _Running(gate, batch, now, asyncio.ensure_future(self._commit(items, gate, end)))

    def _answer_all(self, ended: _Running[Item, Result]) -> bool:
        """Set the answers of a batch, unless callers withdrew. Returns whether they did."""
        batch = ended.batch
        if ended.task.cancelled():
            return True
        try:
            outcomes = ended.task.result()
        except WithdrawnError:
            return True
        except OutcomeUnknownError as error:
            _fail(batch, error)
        except DatabaseUnavailableError as error:
            late = (caller for caller in self._queue if caller.since <= ended.since)
            _fail([*batch, *late], error)
        except Exception as error:
            if len(batch) == 1:
                _fail(batch, error)
        else:
            self._last_commit = asyncio.get_running_loop().time()
            for caller, outcome in zip(batch, outcomes, strict=True):
                _answer(caller, outcome)
        return False

    def _outcome_unknown(self) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{self._shown}: no answer in time; the write may have been committed or not. "
            "Repeating the call is safe if it names the rows it writes, such as by group_uid"
        )

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


def _done(future: asyncio.Future[Any], seconds: float) -> Awaitable[object]:
    """Wait until it is done, for at most this many seconds."""
    return asyncio.wait([future], timeout=None if seconds == math.inf else seconds)


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


def _retrieve_error(answer: asyncio.Future[Any]) -> None:
    """Retrieve an error that no caller waits for, which asyncio would log otherwise."""
    if not answer.cancelled():
        answer.exception()
