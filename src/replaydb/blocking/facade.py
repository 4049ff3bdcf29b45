"""Stores, buffers, leases and loaders whose methods wait; made from the async ones."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from replaydb import buffer as asynchronous
from replaydb import replacement
from replaydb import store as async_store
from replaydb.batch.batch import Batch
from replaydb.blocking.thread import EventLoopThread
from replaydb.buffer.loader import Collated, LoaderState
from replaydb.database.transactions import PATIENCE_SECONDS
from replaydb.episodes import EpisodeGroup
from replaydb.errors import InvalidInputError
from replaydb.opening import Opening
from replaydb.settings import BufferSettings

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Facade:
    """Something of a store, and the thread that it lives in."""

    def __init__(self, thread: EventLoopThread, wrapped: Any) -> None:
        self._thread = thread
        self._wrapped = wrapped

    def __repr__(self) -> str:
        return f"blocking {self._wrapped!r}"


def _blocking(
    method: Callable[Concatenate[Any, P], Awaitable[R]],
) -> Callable[Concatenate[Any, P], R]:
    """A method that blocks until the asynchronous one has returned."""

    @functools.wraps(method)
    def call(self: _Facade, /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def work() -> R:
            return await method(self._wrapped, *args, **kwargs)

        return self._thread.run(work)

    return call


def _making(
    method: Callable[Concatenate[Any, P], Awaitable[Any]], kind: Callable[[EventLoopThread, Any], R]
) -> Callable[Concatenate[Any, P], R]:
    """A method that blocks, for one whose result has asynchronous methods of its own."""

    @functools.wraps(method)
    def make(self: _Facade, /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def work() -> Any:
            return await method(self._wrapped, *args, **kwargs)

        return kind(self._thread, self._thread.run(work, unwanted=_given_back))

    return make


async def _given_back(made: Any) -> None:
    """A lease that never reached its caller is held by nobody."""
    if isinstance(made, asynchronous.Lease):
        error = KeyboardInterrupt()
        await made.__aexit__(type(error), error, None)


def _loading(
    method: Callable[Concatenate[Any, P], asynchronous.Loader[Collated]],
) -> Callable[Concatenate[Any, P], Loader[Collated]]:
    """A method that makes a blocking loader, which waits for nothing yet."""

    @functools.wraps(method)
    def call(self: _Facade, /, *args: P.args, **kwargs: P.kwargs) -> Loader[Collated]:
        return Loader(self._thread, method(self._wrapped, *args, **kwargs))

    return call


def _opening(opened: Callable[P, Opening[async_store.Store]]) -> Callable[P, Store]:
    """`Store.open`, which also starts the thread."""

    @functools.wraps(opened)
    def call(*args: P.args, **kwargs: P.kwargs) -> Store:
        async def work() -> async_store.Store:
            return await opened(*args, **kwargs)

        thread = EventLoopThread()
        try:
            store = Store(thread, thread.run(work))
        except BaseException:
            thread.close()
            raise
        thread.close_with(store._wrapped.close)
        return store

    return call


def _copying(
    method: Callable[Concatenate[Any, Any, P], Awaitable[R]],
) -> Callable[Concatenate[Any, Buffer, P], R]:
    """`Buffer.copy_to`, also into a buffer of another store."""

    @functools.wraps(method)
    def call(self: Buffer, other: Buffer, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(other, Buffer):
            raise InvalidInputError("other", "another blocking Buffer", repr(other))
        target = other._wrapped if other._thread is self._thread else _Elsewhere(other)

        async def work() -> R:
            return await method(self._wrapped, target, *args, **kwargs)

        return self._thread.run(work)

    return call  # type: ignore[return-value]  # names of what Concatenate adds are not typed


def _over_buffer(
    function: Callable[Concatenate[T, asynchronous.Buffer, P], Awaitable[R]],
) -> Callable[Concatenate[T, Buffer, P], R]:
    """A function over a blocking buffer, for one over an asynchronous buffer."""

    @functools.wraps(function)
    def call(groups: T, buffer: Buffer, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(buffer, Buffer):
            raise InvalidInputError("buffer", "a blocking Buffer", repr(buffer))

        async def work() -> R:
            return await function(groups, buffer._wrapped, *args, **kwargs)

        return buffer._thread.run(work)

    return call  # type: ignore[return-value]  # names of what Concatenate adds are not typed


class _Elsewhere:
    """A buffer of another store, whose calls are waited for in a thread."""

    def __init__(self, target: Buffer) -> None:
        self._target = target

    async def put(self, groups: Iterable[EpisodeGroup], **options: Any) -> list[int]:
        return await asyncio.to_thread(self._target.put, groups, **options)


class Lease(_Facade):
    """A `replaydb.Lease`; `with` acks what is left when the block ends, or nacks it."""

    _wrapped: asynchronous.Lease

    @property
    def id(self) -> int:
        """Id of the lease; 0 where there were no groups to hold."""
        return self._wrapped.id

    @property
    def ttl(self) -> float:
        """Seconds it lasts from its last extension."""
        return self._wrapped.ttl

    @property
    def batch(self) -> Batch:
        """The groups it was given, or held when it was opened."""
        return self._wrapped.batch

    ack = _blocking(asynchronous.Lease.ack)
    nack = _blocking(asynchronous.Lease.nack)
    reject = _blocking(asynchronous.Lease.reject)
    extend = _blocking(asynchronous.Lease.extend)

    def __enter__(self) -> Self:
        try:
            self._thread.run(self._wrapped.__aenter__)
        except BaseException:
            self._thread.run(lambda: _given_back(self._wrapped))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.run(lambda: self._wrapped.__aexit__(kind, error, traceback))


class Loader(_Facade, Generic[Collated]):
    """A `replaydb.Loader` as a plain iterator; it goes on drawing between calls."""

    _wrapped: asynchronous.Loader[Collated]

    @property
    def lease(self) -> Lease | None:
        """The lease of the batch in hand."""
        held = self._wrapped.lease
        return None if held is None else Lease(self._thread, held)

    def state_dict(self) -> LoaderState:
        """Where it stands."""

        async def work() -> LoaderState:
            return self._wrapped.state_dict()

        return self._thread.run(work)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood."""
        self._wrapped.load_state_dict(state)

    close = _blocking(asynchronous.Loader.aclose)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Collated:
        async def work() -> list[Collated]:
            try:
                return [await anext(self._wrapped)]
            except StopAsyncIteration:  # which no coroutine can raise
                return []

        made = self._thread.run(work)
        if not made:
            raise StopIteration
        return made[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.run(lambda: self._wrapped.__aexit__(kind, error, traceback))


class Buffer(_Facade):
    """A `replaydb.Buffer`."""

    _wrapped: asynchronous.Buffer

    @property
    def id(self) -> int:
        """Id of the buffer in its store."""
        return self._wrapped.id

    @property
    def name(self) -> str:
        """Name of the buffer in its store."""
        return self._wrapped.name

    @property
    def settings(self) -> BufferSettings:
        """The settings, as this process last saw them."""
        return self._wrapped.settings

    @property
    def policy_version(self) -> int:
        """The policy version, as this process last saw it."""
        return self._wrapped.policy_version

    add_episode = _blocking(asynchronous.Buffer.add_episode)
    admission = _blocking(asynchronous.Buffer.admission)
    advance_policy = _blocking(asynchronous.Buffer.advance_policy)
    count = _blocking(asynchronous.Buffer.count)
    copy_to = _copying(asynchronous.Buffer.copy_to)
    cursor = _blocking(asynchronous.Buffer.cursor)
    delete = _blocking(asynchronous.Buffer.delete)
    drain = _blocking(asynchronous.Buffer.drain)
    draws = _blocking(asynchronous.Buffer.draws)
    find = _blocking(asynchronous.Buffer.find)
    get = _blocking(asynchronous.Buffer.get)
    lease = _making(asynchronous.Buffer.lease, Lease)
    open_lease = _making(asynchronous.Buffer.open_lease, Lease)
    revoke = _blocking(asynchronous.Buffer.revoke)
    leases = _blocking(asynchronous.Buffer.leases)
    loader = _loading(asynchronous.Buffer.loader)
    metrics = _blocking(asynchronous.Buffer.metrics)
    open_group = _blocking(asynchronous.Buffer.open_group)
    peek = _blocking(asynchronous.Buffer.peek)
    prompts = _blocking(asynchronous.Buffer.prompts)
    put = _blocking(asynchronous.Buffer.put)
    redraw = _blocking(asynchronous.Buffer.redraw)
    sample = _blocking(asynchronous.Buffer.sample)
    stats = _blocking(asynchronous.Buffer.stats)
    update = _blocking(asynchronous.Buffer.update)
    update_priorities = _blocking(asynchronous.Buffer.update_priorities)
    update_settings = _blocking(asynchronous.Buffer.update_settings)
    wait_until = _blocking(asynchronous.Buffer.wait_until)


class Store(_Facade):
    """A `replaydb.Store`."""

    _wrapped: async_store.Store

    open = staticmethod(_opening(async_store.Store.open))

    @property
    def run(self) -> str:
        """Name of this run."""
        return self._wrapped.run

    buffer = _making(async_store.Store.buffer, Buffer)
    buffers = _blocking(async_store.Store.buffers)
    runs = _blocking(async_store.Store.runs)

    def close(self, *, timeout: float | None = PATIENCE_SECONDS) -> None:
        """Finish the calls under way, let go of the database, end the thread. Idempotent.

        In a forked process, where the store cannot be used, it does nothing.

        Args:
            timeout: As for `replaydb.Store.close`.
        """
        self._thread.close(lambda: self._wrapped.close(timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


replace_uninformative = _over_buffer(replacement.replace_uninformative)
