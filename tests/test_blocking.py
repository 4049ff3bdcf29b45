"""The store without an event loop."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import replaydb
from replaydb import (
    Fifo,
    GroupStatus,
    InvalidInputError,
    NotEnoughGroupsError,
    NotSupportedError,
    StoreClosedError,
    blocking,
)
from replaydb.buffer import Loader
from support.groups import group, groups


@pytest.fixture
def store(url: str) -> Iterator[blocking.Store]:
    with blocking.Store.open(url, run="test") as opened:
        yield opened


@pytest.fixture
def buffer(store: blocking.Store) -> blocking.Buffer:
    return store.buffer("math")


def test_put_and_sample(buffer: blocking.Buffer) -> None:
    ids = buffer.put(groups(3))
    assert buffer.sample(2, Fifo()).ids == ids[:2]
    assert buffer.count() == 3
    assert [one.id for one in buffer.get(ids)] == ids
    assert buffer.update_priorities(ids, [1.0, 2.0, 3.0]) == 3
    assert buffer.advance_policy(4) == 0
    assert (buffer.name, buffer.policy_version) == ("math", 4)
    buffer.update_settings(max_staleness=2)
    assert buffer.settings.max_staleness == 2
    assert buffer.metrics()["buffer/groups"] == 3


def test_replacing_what_is_uninformative(buffer: blocking.Buffer) -> None:
    [old] = buffer.put(group("old"))
    fresh = [group("flat", rewards=[1.0, 1.0]), group("fresh")]
    done = blocking.replace_uninformative(fresh, buffer, Fifo(), step=3)
    assert (done.replayed_ids, done.missing) == ([old], [])
    assert [one.group_uid for one in done.batch.groups] == ["old", "fresh"]
    assert buffer.draws()[0].step == 3


def test_errors_are_the_same(buffer: blocking.Buffer) -> None:
    with pytest.raises(NotEnoughGroupsError):
        buffer.sample(1, timeout=0.05)
    with pytest.raises(InvalidInputError):
        buffer.sample(0)


def test_a_lease_acks_or_nacks(buffer: blocking.Buffer) -> None:
    buffer.put(groups(4))
    with buffer.lease(2, Fifo(), ttl=60) as lease:
        assert len(lease.batch) == 2
        assert buffer.count(statuses=GroupStatus.LEASED) == 2
        assert (lease.id, lease.ttl) == (buffer.leases()[0].id, 60)
    assert buffer.count(statuses=GroupStatus.ARCHIVED) == 2
    with pytest.raises(ZeroDivisionError), buffer.lease(2, ttl=60):
        raise ZeroDivisionError
    assert buffer.count(statuses=GroupStatus.COMPLETED) == 2
    held = buffer.lease(2, ttl=60)
    held.extend(90)
    held.ack(held.batch.ids[:1], cursor={"step": 3})
    held.nack()
    assert buffer.cursor("step") == 3
    assert buffer.count(statuses=GroupStatus.COMPLETED) == 1


def test_leases_are_kept_alive_while_the_caller_works(buffer: blocking.Buffer) -> None:
    buffer.put(groups(1))
    with buffer.lease(1, ttl=1.5):
        time.sleep(2.0)
    assert buffer.count(statuses=GroupStatus.ARCHIVED) == 1


def test_a_loader_is_an_iterator(buffer: blocking.Buffer) -> None:
    ids = buffer.put(groups(2))
    with buffer.loader(2, Fifo(), num_steps=3) as loader:
        assert [batch.ids for batch in loader] == [ids] * 3
        assert loader.state_dict() == {"step": 3, "draws": []}
    with buffer.loader(1, Fifo(), lease=True, num_steps=2, collate=len) as loader:
        assert next(loader) == 1
        assert loader.lease is not None
        assert loader.lease.batch.ids == ids[:1]
        assert list(loader) == [1]
    assert buffer.count(statuses=GroupStatus.ARCHIVED) == 2
    again = buffer.loader(2, prefetch=0)
    again.load_state_dict({"step": 9, "draws": []})
    assert again.state_dict()["step"] == 9
    again.close()


def test_copy_between_stores(
    buffer: blocking.Buffer, store: blocking.Store, tmp_path: object
) -> None:
    buffer.put(groups(3))
    assert buffer.copy_to(store.buffer("second")) == 3
    with blocking.Store.open(f"sqlite:///{tmp_path}/other.db") as other:
        assert buffer.copy_to(other.buffer("math"), statuses=GroupStatus.COMPLETED) == 3
        assert other.buffer("math").count() == 3


def test_many_threads(buffer: blocking.Buffer) -> None:
    def put(i: int) -> list[int]:
        return buffer.put(group(f"g{i}"))

    with ThreadPoolExecutor(16) as pool:
        ids = [one for found in pool.map(put, range(64)) for one in found]
        assert len(set(ids)) == 64
        leased = list(pool.map(lambda _: buffer.lease(4, ttl=60).batch.ids, range(16)))
    assert len({one for found in leased for one in found}) == 64


def test_a_wait_does_not_hold_up_other_threads(buffer: blocking.Buffer) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffer.sample, 1, timeout=30)
        ids = buffer.put(group())
        assert waiting.result(timeout=10).ids == ids


def test_ctrl_c_ends_the_call_that_waits(buffer: blocking.Buffer) -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    rescue = threading.Timer(30, buffer.put, [group()])  # of a call that waits on
    rescue.start()
    with pytest.raises(KeyboardInterrupt):
        buffer.sample(1, timeout=None)
    rescue.cancel()
    assert buffer.count() == 0
    buffer.put(group())
    assert buffer.draws() == []


@pytest.mark.parametrize("early", [True, False], ids=["while it waits", "with the answer"])
def test_ctrl_c_leaves_no_lease_behind(
    buffer: blocking.Buffer, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    buffer.put([group("a"), group("b")])

    class Interrupted(Future[Any]):
        was_asked = False

        def result(self, timeout: float | None = None) -> Any:
            if self.was_asked:
                return super().result(timeout)
            self.was_asked = True
            monkeypatch.undo()  # the next call is waited for in peace
            if not early:
                super().result(30)
            raise KeyboardInterrupt

    monkeypatch.setattr(blocking, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.lease(2, ttl=600)
    assert buffer.leases() == []
    assert buffer.count(statuses="completed") == 2


def test_closed(url: str) -> None:
    before = threading.active_count()
    store = blocking.Store.open(url)
    buffer = store.buffer("math")
    store.close()
    store.close()
    assert threading.active_count() == before
    with pytest.raises(StoreClosedError):
        buffer.count()


def test_a_store_that_cannot_be_opened_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(InvalidInputError):
        blocking.Store.open("mysql://nowhere/at_all")
    assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_told_to_open_its_own(buffer: blocking.Buffer, store: blocking.Store) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            buffer.count()
        except NotSupportedError as error:
            store.close()
            code = 0 if f"process {os.getppid()}" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert buffer.count() == 0


@pytest.mark.parametrize(
    ("asynchronous", "twin", "attributes"),
    [
        (replaydb.Store, blocking.Store, set()),
        (replaydb.Buffer, blocking.Buffer, {"id", "name", "settings", "policy_version"}),
        (replaydb.Lease, blocking.Lease, {"id", "ttl", "batch"}),
        (Loader, blocking.Loader, {"close"}),
    ],
)
def test_nothing_is_missing(asynchronous: type, twin: type, attributes: set[str]) -> None:
    methods = public(asynchronous) - {"saw", "aclose"}
    assert public(twin) == methods | attributes
    for name in methods - {"close", "copy_to", "open"}:
        there = inspect.getattr_static(asynchronous, name)
        if inspect.isfunction(there):
            here = inspect.signature(getattr(twin, name))
            assert here == inspect.signature(there), name


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}
