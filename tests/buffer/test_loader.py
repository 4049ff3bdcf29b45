"""Loader: batches prefetched in the background."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from replaydb import (
    Batch,
    Buffer,
    Fifo,
    GroupStatus,
    InvalidInputError,
    Lease,
    LeaseExpiredError,
    NotEnoughGroupsError,
    Uniform,
)
from support.clock import Clock
from support.engines import postgresql_nightly
from support.groups import group, groups


async def counted(buffer: Buffer, status: GroupStatus) -> int:
    return await buffer.count(statuses=status)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a background condition holds."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.005)


async def settled(buffer: Buffer, status: GroupStatus, count: int) -> None:
    """Wait until `count` groups have a status."""

    async def condition() -> bool:
        return await counted(buffer, status) == count

    await until(condition)


async def test_batches_come_in_order_with_their_steps(buffer: Buffer) -> None:
    ids = await buffer.put(groups(3))
    async with buffer.loader(3, Fifo(), first_step=5, num_steps=4) as loader:
        batches = [batch async for batch in loader]
    assert [batch.ids for batch in batches] == [ids] * 4
    assert [draw.step for draw in reversed(await buffer.draws())] == [5, 6, 7, 8]


@postgresql_nightly
async def test_at_most_prefetch_batches_are_drawn_ahead(buffer: Buffer) -> None:
    await buffer.put(groups(2))
    loader = buffer.loader(2, prefetch=2)
    await anext(loader)

    async def three() -> bool:
        return len(await buffer.draws()) == 3

    await until(three)
    await asyncio.sleep(0.1)
    assert len(await buffer.draws()) == 3
    await loader.aclose()
    await loader.aclose()


async def test_without_prefetch_nothing_is_drawn_ahead(buffer: Buffer) -> None:
    await buffer.put(groups(2))
    async with buffer.loader(2, prefetch=0) as loader:
        await anext(loader)
        await asyncio.sleep(0.05)
        assert len(await buffer.draws()) == 1


async def test_collation_overlaps_the_training_step(buffer: Buffer) -> None:
    await buffer.put(groups(2))
    threads = []
    second = threading.Event()

    def collate(batch: Batch) -> list[int]:
        threads.append(threading.current_thread())
        if len(threads) == 2:
            second.set()
        return batch.ids

    async with buffer.loader(2, Fifo(), collate=collate, prefetch=1) as loader:
        first = await anext(loader)
        assert await asyncio.to_thread(second.wait, 30)  # the training step
        assert await anext(loader) == first
    assert threading.main_thread() not in threads


@postgresql_nightly
async def test_waiting_for_groups_ends_at_the_timeout(buffer: Buffer) -> None:
    async with buffer.loader(2, Fifo()) as loader:
        waiting = asyncio.create_task(anext(loader))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        ids = await buffer.put(groups(2))
        assert (await waiting).ids == ids
    async with buffer.loader(3, timeout=0.05) as loader:
        with pytest.raises(NotEnoughGroupsError):
            await anext(loader)
        await buffer.put(group())
        assert len(await anext(loader)) == 3


@postgresql_nightly
async def test_an_error_of_collate_is_raised_in_place_of_its_batch(buffer: Buffer) -> None:
    await buffer.put(groups(2))
    seen = []

    def collate(batch: Batch) -> int:
        seen.append(batch)
        if len(seen) == 2:
            raise ZeroDivisionError
        return len(seen)

    async with buffer.loader(2, collate=collate) as loader:
        assert await anext(loader) == 1
        with pytest.raises(ZeroDivisionError):
            await anext(loader)
        assert await anext(loader) == 3


async def test_asking_for_the_next_batch_acks_the_one_before(buffer: Buffer) -> None:
    await buffer.put(groups(6))
    async with buffer.loader(2, Fifo(), lease=True, prefetch=1, ttl=60) as loader:
        first = await anext(loader)
        await settled(buffer, GroupStatus.LEASED, 4)
        assert await counted(buffer, GroupStatus.ARCHIVED) == 0
        second = await anext(loader)
        assert await counted(buffer, GroupStatus.ARCHIVED) == 2
        assert not set(first.ids) & set(second.ids)
    assert await counted(buffer, GroupStatus.ARCHIVED) == 4
    assert await counted(buffer, GroupStatus.COMPLETED) == 2
    assert await buffer.leases() == []


@postgresql_nightly
async def test_a_loop_that_ends_has_acked_everything(buffer: Buffer) -> None:
    await buffer.put(groups(6))
    async with buffer.loader(2, lease=True, num_steps=3) as loader:
        assert len([batch async for batch in loader]) == 3
        assert await counted(buffer, GroupStatus.ARCHIVED) == 6


@postgresql_nightly
async def test_an_error_in_the_block_nacks_the_current_batch(buffer: Buffer) -> None:
    await buffer.put(groups(4))
    seen: list[int] = []

    async def train() -> None:
        async with buffer.loader(2, Fifo(), lease=True) as loader:
            seen.extend((await anext(loader)).ids)
            raise ZeroDivisionError("out of memory")

    with pytest.raises(ZeroDivisionError):
        await train()
    assert await counted(buffer, GroupStatus.COMPLETED) == 4
    (returned, *_) = await buffer.get(seen)
    assert returned.attempts == 1
    assert returned.status_reason == "ZeroDivisionError: out of memory"


async def test_drawing_stops_before_leases_are_released(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the producer would draw the released groups again."""
    await buffer.put(groups(2))
    loader = buffer.loader(2, lease=True, prefetch=2)
    nack = Lease.nack

    async def slow_nack(lease: Lease, *arguments: Any, **options: Any) -> None:
        await nack(lease, *arguments, **options)
        if loader._producer is not None:
            await settled(buffer, GroupStatus.LEASED, 2)

    monkeypatch.setattr(Lease, "nack", slow_nack)

    async def train() -> None:
        async with loader:
            await anext(loader)
            raise ZeroDivisionError("out of memory")

    with pytest.raises(ZeroDivisionError):
        await train()
    for one in await buffer.find():
        assert (one.status, one.attempts) == (GroupStatus.COMPLETED, 1)
        assert one.status_reason == "ZeroDivisionError: out of memory"


async def test_aclose_releases_all_leases(buffer: Buffer) -> None:
    await buffer.put(groups(4))
    loader = buffer.loader(2, lease=True)
    await anext(loader)
    await settled(buffer, GroupStatus.LEASED, 4)
    await loader.aclose()
    assert await counted(buffer, GroupStatus.COMPLETED) == 4
    assert await buffer.leases() == []


@postgresql_nightly
async def test_an_error_of_collate_releases_the_lease(buffer: Buffer) -> None:
    await buffer.put(groups(2))

    def collate(batch: Batch) -> None:
        raise ZeroDivisionError

    async with buffer.loader(2, lease=True, collate=collate, prefetch=0) as loader:
        with pytest.raises(ZeroDivisionError):
            await anext(loader)
        assert await counted(buffer, GroupStatus.COMPLETED) == 2


@postgresql_nightly
async def test_leases_are_kept_alive_while_they_wait(
    buffer: Buffer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replaydb.buffer.heartbeat.HEARTBEATS_PER_TTL", 1200)
    await buffer.put(groups(4))
    async with buffer.loader(2, Fifo(), lease=True, ttl=60, num_steps=2) as loader:
        await anext(loader)
        await settled(buffer, GroupStatus.LEASED, 4)
        clock.jump(40)
        soon = clock.now() + timedelta(seconds=30)

        async def extended() -> bool:
            return all(info.expires_at > soon for info in await buffer.leases())

        await until(extended)
        clock.jump(40)
        await anext(loader)
    assert await counted(buffer, GroupStatus.ARCHIVED) == 4


async def test_a_lease_that_was_lost_is_reported_once(buffer: Buffer) -> None:
    await buffer.put(groups(4))
    async with buffer.loader(2, Fifo(), lease=True, prefetch=0, ttl=60) as loader:
        await anext(loader)
        assert loader.lease is not None
        await buffer.revoke(loader.lease.id)
        with pytest.raises(LeaseExpiredError):
            await anext(loader)
        assert len(await anext(loader)) == 2


@postgresql_nightly
async def test_a_cursor_goes_with_an_ack_by_hand(buffer: Buffer) -> None:
    await buffer.put(groups(2))
    async with buffer.loader(2, lease=True, prefetch=0) as loader:
        await anext(loader)
        assert loader.lease is not None
        await loader.lease.ack(cursor={"step": 1})
    assert await buffer.cursor("step") == 1
    assert await counted(buffer, GroupStatus.ARCHIVED) == 2


async def test_a_restarted_loader_resumes_with_the_prefetched_draws(buffer: Buffer) -> None:
    await buffer.put(groups(20))
    loader = buffer.loader(2, Uniform(), prefetch=2)
    await anext(loader)

    async def two_are_ready() -> bool:
        return len(loader.state_dict()["draws"]) == 2

    await until(two_are_ready)
    state = loader.state_dict()
    assert state["step"] == 1
    expected = [(await anext(loader)).ids for _ in range(2)]
    await loader.aclose()
    count = len(await buffer.draws())
    again = buffer.loader(2, Uniform(), prefetch=0)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert [(await anext(again)).ids for _ in range(2)] == expected
    assert len(await buffer.draws()) == count
    await anext(again)
    assert (await buffer.draws())[0].step == 3


async def test_prefetched_draws_of_deleted_groups_are_replaced(buffer: Buffer) -> None:
    await buffer.put(groups(4))
    old = await buffer.sample(2, Fifo())
    await buffer.delete(old.ids[:1])
    loader = buffer.loader(3, prefetch=0)
    loader.load_state_dict({"step": 4, "draws": [old.draw_id, 10**6]})
    assert len(await anext(loader)) == 3
    assert (await buffer.draws())[0].step == 4


async def test_states_that_cannot_be_loaded(buffer: Buffer) -> None:
    await buffer.put(groups(2))
    loader = buffer.loader(2)
    for wrong in ({}, {"step": -1, "draws": []}, {"step": 1, "draws": [0.5]}):
        with pytest.raises(InvalidInputError):
            loader.load_state_dict(wrong)
    await anext(loader)
    with pytest.raises(InvalidInputError, match="a call before the first batch"):
        loader.load_state_dict({"step": 1, "draws": []})
    await loader.aclose()


async def test_a_cancelled_wait_loses_nothing(buffer: Buffer) -> None:
    ids = await buffer.put(groups(2))
    async with buffer.loader(2, Fifo(), lease=True, prefetch=1) as loader:
        assert (await anext(loader)).ids == ids
        waiting = asyncio.create_task(anext(loader))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        more = await buffer.put([group("a"), group("b")])
        assert (await anext(loader)).ids == more


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_two_requests_at_a_time(buffer: Buffer, prefetch: int) -> None:
    await buffer.put(groups(8))
    seen: list[int] = []
    async with buffer.loader(
        2, Fifo(), lease=True, prefetch=prefetch, num_steps=3, ttl=60
    ) as loader:

        async def consume() -> None:
            async for batch in loader:
                seen.extend(batch.ids)

        done = await asyncio.gather(consume(), consume(), return_exceptions=True)
    assert [str(error) for error in done if error is not None] == [
        "loader: expected one request at a time, got a second one"
    ]
    assert len(seen) == len(set(seen)) == 6
    assert await counted(buffer, GroupStatus.ARCHIVED) == 6
    assert await counted(buffer, GroupStatus.COMPLETED) == 2
    assert await buffer.leases() == []


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("lease", [True, False])
async def test_a_closed_loader_draws_nothing(buffer: Buffer, prefetch: int, lease: bool) -> None:
    await buffer.put(groups(4))
    async with buffer.loader(1, lease=lease, prefetch=prefetch) as loader:
        await anext(loader)
    drawn = len(await buffer.draws())
    state = loader.state_dict()
    message = "loader: expected one that is open, got one that was closed"
    with pytest.raises(InvalidInputError, match=message):
        await anext(loader)
    with pytest.raises(InvalidInputError, match=message):
        await loader.__aenter__()
    with pytest.raises(InvalidInputError, match=message):
        loader.load_state_dict(state)
    assert len(await buffer.draws()) == drawn
    assert await buffer.leases() == []


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_closing_ends_a_request_that_waits_for_groups(buffer: Buffer, prefetch: int) -> None:
    async with asyncio.timeout(60), buffer.loader(2, lease=True, prefetch=prefetch) as loader:
        waiting = asyncio.create_task(anext(loader))
        await asyncio.sleep(0.05)
    with pytest.raises(InvalidInputError, match="one that was closed"):
        await waiting
    await buffer.put(groups(2))
    assert await counted(buffer, GroupStatus.COMPLETED) == 2


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_closing_releases_a_batch_that_is_being_made(buffer: Buffer, prefetch: int) -> None:
    await buffer.put(groups(4))
    began, end = threading.Event(), threading.Event()

    def collate(batch: Batch) -> None:
        began.set()
        end.wait(60)

    loader = buffer.loader(2, lease=True, prefetch=prefetch, collate=collate)
    waiting = asyncio.create_task(anext(loader))
    assert await asyncio.to_thread(began.wait, 60)
    await loader.aclose()
    end.set()
    with pytest.raises(InvalidInputError, match="one that was closed"):
        await waiting
    assert await counted(buffer, GroupStatus.COMPLETED) == 4
    assert await buffer.leases() == []


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_closing_waits_for_an_ack(
    buffer: Buffer, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that acks gets an error instead of a batch. Its own batch stays acked."""
    await buffer.put(groups(6))
    acking, end = asyncio.Event(), asyncio.Event()
    ack = Lease.ack

    async def slow_ack(lease: Lease) -> Any:
        acking.set()
        await end.wait()
        return await ack(lease)

    async with asyncio.timeout(60):
        async with buffer.loader(2, Fifo(), lease=True, prefetch=prefetch) as loader:
            await anext(loader)
            monkeypatch.setattr(Lease, "ack", slow_ack)
            waiting = asyncio.create_task(anext(loader))
            await acking.wait()
            asyncio.get_running_loop().call_later(0.05, end.set)
        with pytest.raises(InvalidInputError, match="one that was closed"):
            await waiting
    assert await counted(buffer, GroupStatus.ARCHIVED) == 2
    assert await counted(buffer, GroupStatus.COMPLETED) == 4
    assert await buffer.leases() == []


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_a_cancelled_request_leaves_nothing_without_prefetching(
    buffer: Buffer, prefetch: int
) -> None:
    async with buffer.loader(2, Fifo(), lease=True, prefetch=prefetch) as loader:
        waiting = asyncio.create_task(anext(loader))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await buffer.put(groups(2))
        await settled(buffer, GroupStatus.LEASED, 2 if prefetch else 0)
        assert len(await anext(loader)) == 2


async def test_the_state_of_a_closed_loader_has_the_prefetched_draws(buffer: Buffer) -> None:
    await buffer.put(groups(20))
    async with buffer.loader(2, Uniform(), prefetch=2) as loader:
        first = await anext(loader)

        async def two_are_ready() -> bool:
            return len(loader.state_dict()["draws"]) == 2

        await until(two_are_ready)
        state = loader.state_dict()
    assert loader.state_dict() == state
    assert state["draws"] == [draw.id for draw in reversed(await buffer.draws(limit=2))]
    assert first.draw_id not in state["draws"]


async def test_batch_sizes_that_are_refused(buffer: Buffer) -> None:
    with pytest.raises(InvalidInputError, match="at_least"):
        buffer.loader(2, at_least=3)
    with pytest.raises(InvalidInputError, match="batch_size"):
        buffer.loader({"gsm8k": 0})


async def test_batches_that_need_not_be_full(buffer: Buffer) -> None:
    await buffer.put(groups(3))
    async with buffer.loader(2, Fifo(), lease=True, prefetch=0, at_least=1) as loader:
        assert [len(await anext(loader)), len(await anext(loader))] == [2, 1]


async def test_collate_uses_the_stream_where_the_loader_was_created(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, streams are names that belong to threads. See also `tests/test_gpu.py`."""
    current = threading.local()

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        current.name = name
        yield
        del current.name

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current.name)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    await buffer.put(groups(2))
    with stream("of the trainer"):
        loader = buffer.loader(2, collate=lambda _: current.name, num_steps=2)
    with stream("another"):
        assert [name async for name in loader] == ["of the trainer"] * 2
    await loader.aclose()
