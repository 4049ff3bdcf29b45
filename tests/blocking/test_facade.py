"""The blocking store."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from typing import Any, assert_type

import pytest

import replaydb
from replaydb import (
    Batch,
    Fifo,
    GroupStatus,
    InvalidInputError,
    NotEnoughGroupsError,
    blocking,
    training,
)
from replaydb.database.repository import leases
from support.groups import group, groups


def test_put_and_sample(buffer: blocking.Buffer) -> None:
    ids = buffer.put(groups(3))
    assert buffer.sample(2, Fifo()).ids == ids[:2]
    assert buffer.count() == 3
    assert [one.id for one in buffer.get(ids)] == ids
    assert buffer.update_priorities(ids, [1.0, 2.0, 3.0]) == 3
    assert buffer.update(ids[:1], tags={"seen": True}) == 1
    assert [one.tags for one in buffer.find(limit=2)] == [{"seen": True}, {}]
    assert buffer.wait_until(at_least=3, statuses="completed", timeout=0)
    assert buffer.advance_policy(4) == 0
    assert (buffer.name, buffer.policy_version) == ("math", 4)
    assert buffer.run == "test"
    buffer.update_settings(max_staleness=2)
    assert buffer.settings.max_staleness == 2
    assert buffer.metrics()["buffer/groups"] == 3


def test_replacing_uninformative_groups(buffer: blocking.Buffer) -> None:
    [old] = buffer.put(group("old"))
    fresh = [group("flat", rewards=[1.0, 1.0]), group("fresh")]
    done = blocking.replace_uninformative(
        fresh, buffer, Fifo(), step=3, informative=lambda one: one.group_uid == "fresh"
    )
    assert (done.replayed_ids, done.missing) == ([old], [])
    assert [one.group_uid for one in done.batch.groups] == ["old", "fresh"]
    assert buffer.draws()[0].step == 3


def test_errors_are_the_same(buffer: blocking.Buffer) -> None:
    with pytest.raises(NotEnoughGroupsError):
        buffer.sample(1, timeout=0.05)
    with pytest.raises(InvalidInputError):
        buffer.sample(-1)


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
    taken = buffer.lease(2, ttl=60)
    taken.extend(90)
    taken.ack(taken.batch.ids[:1], cursor={"step": 3})
    same = buffer.open_lease(taken.id, ttl=60)
    assert same.batch.ids == taken.batch.ids[1:]
    assert buffer.revoke(same.id) == same.batch.ids
    assert buffer.cursor("step") == 3
    assert buffer.count(statuses=GroupStatus.COMPLETED) == 1


def test_leases_are_kept_alive_while_the_caller_works(
    buffer: blocking.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended, extend = threading.Event(), leases.extend

    def noted(*arguments: Any) -> None:
        extend(*arguments)
        extended.set()

    monkeypatch.setattr(leases, "extend", noted)
    monkeypatch.setattr("replaydb.buffer.heartbeat.HEARTBEATS_PER_TTL", 10_000)
    buffer.put(groups(1))
    with buffer.lease(1, ttl=60):
        assert extended.wait(30)  # the caller's work
    assert buffer.count(statuses=GroupStatus.ARCHIVED) == 1


def test_a_loader_is_an_iterator(buffer: blocking.Buffer) -> None:
    ids = buffer.put(groups(2))
    with buffer.loader(2, Fifo(), num_steps=3) as loader:
        assert [batch.ids for batch in loader] == [ids] * 3
        assert loader.state_dict() == {"step": 3, "draws": []}
    with buffer.loader(1, Fifo(), lease=True, num_steps=2, collate=len) as sizes:
        assert assert_type(next(sizes), int) == 1
        assert sizes.lease is not None
        assert sizes.lease.batch.ids == ids[:1]
        assert list(sizes) == [1]
    assert buffer.count(statuses=GroupStatus.ARCHIVED) == 2
    again = assert_type(buffer.loader(2, prefetch=0), blocking.Loader[Batch])
    again.load_state_dict({"step": 9, "draws": []})
    assert again.state_dict()["step"] == 9
    again.close()


def test_threads_take_turns_with_a_loader(buffer: blocking.Buffer) -> None:
    """A request acks the batch before, whichever thread had it."""
    buffer.put(groups(8))
    turn = threading.Lock()
    seen: list[int] = []
    with buffer.loader(1, Fifo(), lease=True, num_steps=6, ttl=60) as loader:

        def consume() -> None:
            while True:
                with turn:
                    batch = next(loader, None)
                if batch is None:
                    return
                seen.extend(batch.ids)

        threads = [threading.Thread(target=consume) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    assert buffer.count(statuses=GroupStatus.ARCHIVED) == 6
    assert buffer.leases() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_closed_loader(buffer: blocking.Buffer, prefetch: int) -> None:
    """It also ends a request of another thread that waits."""
    errors: list[BaseException] = []

    def consume(loader: blocking.Loader) -> None:
        try:
            next(loader)
        except BaseException as error:
            errors.append(error)

    with buffer.loader(2, lease=True, prefetch=prefetch) as loader:
        thread = threading.Thread(target=consume, args=(loader,))
        thread.start()
        while not loader._wrapped._requesting.locked():
            time.sleep(0.001)
        with pytest.raises(InvalidInputError, match="one request at a time"):
            next(loader)
    thread.join(60)
    buffer.put(groups(2))
    with pytest.raises(InvalidInputError, match="one that was closed"):
        next(loader)
    with pytest.raises(InvalidInputError, match="one that was closed"), loader:
        pass
    assert [str(one) for one in errors] == [
        "loader: expected one that is open, got one that was closed"
    ]
    assert buffer.count(statuses=GroupStatus.COMPLETED) == 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_collate_may_exit(buffer: blocking.Buffer, prefetch: int) -> None:
    """The thread of the store continues."""
    buffer.put(groups(4))
    with buffer.loader(2, lease=True, prefetch=prefetch, collate=lambda _: sys.exit(3)) as loader:
        for _ in range(2):
            with pytest.raises(SystemExit):
                next(loader)
    assert buffer.count(statuses=GroupStatus.COMPLETED) == 4


def test_a_lease_is_entered_once(buffer: blocking.Buffer) -> None:
    buffer.put(groups(2))
    message = "lease: expected one whose block was not entered before"
    with buffer.lease(2, ttl=60) as lease:
        with pytest.raises(InvalidInputError, match=message), lease:
            pass
        assert buffer.count(statuses=GroupStatus.LEASED) == 2
    with pytest.raises(InvalidInputError, match=message), lease:
        pass
    assert buffer.count(statuses=GroupStatus.ARCHIVED) == 2


def test_copy_between_stores(
    buffer: blocking.Buffer, store: blocking.Store, tmp_path: object
) -> None:
    buffer.put(groups(3))
    assert buffer.copy_to(store.buffer("second")) == 3
    with blocking.Store.open(f"sqlite:///{tmp_path}/other.db") as other:
        assert buffer.copy_to(other.buffer("math"), statuses=GroupStatus.COMPLETED) == 3
        assert other.buffer("math").count() == 3


CLASSES = [
    (replaydb.Store, blocking.Store, {"close": "close"}),
    (replaydb.Buffer, blocking.Buffer, {}),
    (replaydb.Lease, blocking.Lease, {}),
    (replaydb.Loader, blocking.Loader, {"aclose": "close"}),
]


@pytest.mark.parametrize(("asynchronous", "twin", "renamed"), CLASSES)
def test_no_method_is_missing(asynchronous: type, twin: type, renamed: dict[str, str]) -> None:
    methods = public(asynchronous)
    assert {renamed.get(name, name) for name in methods} <= public(twin)
    for name in methods - renamed.keys():
        there, here = getattr(asynchronous, name), getattr(twin, name)
        assert here.__doc__, name
        if callable(there):
            assert inspect.signature(here) == inspect.signature(there), name


def test_no_attribute_is_missing(buffer: blocking.Buffer) -> None:
    buffer.put(group())
    with buffer.lease(1, ttl=60) as lease:
        for twin in (buffer, lease):
            attributes = {name for name in vars(twin._wrapped) if not name.startswith("_")}
            assert public(type(twin)) == public(type(twin._wrapped)) | attributes
            for name in attributes:
                assert getattr(twin, name) == getattr(twin._wrapped, name)


def test_no_function_is_missing() -> None:
    functions = {
        name: function
        for module in (replaydb, training)
        for name in module.__all__
        if inspect.iscoroutinefunction(function := getattr(module, name))
    }
    assert list(functions) == ["replace_uninformative"]
    assert {name for name in blocking.__all__ if name[0].islower()} == functions.keys()
    for name, function in functions.items():
        assert inspect.signature(getattr(blocking, name)) == inspect.signature(function)


def test_an_asynchronous_buffer_is_refused(buffer: blocking.Buffer) -> None:
    there: Any = buffer._wrapped
    with pytest.raises(InvalidInputError, match="a blocking Buffer"):
        blocking.replace_uninformative([group()], there)
    with pytest.raises(InvalidInputError, match="another blocking Buffer"):
        buffer.copy_to(there)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}
