"""User code that runs in the threads of a store: callbacks, and what the garbage collector ends."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replaydb import Fifo, GroupStatus, LeaseExpiredError, NotSupportedError, blocking
from replaydb.database.repository import leases, puts
from replaydb.packs.folder import Folder
from support.groups import group, groups

#: A call that has not ended after this many seconds hangs.
SECONDS = 60


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Collect garbage only where the test does, and only its own."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def within_limit(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread, so that the test fails if it hangs."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "a blocking call hangs"
    if errors:
        raise errors[0]


def test_blocking_calls_in_callbacks_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        with blocking.Store.open(url) as store:
            buffer, other = store.buffer("math"), store.buffer("other")
            buffer.put(groups(3))
            leased = buffer.lease(1, Fifo(), ttl=60)

            def ids() -> Iterator[int]:
                yield buffer.count()

            def opened(*_: object) -> None:
                blocking.Store.open(url)

            def calls(*_: object, **__: object) -> float:
                return float(buffer.count())

            refused: list[Callable[[], object]] = [
                lambda: buffer.put(group("new"), priority=calls),
                lambda: buffer.put(group("new"), priority=lambda _: float(len(leased.ack().gone))),
                lambda: buffer.put(group("new"), priority=opened),  # type: ignore[arg-type]
                lambda: buffer.copy_to(other, progress=calls),  # type: ignore[arg-type]
                lambda: next(buffer.loader(1, collate=calls)),
                lambda: buffer.get(ids()),
                lambda: blocking.replace_uninformative(
                    [group("new")], buffer, Fifo(), step=1, informative=lambda _: buffer.count() > 0
                ),
            ]
            for call in refused:
                with pytest.raises(NotSupportedError, match="thread of a store"):
                    call()
            monkeypatch.setattr(puts, "put", calls)  # in the thread of a transaction
            with pytest.raises(NotSupportedError):
                buffer.put(group("new"))
            assert not buffer.find(uids=["new"])
            leased.ack()
            assert buffer.count(statuses=GroupStatus.ARCHIVED) == 1

    within_limit(work)


def test_a_handler_of_logging_cannot_wait_for_the_store(url: str) -> None:
    def work() -> None:
        with blocking.Store.open(url) as store:
            buffer = store.buffer("math")
            first, _ = buffer.put(groups(2))
            raised: list[BaseException] = []

            class Handler(logging.Handler):
                def emit(self, record: logging.LogRecord) -> None:
                    try:
                        buffer.count()
                    except NotSupportedError as error:
                        raised.append(error)

            handler = Handler()
            logging.getLogger("replaydb").addHandler(handler)
            try:
                with buffer.lease(2, ttl=60), blocking.Store.open(url) as other:
                    other.buffer("math").delete([first])  # the ack logs a warning of it
            finally:
                logging.getLogger("replaydb").removeHandler(handler)
            assert raised

    within_limit(work)


class Abandoned:
    """A suspended generator in a reference cycle, which only the garbage collector can end."""

    def __init__(self, steps: Callable[[], Iterator[Any]], ended_in: list[str]) -> None:
        def run() -> Iterator[Any]:
            try:
                yield from steps()
            finally:
                ended_in.append(threading.current_thread().name)

        self.steps = run()
        self.me = self
        next(self.steps)


def abandon(url: str, buffer: blocking.Buffer) -> list[str]:
    """Leave a lease, a loader and a store as garbage. Return where the collector ends them."""

    def lease() -> Iterator[Any]:
        with buffer.lease(1, Fifo(), ttl=600) as taken:
            yield taken.batch

    def loader() -> Iterator[Any]:
        with buffer.loader(1, Fifo(), lease=True, prefetch=0, ttl=600) as batches:
            yield from batches

    def store() -> Iterator[Any]:
        with (
            blocking.Store.open(url, run="garbage") as opened,
            opened.buffer("math").loader(1, Fifo(), lease=True, prefetch=0, ttl=600) as batches,
        ):
            yield from batches

    ended_in: list[str] = []
    for steps in (lease, loader, store):
        Abandoned(steps, ended_in)
    return ended_in


def collecting(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Return a function that first collects garbage in the thread in which it is called."""

    def collect(*args: Any, **kwargs: Any) -> Any:
        names.append(threading.current_thread().name)
        gc.collect()
        return function(*args, **kwargs)

    return collect


@pytest.mark.parametrize("place", ["loop", "worker", "transaction", "packs"])
def test_garbage_collected_in_a_thread_of_the_store(
    url: str, place: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        before = set(threading.enumerate())
        options = {"payloads": (tmp_path / "packs").as_uri()} if place == "packs" else {}
        with blocking.Store.open(url, **options) as store:
            buffer = store.buffer("math")
            stored = buffer.put(groups(8))
            ended_in, names = abandon(url, buffer), list[str]()
            if place == "loop":
                buffer.put(group(), priority=collecting(lambda _: 1.0, names))
            elif place == "worker":
                next(buffer.loader(1, Fifo(), prefetch=0, collate=collecting(len, names)))
            elif place == "transaction":
                monkeypatch.setattr(puts, "put", collecting(puts.put, names))
                buffer.put(group())
            else:
                monkeypatch.setattr(Folder, "_put", collecting(Folder._put, names))
                buffer.put(group())
            monkeypatch.undo()
            assert names[0] != threading.current_thread().name
            assert ended_in == names[:1] * 3
            completed = len(stored) + (place != "worker")
            assert buffer.wait_until(at_least=completed, statuses="completed", timeout=SECONDS)
            assert not buffer.leases()
        for thread in set(threading.enumerate()) - before:
            thread.join(SECONDS)
        assert set(threading.enumerate()) <= before

    within_limit(work)


def test_garbage_collected_while_a_lock_is_held_that_the_store_needs(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.RLock()  # as of a logging handler

    def locked(*args: Any) -> bool:
        with lock:
            return nack(*args)

    def work() -> None:
        with blocking.Store.open(url) as store:
            buffer = store.buffer("math")
            buffer.put(groups(8))
            ended_in = abandon(url, buffer)
            with lock:
                gc.collect()
            assert ended_in == [threading.current_thread().name] * 3
            assert buffer.wait_until(at_least=8, statuses="completed", timeout=SECONDS)

    nack = leases.nack
    monkeypatch.setattr(leases, "nack", locked)
    within_limit(work)


def test_a_store_closed_after_the_collection_has_released_the_leases(url: str) -> None:
    def work() -> None:
        with blocking.Store.open(url) as store:
            buffer = store.buffer("math")
            buffer.put(groups(8))
            abandon(url, buffer)
            buffer.put(group(), priority=collecting(lambda _: 1.0, []))
        with blocking.Store.open(url) as store:
            buffer = store.buffer("math")
            assert buffer.wait_until(at_least=9, statuses="completed", timeout=SECONDS)

    within_limit(work)


def test_the_error_of_a_block_that_ends_in_a_callback_is_logged(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        with blocking.Store.open(url) as store:
            buffer = store.buffer("math")
            buffer.put(groups(2))
            lease = buffer.lease(1, ttl=60)
            buffer.revoke(lease.id)

            def ending(_: object) -> float:
                lease.__exit__(None, None, None)
                return 1.0

            buffer.put(group(), priority=ending)

    within_limit(work)
    [record] = [one for one in caplog.records if one.name == "replaydb.blocking.thread"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LeaseExpiredError)


def test_a_store_can_be_closed_in_a_callback(url: str) -> None:
    def work() -> None:
        before = set(threading.enumerate())
        store = blocking.Store.open(url)
        buffer = store.buffer("math")

        def closing(_: object) -> float:
            store.close()
            return 1.0

        buffer.put(group(), priority=closing)
        for thread in set(threading.enumerate()) - before:
            thread.join(SECONDS)
        assert set(threading.enumerate()) <= before

    within_limit(work)
