"""The store for code that does not run in an event loop: same methods, same arguments.

    with replaydb.blocking.Store.open("sqlite:///grpo.db") as store:
        buffer = store.buffer("math")
        batch = buffer.sample(64, timeout=30)

One thread runs the event loop of a store; calls hand their work to it and wait. They may come
from any number of threads. Methods are made from the async ones, so there is nothing here to keep
in step: see `replaydb.Store` and `replaydb.Buffer` for what they do. A lease is taken by the call
(`with` then acks or nacks it), and a loader is a plain iterator.

A store does not outlive a fork: connections cannot be shared. In the child it raises
`NotSupportedError`; open another one there.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from replaydb import buffer as asynchronous
from replaydb import replacement
from replaydb import store as async_store
from replaydb.batch.batch import Batch
from replaydb.buffer.loader import LoaderState
from replaydb.database.transactions import PATIENCE_SECONDS
from replaydb.episodes import EpisodeGroup
from replaydb.errors import InvalidInputError, NotSupportedError, StoreClosedError
from replaydb.opening import Opening
from replaydb.policies import Prioritized, SimplePolicy
from replaydb.replacement import Replacement
from replaydb.settings import BufferSettings

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


#: What is left open when the process ends may take so long to end with it.
EXIT_SECONDS = 5.0


class _Call(Generic[R]):
    """Work in the event loop that another thread waits for, until it leaves."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, R]],
        unwanted: Callable[[R], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._work = work
        self._unwanted = unwanted
        self._task: asyncio.Task[None] | None = None
        self.answer: Future[R] = Future()
        self.ended = threading.Event()

    def start(self) -> None:
        """In the loop, first."""
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: self.ended.set())

    def leave(self) -> None:
        """In the loop, when nobody waits any more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            result = await self._work()
        except BaseException as error:
            if not self.answer.cancelled():
                self.answer.set_exception(error)
            return
        try:
            self.answer.set_result(result)
        except InvalidStateError:  # nobody waits for it any more
            if self._unwanted is not None:
                await self._unwanted(result)


class _Runner:
    """The thread and event loop of one store, and the process they belong to.

    The thread is a daemon, and what is left open is closed at exit: a script that ends without
    closing its store, as one that crashes does, must end.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            stopped = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), stopped))
            await stopped.wait()

        self._thread = threading.Thread(
            target=lambda: asyncio.run(serve()), name="replaydb", daemon=True
        )
        self._thread.start()
        self._loop, self._stopped = started.result()
        self._open = True
        atexit.register(self._at_exit)

    def run(
        self,
        work: Callable[[], Coroutine[Any, Any, R]],
        timeout: float | None = None,
        unwanted: Callable[[R], Coroutine[Any, Any, None]] | None = None,
    ) -> R:
        """Run in the event loop; wait for the result.

        Who is interrupted while waiting (by Ctrl-C) waits for the call to be cancelled, which is
        soon. A result that came nevertheless is given to `unwanted`.

        Raises:
            StoreClosedError: The store was closed.
            NotSupportedError: It was opened by another process.
        """
        if os.getpid() != self._process:
            raise NotSupportedError(
                f"this store was opened by process {self._process}, before a fork; open one here"
            )
        if not self._open:
            raise StoreClosedError
        call = _Call(work, unwanted)
        self._loop.call_soon_threadsafe(call.start)
        try:
            return call.answer.result(timeout)
        except BaseException:
            if call.answer.cancel():
                self._loop.call_soon_threadsafe(call.leave)
                call.ended.wait(EXIT_SECONDS)
            elif unwanted is not None and call.answer.exception() is None:
                result = call.answer.result()
                self.run(lambda: unwanted(result))
            raise

    def close_with(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `last` run at exit, where nobody closes before."""
        self._last = last

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run `last` and end the thread. Idempotent; does nothing in a forked process."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._open:
                return
            try:
                if last is not None:
                    self.run(last)
            finally:
                self._stop()
                self._thread.join()

    def _stop(self) -> None:
        self._open = False
        atexit.unregister(self._at_exit)
        self._loop.call_soon_threadsafe(self._stopped.set)

    def _at_exit(self) -> None:
        if os.getpid() != self._process or not self._open:
            return
        if self._last is not None:
            with suppress(Exception):
                self.run(self._last, EXIT_SECONDS)
        self._stop()
        self._thread.join(EXIT_SECONDS)


class _Facade:
    """Something of a store, and the thread that it lives in."""

    def __init__(self, runner: _Runner, wrapped: Any) -> None:
        self._runner = runner
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

        return self._runner.run(work)

    return call


def _making(
    method: Callable[Concatenate[Any, P], Awaitable[Any]], kind: Callable[[_Runner, Any], R]
) -> Callable[Concatenate[Any, P], R]:
    """A method that blocks, for one whose result has asynchronous methods of its own."""

    @functools.wraps(method)
    def make(self: _Facade, /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def work() -> Any:
            return await method(self._wrapped, *args, **kwargs)

        return kind(self._runner, self._runner.run(work, unwanted=_given_back))

    return make


async def _given_back(made: Any) -> None:
    """A lease that never reached its caller is held by nobody."""
    if isinstance(made, asynchronous.Lease):
        error = KeyboardInterrupt()
        await made.__aexit__(type(error), error, None)


def _loading(method: Callable[..., asynchronous.Loader[Any]]) -> Callable[..., Loader[Any]]:
    @functools.wraps(method)
    def call(self: _Facade, /, *args: Any, **kwargs: Any) -> Loader[Any]:
        return Loader(self._runner, method(self._wrapped, *args, **kwargs))

    return call


def _opening(opened: Callable[P, Opening[async_store.Store]]) -> Callable[P, Store]:
    """`Store.open`, which also starts the thread."""

    @functools.wraps(opened)
    def call(*args: P.args, **kwargs: P.kwargs) -> Store:
        async def work() -> async_store.Store:
            return await opened(*args, **kwargs)

        runner = _Runner()
        try:
            store = Store(runner, runner.run(work))
        except BaseException:
            runner.close()
            raise
        runner.close_with(store._wrapped.close)
        return store

    return call


class Lease(_Facade):
    """A `replaydb.Lease`; `with` acks what is left when the block ends, or nacks it."""

    _wrapped: asynchronous.Lease

    @property
    def id(self) -> int:
        """Which lease."""
        return self._wrapped.id

    @property
    def ttl(self) -> float:
        """Seconds it lasts from its last extension."""
        return self._wrapped.ttl

    @property
    def batch(self) -> Batch:
        """The groups it was given."""
        return self._wrapped.batch

    ack = _blocking(asynchronous.Lease.ack)
    nack = _blocking(asynchronous.Lease.nack)
    reject = _blocking(asynchronous.Lease.reject)
    extend = _blocking(asynchronous.Lease.extend)

    def __enter__(self) -> Self:
        try:
            self._runner.run(self._wrapped.__aenter__)
        except BaseException:
            self._runner.run(lambda: _given_back(self._wrapped))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runner.run(lambda: self._wrapped.__aexit__(kind, error, traceback))


class Loader(_Facade, Generic[T]):
    """A `replaydb.training.Loader` as a plain iterator; it goes on drawing between calls."""

    _wrapped: asynchronous.Loader[T]

    @property
    def lease(self) -> Lease | None:
        """The lease of the batch in hand."""
        held = self._wrapped.lease
        return None if held is None else Lease(self._runner, held)

    def state_dict(self) -> LoaderState:
        """Where it stands."""

        async def work() -> LoaderState:
            return self._wrapped.state_dict()

        return self._runner.run(work)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood."""
        self._wrapped.load_state_dict(state)

    close = _blocking(asynchronous.Loader.aclose)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        async def work() -> list[T]:
            try:
                return [await anext(self._wrapped)]
            except StopAsyncIteration:  # which no coroutine can raise
                return []

        made = self._runner.run(work)
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
        self._runner.run(lambda: self._wrapped.__aexit__(kind, error, traceback))


class Buffer(_Facade):
    """A `replaydb.Buffer`."""

    _wrapped: asynchronous.Buffer

    @property
    def id(self) -> int:
        """Its row."""
        return self._wrapped.id

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self._wrapped.name

    @property
    def settings(self) -> BufferSettings:
        """Settings as this process last saw them."""
        return self._wrapped.settings

    @property
    def policy_version(self) -> int:
        """Policy version as this process last saw it."""
        return self._wrapped.policy_version

    # Overloads do not survive being wrapped, so what is collated to is not known here.
    loader: Callable[..., Loader[Any]] = _loading(asynchronous.Buffer.loader)

    def copy_to(self, other: Buffer, **options: Any) -> int:
        """`replaydb.Buffer.copy_to`, also into a buffer of another blocking store."""
        if not isinstance(other, Buffer):
            raise InvalidInputError("other", "another blocking Buffer", repr(other))
        target = other._wrapped if other._runner is self._runner else _Elsewhere(other)

        async def work() -> int:
            return await self._wrapped.copy_to(target, **options)

        return self._runner.run(work)

    add_episode = _blocking(asynchronous.Buffer.add_episode)
    admission = _blocking(asynchronous.Buffer.admission)
    advance_policy = _blocking(asynchronous.Buffer.advance_policy)
    count = _blocking(asynchronous.Buffer.count)
    cursor = _blocking(asynchronous.Buffer.cursor)
    delete = _blocking(asynchronous.Buffer.delete)
    drain = _blocking(asynchronous.Buffer.drain)
    draws = _blocking(asynchronous.Buffer.draws)
    get = _blocking(asynchronous.Buffer.get)
    lease = _making(asynchronous.Buffer.lease, Lease)
    leases = _blocking(asynchronous.Buffer.leases)
    metrics = _blocking(asynchronous.Buffer.metrics)
    open_group = _blocking(asynchronous.Buffer.open_group)
    peek = _blocking(asynchronous.Buffer.peek)
    prompts = _blocking(asynchronous.Buffer.prompts)
    put = _blocking(asynchronous.Buffer.put)
    redraw = _blocking(asynchronous.Buffer.redraw)
    sample = _blocking(asynchronous.Buffer.sample)
    stats = _blocking(asynchronous.Buffer.stats)
    update_priorities = _blocking(asynchronous.Buffer.update_priorities)
    update_settings = _blocking(asynchronous.Buffer.update_settings)


def replace_uninformative(
    groups: Iterable[EpisodeGroup],
    buffer: Buffer,
    policy: SimplePolicy = Prioritized(),
    **options: Any,
) -> Replacement:
    """`replaydb.training.replace_uninformative` for a blocking buffer."""

    async def work() -> Replacement:
        return await replacement.replace_uninformative(groups, buffer._wrapped, policy, **options)

    return buffer._runner.run(work)


class _Elsewhere:
    """A buffer of another store, whose calls are waited for in a thread."""

    def __init__(self, target: Buffer) -> None:
        self._target = target

    async def put(self, groups: Iterable[EpisodeGroup], **options: Any) -> list[int]:
        return await asyncio.to_thread(self._target.put, groups, **options)


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
        self._runner.close(lambda: self._wrapped.close(timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
