"""Loader: batches prepared in the background while the trainer works on the previous one."""

from __future__ import annotations

import asyncio
import contextlib
import typing
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict

from replaydb.batch.batch import Batch
from replaydb.buffer.lease import Lease
from replaydb.domain import checks
from replaydb.errors import InvalidInputError, PayloadGoneError, UnknownDrawError
from replaydb.util.cancellation import run_to_completion
from replaydb.util.devices import on_current_stream

if TYPE_CHECKING:
    from typing_extensions import TypeVar

# What a loader returns: batches, or what `collate` makes of them.
if TYPE_CHECKING:
    Collated = TypeVar("Collated", default=Batch)
else:
    Collated = typing.TypeVar("Collated")

#: Draws the batch of a step. Returns it with its lease, if any.
Draw = Callable[[int], Awaitable[tuple[Batch, Lease | None]]]


class LoaderState(TypedDict):
    """Position of a loader, as JSON.

    Attributes:
        step: Step of the next batch.
        draws: Ids of draws whose batches were prefetched but not returned yet.
    """

    step: int
    draws: list[int]


def checked_state(state: Mapping[str, Any]) -> LoaderState:
    """Check for a result of `state_dict`.

    Raises:
        InvalidInputError: `state` is something else.
    """
    try:
        step, draws = state["step"], list(state["draws"])
    except (KeyError, TypeError) as error:
        raise InvalidInputError("state", "a result of state_dict", repr(state)) from error
    return {
        "step": checks.whole_number("state['step']", step),
        "draws": checks.ids("state['draws']", draws),
    }


class Loader(Generic[Collated]):
    """An async iterator of batches. Get it from `Buffer.loader`.

    From the first request on, up to `prefetch` batches are drawn, decoded and collated in the
    background, in order. Leaving `async with`, or `aclose`, stops that. If a batch fails, its error
    is raised in its place; the next iteration continues.

    `collate` runs in a thread, with the CUDA device and stream that were current where the loader
    was created. So tensors that it copies to a GPU can be used in this stream.

    With leases, asking for the next batch acks the current one. Leaving `async with` acks the
    current batch, or nacks it if the block raised; `aclose` nacks it. Prefetched batches are
    released.

    A loader has one consumer, and cannot be used after it was closed. A request while another one
    runs, or after the end, raises `InvalidInputError`; so does one that waits when the loader is
    closed.
    """

    def __init__(
        self,
        draw: Draw,
        redraw: Callable[[int], Awaitable[Batch]],
        collate: Callable[[Batch], Collated] | None,
        *,
        prefetch: int,
        first_step: int,
        num_steps: int | None,
    ) -> None:
        self._draw = draw
        self._redraw = redraw
        self._collate = None if collate is None else on_current_stream(collate)
        self._prefetch = prefetch
        self._next_step = first_step
        self._end = None if num_steps is None else first_step + num_steps
        self._to_redraw: deque[int] = deque()
        self._ready: deque[_Item] = deque()
        self._making: int | None = None  # id of the draw that is being collated
        self._producer: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._current: _Item | None = None
        self._requesting = asyncio.Lock()
        self._is_closed = False

    @property
    def lease(self) -> Lease | None:
        """Lease of the current batch, or None. Ack it yourself to write a cursor with the ack."""
        return None if self._current is None else self._current.lease

    def state_dict(self) -> LoaderState:
        """Return the position of the loader as JSON, to store in a checkpoint."""
        made = (*(item.draw_id for item in self._ready), self._making)
        draws = [draw_id for draw_id in made if draw_id is not None]
        return {"step": self._next_step, "draws": [*draws, *self._to_redraw]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the position of another loader: with its step and its prefetched batches.

        A prefetched batch whose groups no longer exist is replaced by a new draw. Batches with
        leases always are.

        Args:
            state: Result of `state_dict`.

        Raises:
            InvalidInputError: A batch was already asked for, the loader was closed, or `state` is
                not a result of `state_dict`.
        """
        self._check_open()
        if self._producer is not None or self._ready:
            raise InvalidInputError("state", "a call before the first batch", "a running loader")
        checked = checked_state(state)
        self._next_step = checked["step"]
        self._to_redraw = deque(checked["draws"])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Collated:
        self._check_open()
        if self._requesting.locked():
            raise InvalidInputError("loader", "one request at a time", "a second one")
        async with self._requesting:
            return await self._next()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInputError("loader", "one that is open", "one that was closed")

    async def _next(self) -> Collated:
        """Ack the current batch and return the next one."""
        if (lease := self.lease) is not None:
            try:
                await lease.__aexit__(None, None, None)
            except Exception:
                self._current = None  # its lease has ended; after a cancellation the batch stays
                raise
        self._current = None
        if self._end is not None and self._next_step >= self._end:
            raise StopAsyncIteration
        item = await self._take()
        if item.error is not None:
            raise item.error
        self._current = item
        self._next_step += 1
        made: Collated = item.value
        return made

    def _put_back(self) -> None:
        """Put the current batch back before the prefetched ones: its caller was interrupted."""
        if self._current is not None:
            self._ready.appendleft(self._current)
            self._current = None
            self._next_step -= 1

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await run_to_completion(self._close(error))

    async def aclose(self) -> None:
        """Stop prefetching and release all leases. Idempotent."""
        await run_to_completion(self._close(_closed()))

    async def _close(self, error: BaseException | None) -> None:
        """Stop drawing, then end the leases: the producer must not draw the released groups."""
        self._is_closed = True
        self._notify()  # ends a request that waits for its batch
        self._to_redraw = deque(self.state_dict()["draws"])  # for a later `state_dict`
        await self._stop()
        async with self._requesting:  # its lease has been acked
            lease, self._current = self.lease, None
            unused = [item.lease for item in self._ready if item.lease is not None]
            self._ready.clear()
            try:
                if lease is not None:
                    await _end(lease, error)
            finally:
                for one in unused:
                    await _end(one, _closed())

    async def _stop(self) -> None:
        """Stop drawing, and wait until the batch that is being made is released."""
        if self._producer is not None:
            self._producer.cancel()
            await asyncio.wait([self._producer])
            self._producer = None

    async def _take(self) -> _Item:
        """Wait for the next item and return it."""
        self._check_open()  # it may have been closed while the batch before was acked
        is_idle = self._producer is None or self._producer.done()
        if is_idle and (self._prefetch or not self._ready):
            self._producer = asyncio.create_task(self._produce())
        try:
            while not self._ready:
                await self._changed.wait()
                self._check_open()
        except asyncio.CancelledError:
            if not self._prefetch:
                await run_to_completion(self._stop())
            raise
        item = self._ready.popleft()
        self._notify()
        return item

    async def _produce(self) -> None:
        """Prefetch items until one is an error. Without prefetching, make one item."""
        while True:
            while len(self._ready) >= max(self._prefetch, 1):
                await self._changed.wait()
            step = self._next_step + len(self._ready)
            if self._end is not None and step >= self._end:
                return
            self._ready.append(item := await self._make(step))
            self._notify()
            if item.error is not None or not self._prefetch:
                return

    async def _make(self, step: int) -> _Item:
        lease: Lease | None = None
        try:
            batch, lease = await self._drawn(step)
            if lease is not None:
                await lease.__aenter__()
            else:
                self._making = batch.draw_id
            value: Any = batch
            if self._collate is not None:
                value = await asyncio.to_thread(self._collate, batch)
            return _Item(self._making, lease, value)
        except BaseException as error:
            if lease is not None:
                await run_to_completion(_end(lease, _closed()))
            if isinstance(error, asyncio.CancelledError):
                raise
            return _Item(error=error)
        finally:
            self._making = None

    async def _drawn(self, step: int) -> tuple[Batch, Lease | None]:
        while self._to_redraw:
            with contextlib.suppress(PayloadGoneError, UnknownDrawError):
                batch = await self._redraw(self._to_redraw[0])
                self._to_redraw.popleft()
                return batch, None
            self._to_redraw.popleft()
        return await self._draw(step)

    def _notify(self) -> None:
        """Wake the tasks that wait for a change of the prefetched items."""
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class _Item:
    """A prefetched batch, collated if requested, or the error that occurred instead."""

    draw_id: int | None = None
    lease: Lease | None = None
    value: Any = None
    error: BaseException | None = None  # a task would raise SystemExit in the event loop


def _closed() -> BaseException:
    """Return the reason for releasing the groups of an unused batch."""
    return asyncio.CancelledError("the loader was closed")


async def _end(lease: Lease, error: BaseException | None) -> None:
    """Ack the rest of a lease, or nack it because of an error."""
    await lease.__aexit__(type(error) if error is not None else None, error, None)
