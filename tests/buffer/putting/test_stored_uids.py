"""Puts of uids that are already stored, or were when the put began."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import replaydb as rdb
from replaydb import Buffer, Capacity, Store
from replaydb.database.postgresql.session import PostgresqlSession
from replaydb.database.repository import capacity, incremental_groups, puts
from replaydb.database.repository.puts import OnDuplicate
from support.clock import Clock
from support.engines import in_turn
from support.groups import episode, group, groups
from support.invariants import check_invariants

WAYS: list[OnDuplicate] = ["error", "ignore", "replace", "renew"]


async def stored(buffer: Buffer) -> dict[str, int]:
    """Return the ids of groups that are not archived, by uid, in order of ids."""
    return {
        one.group_uid: one.id
        for one in await buffer.find(order_by=rdb.col.id)
        if one.status != "archived"
    }


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of puts that shared a transaction."""
    sizes: list[int] = []
    put = puts.put

    def counted(*arguments: Any, **named: Any) -> Any:
        sizes.append(len(named["several"]))
        return put(*arguments, **named)

    monkeypatch.setattr(puts, "put", counted)
    return sizes


@pytest.mark.parametrize(
    ("engine_name", "due", "on_duplicate"),
    in_turn((due, how) for due in ("old", "too many") for how in WAYS),
)
async def test_a_group_that_is_deleted_by_maintenance_of_the_put(
    store: Store, clock: Clock, url: str, due: str, on_duplicate: OnDuplicate
) -> None:
    buffer = await store.buffer("math", on_evict="delete")
    (old,) = await buffer.put(group("same", tags={"is": "old"}))
    if due == "old":
        await buffer.update_settings(time_to_live=100)
        clock.jump(101)
    else:
        await buffer.put(group("other", "code"))
        await buffer.update_settings(capacity=Capacity(groups=1))
    again = group("same", tags={"is": "new"})
    (new,) = await buffer.put(again, on_duplicate=on_duplicate, cursor={"at": 1}, timeout=0)
    assert new > old
    assert await stored(buffer) == {"same": new}
    assert await buffer.get([new]) == [again]
    assert (await buffer.find([new]))[0].times_replaced == 0
    assert await buffer.cursor("at") == 1


@pytest.mark.parametrize(("engine_name", "on_duplicate"), in_turn(WAYS))
async def test_a_group_that_is_evicted_for_another_put_of_the_transaction(
    store: Store, on_duplicate: OnDuplicate, transactions: list[int]
) -> None:
    buffer = await store.buffer("math", capacity=Capacity(groups=2), on_evict="delete")
    await buffer.put([group("a"), group("b")])
    first, second = await asyncio.gather(
        buffer.put(group("new")), buffer.put([group("a"), group("b")], on_duplicate=on_duplicate),
        return_exceptions=True,
    )  # fmt: skip
    assert transactions == [1, 2]
    assert not isinstance(first, BaseException)
    if on_duplicate == "error":  # `b` is still there, but not `a`
        assert isinstance(second, rdb.DuplicateGroupError)
        assert second.group_uids == ("b",)
        assert await stored(buffer) == {"b": 2, "new": first[0]}
    else:
        assert not isinstance(second, BaseException)
        assert second[0] > first[0]
        assert (second[1] == 2) == (on_duplicate != "renew")
        assert await stored(buffer) == dict(zip("ab", second, strict=True))


async def test_an_eviction_that_is_rolled_back(store: Store, transactions: list[int]) -> None:
    """The put for which the group was evicted is refused, so the group is still stored."""
    buffer = await store.buffer("math", capacity=Capacity(groups=3), on_evict="delete")
    ids = await buffer.put(groups(3))
    await buffer.lease(2, rdb.Lifo(), ttl=600)
    refused, known = await asyncio.gather(
        buffer.put([group("x"), group("y")], timeout=0),
        buffer.put(group("gsm8k-0"), on_duplicate="ignore", timeout=0),
        return_exceptions=True,
    )
    assert transactions == [1, 2]
    assert isinstance(refused, rdb.BufferFullError)
    assert known == ids[:1]
    assert list((await stored(buffer)).values()) == ids


@pytest.mark.parametrize(
    ("engine_name", "eviction", "on_evict"),
    in_turn([("oldest", "archive"), ("oldest", "delete"), ("uniform", "delete")]),
)
async def test_a_put_does_not_evict_groups_that_it_keeps(
    store: Store, eviction: Any, on_evict: Any
) -> None:
    buffer = await store.buffer(
        "math", capacity=Capacity(groups=3), eviction=eviction, on_evict=on_evict
    )
    (a, _, c) = await buffer.put([group("a"), group("b"), group("c")])
    ids = await buffer.put([group("a"), group("x"), group("c")], on_duplicate="ignore")
    assert (ids[0], ids[2]) == (a, c)
    assert await stored(buffer) == {"a": a, "c": c, "x": ids[1]}
    too_many = [group(uid) for uid in "acyz"]
    with pytest.raises(rdb.InvalidInputError, match="capacity of the buffer"):  # would never fit
        await buffer.put(too_many, on_duplicate="ignore")
    lease = await buffer.lease(1, rdb.Fifo(), ttl=600)
    with pytest.raises(rdb.BufferFullError):  # will fit when the leased group is acked
        await buffer.put(too_many, on_duplicate="ignore", timeout=0)
    await lease.ack()


async def test_a_put_that_stores_no_group_needs_no_capacity(store: Store) -> None:
    buffer = await store.buffer("math")
    ids = await buffer.put(groups(3))
    await buffer.lease(3, ttl=600)
    await buffer.update_settings(capacity=Capacity(groups=1), rate_limit=rdb.Queue(1))
    await buffer.put([], cursor={"at": 1}, timeout=0)
    assert await buffer.cursor("at") == 1
    assert await buffer.put(groups(3), on_duplicate="ignore", timeout=0) == ids


Change = Callable[[Buffer], Awaitable[Any]]
CHANGES: dict[str, Change] = {
    "deleted": lambda it: it.delete(uids="same"),
    "renewed": lambda it: it.put(group("same"), on_duplicate="renew"),
    "replaced in a new task": lambda it: it.put(group("same", "b"), on_duplicate="replace"),
}


def before_the_locks(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: Any, *, each_time: bool = False
) -> None:
    """Make a change by another client, once or each time a function has read what is stored."""
    read = getattr(module, name)
    loop = asyncio.get_running_loop()

    def then_changed(*arguments: Any, **named: Any) -> Any:
        found = read(*arguments, **named)
        monkeypatch.setattr(module, name, read)
        asyncio.run_coroutine_threadsafe(call(), loop).result()
        if each_time:
            monkeypatch.setattr(module, name, then_changed)
        return found

    monkeypatch.setattr(module, name, then_changed)


@pytest.mark.parametrize("on_duplicate", WAYS)
@pytest.mark.parametrize("change", CHANGES)
async def test_a_group_that_another_client_changes_before_the_locks(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, change: str, on_duplicate: OnDuplicate
) -> None:
    async with Store.open(postgresql_url) as store, Store.open(postgresql_url) as other:
        buffer, theirs = await store.buffer("math"), await other.buffer("math")
        (old,) = await buffer.put(group("same", tags={"is": "old"}))
        before_the_locks(
            monkeypatch, PostgresqlSession, "identify", lambda: CHANGES[change](theirs),
            each_time=True,
        )  # fmt: skip
        put = buffer.put(group("same", tags={"is": "new"}), on_duplicate=on_duplicate)
        if on_duplicate == "error" and change != "deleted":
            with pytest.raises(rdb.DuplicateGroupError):
                await put
            return
        (found,) = await put
        (kept,) = await buffer.find()
        assert kept.id == found
        is_new = on_duplicate != "ignore" or change == "deleted"
        assert kept.tags == ({"is": "new"} if is_new else {})
        if change == "replaced in a new task" and on_duplicate != "renew":
            assert found == old
        else:
            assert found > old
    await check_invariants(postgresql_url)


async def test_a_group_that_another_client_evicts_and_replaces_before_the_locks(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Store.open(postgresql_url) as store, Store.open(postgresql_url) as other:
        buffer = await store.buffer("math", capacity=Capacity(groups=1))
        theirs = await other.buffer("math")
        await buffer.put(group("same"))
        ids: list[int] = []

        async def change() -> None:
            await theirs.put(group())
            ids[:] = await theirs.put(group("same"), on_duplicate="replace")

        before_the_locks(monkeypatch, PostgresqlSession, "identify", change, each_time=True)
        new = group("same", tags={"is": "new"})
        assert await buffer.put(new, on_duplicate="replace") == ids
        assert ids > [1]  # a new one, since the group was evicted
        assert await buffer.get(ids) == [new]
    await check_invariants(postgresql_url)


@pytest.mark.parametrize("on_duplicate", ["replace", "renew"])
async def test_a_group_that_another_client_puts_into_a_new_task_during_the_put(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, on_duplicate: OnDuplicate
) -> None:
    """That task is not locked, so the put runs again."""
    async with Store.open(postgresql_url) as store, Store.open(postgresql_url) as other:
        buffer, theirs = await store.buffer("math"), await other.buffer("math")
        await buffer.put(group("same"))
        delete, put = CHANGES["deleted"], lambda: theirs.put(group("same", "b"))
        before_the_locks(monkeypatch, PostgresqlSession, "identify", lambda: delete(theirs))
        before_the_locks(monkeypatch, capacity, "evict_surplus", put)
        new = group("same", tags={"is": "new"})
        (found,) = await buffer.put(new, on_duplicate=on_duplicate)
        (kept,) = await buffer.find()
        assert (kept.id, kept.tags, kept.task_name) == (found, {"is": "new"}, "gsm8k")
    await check_invariants(postgresql_url)


async def open_again(buffer: Buffer) -> None:
    await buffer.delete(uids="same")
    await buffer.open_group("b", "same", 3)


@pytest.mark.parametrize("change", ["opened again", "renewed", "deleted"])
async def test_an_open_group_that_another_client_changes_before_an_episode_is_added(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async with Store.open(postgresql_url) as store, Store.open(postgresql_url) as other:
        buffer, theirs = await store.buffer("math"), await other.buffer("math")
        await buffer.open_group("gsm8k", "same", 2)
        call = (CHANGES | {"opened again": open_again})[change]
        before_the_locks(monkeypatch, incremental_groups, "targets", lambda: call(theirs))
        match change:
            case "opened again":
                assert await buffer.add_episode("same", episode()) == "pending"
                (found,) = await buffer.find()
                assert (found.num_episodes, found.expected_episodes) == (1, 3)
            case "renewed":  # by a complete group
                with pytest.raises(rdb.GroupClosedError):
                    await buffer.add_episode("same", episode())
            case "deleted":
                with pytest.raises(rdb.UnknownGroupError):
                    await buffer.add_episode("same", episode())
    await check_invariants(postgresql_url)


async def test_an_episode_for_a_closed_group_that_maintenance_deletes(
    store: Store, clock: Clock
) -> None:
    buffer = await store.buffer("math", on_evict="delete", time_to_live=100)
    await buffer.put(group("same"))
    clock.jump(101)
    with pytest.raises(rdb.UnknownGroupError):
        await buffer.add_episode("same", episode())
