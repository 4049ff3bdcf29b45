"""Loader: batches made ready while the trainer works on the one before."""

from __future__ import annotations

import asyncio
import contextlib
import typing
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict

from replaydb import checks
from replaydb.batch.batch import Batch
from replaydb.buffer.lease import Lease
from replaydb.cancellation import to_the_end
from replaydb.errors import InvalidInputError, PayloadGoneError, UnknownDrawError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

# What a loader hands out: batches, where nothing is made of them.
if TYPE_CHECKING:
    Collated = TypeVar("Collated", default=Batch)
else:
    Collated = typing.TypeVar("Collated")

#: How a loader gets a batch for a step, and the lease it is under, if any.
Draw = Callable[[int], Awaitable[tuple[Batch, Lease | None]]]


class LoaderState(TypedDict):
    """Where a loader stands, as JSON.

    Attributes:
        step: Step of the batch that comes next.
        draws: Ids of draws whose batches were made ready, but not handed out yet.
    """

    step: int
    draws: list[int]


class Loader(Generic[Collated]):
    """An async iterator of batches; got from `Buffer.loader`.

    Up to `prefetch` batches are drawn, decoded and collated in the background, in order, from the
    first one asked for on. `async with` (or `aclose`) ends that. An error is raised in the place
    of the batch that failed; the loader can be asked again.

    With leases, asking for a batch acks the one before. Leaving `async with` acks the one in hand,
    or nacks it where the block raises; `aclose` nacks it. What was prefetched goes back.
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
        self._collate = collate
        self._prefetch = prefetch
        self._next_step = first_step
        self._end = None if num_steps is None else first_step + num_steps
        self._to_redraw: deque[int] = deque()
        self._ready: deque[_Item] = deque()
        self._making: int | None = None  # the draw of what is being collated
        self._producer: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._in_hand: _Item | None = None

    @property
    def lease(self) -> Lease | None:
        """The lease of the batch in hand: ack it by hand to write a cursor with it."""
        return None if self._in_hand is None else self._in_hand.lease

    def state_dict(self) -> LoaderState:
        """Where the loader stands, to be kept with a checkpoint of the model."""
        made = (*(item.draw_id for item in self._ready), self._making)
        draws = [draw_id for draw_id in made if draw_id is not None]
        return {"step": self._next_step, "draws": [*draws, *self._to_redraw]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood: with its step, and the batches it had drawn already.

        Batches whose groups are gone since are drawn anew; those under leases always are.

        Raises:
            InvalidInputError: Batches were asked for already, or this is not a state.
        """
        if self._producer is not None or self._ready:
            raise InvalidInputError("state", "a loader that has not begun", "one that has")
        try:
            step, draws = state["step"], list(state["draws"])
        except (KeyError, TypeError) as error:
            raise InvalidInputError("state", "what state_dict gave", repr(state)) from error
        self._next_step = checks.whole_number("state['step']", step)
        self._to_redraw = deque(checks.ids("state['draws']", draws))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Collated:
        if (lease := self.lease) is not None:
            try:
                await lease.__aexit__(None, None, None)
            except Exception:
                self._in_hand = None  # it is over; who was cancelled instead may ask again
                raise
        self._in_hand = None
        if self._end is not None and self._next_step >= self._end:
            raise StopAsyncIteration
        item = await self._take()
        if item.error is not None:
            raise item.error
        self._in_hand = item
        self._next_step += 1
        made: Collated = item.value
        return made

    def _take_back(self) -> None:
        """Return the batch in hand to those that are ready: its caller was interrupted."""
        if self._in_hand is not None:
            self._ready.appendleft(self._in_hand)
            self._in_hand = None
            self._next_step -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await to_the_end(self._close(error))

    async def aclose(self) -> None:
        """Stop drawing; give back what is under lease. Idempotent."""
        await to_the_end(self._close(_closed()))

    async def _close(self, error: BaseException | None) -> None:
        """Stop drawing, then end the leases: else it would draw the groups that go back."""
        if self._producer is not None:
            self._producer.cancel()
            await asyncio.wait([self._producer])
            self._producer = None
        lease, self._in_hand = self.lease, None
        unused = [item.lease for item in self._ready if item.lease is not None]
        self._ready.clear()
        try:
            if lease is not None:
                await _end(lease, error)
        finally:
            for one in unused:
                await _end(one, _closed())

    async def _take(self) -> _Item:
        """The next item, as soon as there is one."""
        if self._prefetch == 0:
            return self._ready.popleft() if self._ready else await self._make(self._next_step)
        if self._producer is None or self._producer.done():
            self._producer = asyncio.create_task(self._produce())
        while not self._ready:
            await self._wait()
        item = self._ready.popleft()
        self._notify()
        return item

    async def _produce(self) -> None:
        """Keep `prefetch` items ready, until one is an error."""
        while True:
            while len(self._ready) >= self._prefetch:
                await self._wait()
            step = self._next_step + len(self._ready)
            if self._end is not None and step >= self._end:
                return
            self._ready.append(item := await self._make(step))
            self._notify()
            if item.error is not None:
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
                await to_the_end(_end(lease, _closed()))
            if not isinstance(error, Exception):
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

    async def _wait(self) -> None:
        await self._changed.wait()

    def _notify(self) -> None:
        """Wake whoever waits for the items that are ready to become more or fewer."""
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class _Item:
    """A batch made ready, collated if that was asked for; or the error that came instead."""

    draw_id: int | None = None
    lease: Lease | None = None
    value: Any = None
    error: Exception | None = None


def _closed() -> BaseException:
    """Reason for returning the groups of a batch that was not used."""
    return asyncio.CancelledError("the loader was closed")


async def _end(lease: Lease, error: BaseException | None) -> None:
    """Ack what is left of a lease, or nack it because of an error."""
    await lease.__aexit__(type(error) if error is not None else None, error, None)
