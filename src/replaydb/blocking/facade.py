"""Blocking stores, buffers, leases and loaders, generated from the async ones."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from replaydb import buffer
from replaydb.batch.batch import Batch
from replaydb.batch.stored import StoredGroup
from replaydb.blocking.thread import EventLoopThread
from replaydb.buffer import replacement, store
from replaydb.buffer.loader import Collated, LoaderState
from replaydb.database.runtime.transactions import PATIENCE_SECONDS
from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.settings import BufferSettings
from replaydb.errors import InvalidInputError
from replaydb.util.opening import Opening

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F")


class _Facade:
    """A wrapper of an async object, and the thread in which it runs."""

    def __init__(self, thread: EventLoopThread, wrapped: Any) -> None:
        self._thread = thread
        self._wrapped = wrapped

    def __repr__(self) -> str:
        return f"blocking {self._wrapped!r}"


class _Managed(_Facade):
    """A wrapper that is also a context manager."""

    def __exit__(self, *exc_info: Any) -> None:
        has_begun = False

        async def leave() -> None:
            nonlocal has_begun
            has_begun = True
            await self._wrapped.__aexit__(*exc_info)

        try:
            self._thread.run(leave, shielded=True)
        except BaseException:
            if not has_begun:  # interrupted before `run` deferred interrupts
                self._thread.run(leave, shielded=True)
            raise


def _blocking(
    method: Callable[Concatenate[Any, P], Awaitable[R]], *, shielded: bool = False
) -> Callable[Concatenate[Any, P], R]:
    """Return a method that blocks until the async one has returned."""

    @functools.wraps(method)
    def call(self: _Facade, /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def work() -> R:
            return await method(self._wrapped, *args, **kwargs)

        return self._thread.run(work, shielded=shielded)

    return call


def _wrapping(
    method: Callable[Concatenate[Any, P], Awaitable[Any]],
    kind: Callable[[EventLoopThread, Any], F],
    unwanted: Callable[[F], Coroutine[Any, Any, None]] | None = None,
) -> Callable[Concatenate[Any, P], F]:
    """Return a blocking method for an async one whose result is wrapped in a facade."""

    @functools.wraps(method)
    def make(self: _Facade, /, *args: P.args, **kwargs: P.kwargs) -> F:
        async def work() -> F:
            return kind(self._thread, await method(self._wrapped, *args, **kwargs))

        return self._thread.run(work, unwanted=unwanted)

    return make


async def _released(lease: Lease) -> None:
    """Nack a lease that its caller never received, or whose block was never entered."""
    error = KeyboardInterrupt()
    await lease._wrapped.__aexit__(type(error), error, None)


def _claiming(
    method: Callable[Concatenate[Any, P], Awaitable[list[buffer.Claim]]],
) -> Callable[Concatenate[Any, P], list[Claim]]:
    """Return a blocking method for one that returns claims."""

    @functools.wraps(method)
    def call(self: _Facade, /, *args: P.args, **kwargs: P.kwargs) -> list[Claim]:
        async def work() -> list[Claim]:
            return [
                Claim(self._thread, one) for one in await method(self._wrapped, *args, **kwargs)
            ]

        async def unwanted(made: list[Claim]) -> None:
            for one in made:
                await one._wrapped.release()

        return self._thread.run(work, unwanted=unwanted)

    return call


def _loading(
    method: Callable[Concatenate[Any, P], buffer.Loader[Collated]],
) -> Callable[Concatenate[Any, P], Loader[Collated]]:
    """Return a method that returns a blocking loader. It does not wait for anything yet."""

    @functools.wraps(method)
    def call(self: _Facade, /, *args: P.args, **kwargs: P.kwargs) -> Loader[Collated]:
        return Loader(self._thread, method(self._wrapped, *args, **kwargs))

    return call


def _opening(opened: Callable[P, Opening[store.Store]]) -> Callable[P, Store]:
    """Return a blocking `Store.open`, which also starts the thread."""

    @functools.wraps(opened)
    def call(*args: P.args, **kwargs: P.kwargs) -> Store:
        async def work() -> Store:
            opened_store = await opened(*args, **kwargs)
            thread.last = opened_store.close
            return Store(thread, opened_store)

        thread = EventLoopThread()
        try:
            return thread.run(work)
        except BaseException:
            thread.close()
            raise

    return call


def _copying(
    method: Callable[Concatenate[Any, Any, P], Awaitable[R]],
) -> Callable[Concatenate[Any, Buffer, P], R]:
    """Return a blocking `Buffer.copy_to`, which can also copy to a buffer of another store."""

    @functools.wraps(method)
    def call(self: Buffer, other: Buffer, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(other, Buffer):
            raise InvalidInputError("other", "another blocking Buffer", repr(other))
        target = other._wrapped if other._thread is self._thread else _RemoteBuffer(other)

        async def work() -> R:
            return await method(self._wrapped, target, *args, **kwargs)

        return self._thread.run(work)

    return call  # type: ignore[return-value]  # names of what Concatenate adds are not typed


def _over_buffer(
    function: Callable[Concatenate[T, buffer.Buffer, P], Awaitable[R]],
) -> Callable[Concatenate[T, Buffer, P], R]:
    """Return a function of a blocking buffer for a function of an async buffer."""

    @functools.wraps(function)
    def call(groups: T, buffer: Buffer, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(buffer, Buffer):
            raise InvalidInputError("buffer", "a blocking Buffer", repr(buffer))

        async def work() -> R:
            return await function(groups, buffer._wrapped, *args, **kwargs)

        return buffer._thread.run(work)

    return call  # type: ignore[return-value]  # names of what Concatenate adds are not typed


class _RemoteBuffer:
    """A buffer of another store. Its calls run in the event loop of that store."""

    def __init__(self, target: Buffer) -> None:
        self._target = target

    async def _put_copies(self, *arguments: Any) -> None:
        async def work() -> None:
            await self._target._wrapped._put_copies(*arguments)

        await self._target._thread.run_from(work)


class Lease(_Managed):
    """A `replaydb.Lease`. At the end of a `with` block it is acked, or nacked on an error."""

    _wrapped: buffer.Lease

    @property
    def id(self) -> int:
        """Id of the lease; 0 for an empty lease."""
        return self._wrapped.id

    @property
    def ttl(self) -> float:
        """Duration in seconds from the last extension."""
        return self._wrapped.ttl

    @property
    def ids(self) -> list[int]:
        """Ids of the groups when the lease was taken or opened, in the order of the draw [n]."""
        return self._wrapped.ids

    @property
    def num_tokens(self) -> list[int]:
        """Number of tokens of each of these groups, prompts included [n]."""
        return self._wrapped.num_tokens

    @property
    def batch(self) -> Batch:
        """The groups of the lease when it was taken or opened."""
        return self._wrapped.batch

    def shards(self, world_size: int, *, even: bool = True) -> list[list[int]]:
        """Divide the groups among the ranks of a trainer, as `replaydb.Lease.shards` does."""
        return self._wrapped.shards(world_size, even=even)

    shard = _blocking(buffer.Lease.shard)
    ack = _blocking(buffer.Lease.ack)
    nack = _blocking(buffer.Lease.nack)
    fail = _blocking(buffer.Lease.fail)
    reject = _blocking(buffer.Lease.reject)
    extend = _blocking(buffer.Lease.extend)

    def __enter__(self) -> Self:
        try:
            self._thread.run(self._wrapped.__aenter__)
        except InvalidInputError:  # another block of the lease
            raise
        except BaseException:
            self._thread.run(lambda: _released(self), shielded=True)
            raise
        return self


class Claim(_Managed):
    """A `replaydb.Claim`. At the end of a `with` block, what is still open is released."""

    _wrapped: buffer.Claim

    @property
    def uid(self) -> str:
        """Uid of the claim."""
        return self._wrapped.uid

    @property
    def ttl(self) -> float:
        """Duration in seconds from the last extension."""
        return self._wrapped.ttl

    @property
    def group(self) -> StoredGroup:
        """The group; without its episodes, unless `missing` was given."""
        return self._wrapped.group

    @property
    def turns(self) -> dict[int, tuple[Turn, ...]]:
        """The turns of each trajectory before it was claimed, by position."""
        return self._wrapped.turns

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of its trajectories, or episodes, in the group."""
        return self._wrapped.positions

    @property
    def missing(self) -> str | None:
        """Name of the value that the claimed episodes lack."""
        return self._wrapped.missing

    @property
    def episodes(self) -> dict[int, Episode]:
        """The episodes that lack the value, by position."""
        return self._wrapped.episodes

    append_turn = _blocking(buffer.Claim.append_turn)
    finish_episode = _blocking(buffer.Claim.finish_episode)
    add_episode = _blocking(buffer.Claim.add_episode)
    fail_episode = _blocking(buffer.Claim.fail_episode)
    annotate = _blocking(buffer.Claim.annotate)
    extend = _blocking(buffer.Claim.extend)
    release = _blocking(buffer.Claim.release)

    def __enter__(self) -> Self:
        self._thread.run(self._wrapped.__aenter__)
        return self


class Loader(_Managed, Generic[Collated]):
    """A `replaydb.Loader` as a plain iterator. It prefetches batches between calls."""

    _wrapped: buffer.Loader[Collated]

    @property
    def lease(self) -> Lease | None:
        """Lease of the current batch, or None."""
        lease = self._wrapped.lease
        return None if lease is None else Lease(self._thread, lease)

    def state_dict(self) -> LoaderState:
        """Return the position of the loader as JSON, to store in a checkpoint."""

        async def work() -> LoaderState:
            return self._wrapped.state_dict()

        return self._thread.run(work)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the position of another loader."""
        self._wrapped.load_state_dict(state)

    close = _blocking(buffer.Loader.aclose, shielded=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Collated:
        async def work() -> list[Collated]:
            try:
                return [await anext(self._wrapped)]
            except StopAsyncIteration:  # a coroutine cannot raise it
                return []

        async def undone(made: list[Collated]) -> None:
            if made:
                self._wrapped._put_back()

        made = self._thread.run(work, unwanted=undone)
        if not made:
            raise StopIteration
        return made[0]

    def __enter__(self) -> Self:
        self._wrapped._check_open()
        return self


class Buffer(_Facade):
    """A `replaydb.Buffer`."""

    _wrapped: buffer.Buffer

    @property
    def id(self) -> int:
        """Id of the buffer in its store."""
        return self._wrapped.id

    @property
    def name(self) -> str:
        """Name of the buffer in its store."""
        return self._wrapped.name

    @property
    def run(self) -> str:
        """Name of the run under which this object puts and draws: that of its store."""
        return self._wrapped.run

    @property
    def settings(self) -> BufferSettings:
        """Settings as this object last read them. Another process may have changed them since."""
        return self._wrapped.settings

    @property
    def policy_version(self) -> int:
        """The policy version that this object last read: a cached value, which may be out of date.

        It is read when the buffer is opened and by every call that changes the buffer (`put`,
        `sample`, `lease`, `advance_policy`), not when another process advances the policy. A
        process that only observes calls `refresh`.
        """
        return self._wrapped.policy_version

    ack = _blocking(buffer.Buffer.ack)
    add_episode = _blocking(buffer.Buffer.add_episode)
    admission = _blocking(buffer.Buffer.admission)
    advance_policy = _blocking(buffer.Buffer.advance_policy)
    annotate = _blocking(buffer.Buffer.annotate)
    append_turn = _blocking(buffer.Buffer.append_turn)
    claim = _claiming(buffer.Buffer.claim)
    fail_episode = _blocking(buffer.Buffer.fail_episode)
    finish_episode = _blocking(buffer.Buffer.finish_episode)
    release_claim = _blocking(buffer.Buffer.release_claim)
    trajectories = _blocking(buffer.Buffer.trajectories)
    turns = _blocking(buffer.Buffer.turns)
    count = _blocking(buffer.Buffer.count)
    copy_to = _copying(buffer.Buffer.copy_to)
    cursor = _blocking(buffer.Buffer.cursor)
    delete = _blocking(buffer.Buffer.delete)
    drain = _blocking(buffer.Buffer.drain)
    draws = _blocking(buffer.Buffer.draws)
    episodes = _blocking(buffer.Buffer.episodes)
    find = _blocking(buffer.Buffer.find)
    get = _blocking(buffer.Buffer.get)
    lease = _wrapping(buffer.Buffer.lease, Lease, _released)
    open_lease = _wrapping(buffer.Buffer.open_lease, Lease)
    revoke = _blocking(buffer.Buffer.revoke)
    leases = _blocking(buffer.Buffer.leases)
    loader = _loading(buffer.Buffer.loader)
    metrics = _blocking(buffer.Buffer.metrics)
    open_group = _blocking(buffer.Buffer.open_group)
    peek = _blocking(buffer.Buffer.peek)
    prompts = _blocking(buffer.Buffer.prompts)
    put = _blocking(buffer.Buffer.put)
    read_lease = _blocking(buffer.Buffer.read_lease)
    redraw = _blocking(buffer.Buffer.redraw)
    refresh = _blocking(buffer.Buffer.refresh)
    sample = _blocking(buffer.Buffer.sample)
    _sample_unread = _blocking(buffer.Buffer._sample_unread)  # for ranks that share a draw
    _read_drawn = _blocking(buffer.Buffer._read_drawn)
    stats = _blocking(buffer.Buffer.stats)
    steps = _blocking(buffer.Buffer.steps)
    texts = _blocking(buffer.Buffer.texts)
    update = _blocking(buffer.Buffer.update)
    update_priorities = _blocking(buffer.Buffer.update_priorities)
    update_settings = _blocking(buffer.Buffer.update_settings)
    wait_until = _blocking(buffer.Buffer.wait_until)


class Store(_Facade):
    """A `replaydb.Store`."""

    _wrapped: store.Store

    open = staticmethod(_opening(store.Store.open))

    @property
    def run(self) -> str:
        """Name of the run under which this store puts and draws."""
        return self._wrapped.run

    buffer = _wrapping(store.Store.buffer, Buffer)
    adopt_payloads = _blocking(store.Store.adopt_payloads)
    buffer_names = _blocking(store.Store.buffer_names)
    buffers = _blocking(store.Store.buffers)
    prune = _blocking(store.Store.prune)
    relocate_payloads = _blocking(store.Store.relocate_payloads)
    run_stats = _blocking(store.Store.run_stats)
    runs = _blocking(store.Store.runs)
    replication_lag = _blocking(store.Store.replication_lag)

    def close(self, *, timeout: float | None = PATIENCE_SECONDS) -> None:
        """Wait for running calls to finish, close the database and end the thread. Idempotent.

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
