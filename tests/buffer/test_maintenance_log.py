"""Automatic maintenance is logged once."""

from __future__ import annotations

import logging

import pytest

from replaydb import Store
from replaydb.database.repository import draws
from replaydb.database.repository.draw_request import Drawn, DrawRequest
from replaydb.database.repository.locked import LockedBuffer
from replaydb.database.runtime.protocol import LostRaceError
from support.clock import Clock
from support.groups import episode, groups


async def test_leases_and_deadlines(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = await store.buffer("math", max_attempts=2)
    caplog.set_level(logging.INFO, "replaydb")
    await buffer.put(groups(3))
    for _ in range(2):
        await buffer.lease(2, ttl=50, owner="trainer-7")
        clock.jump(60)
        await buffer.put([])
        await buffer.sample(1)
    await buffer.open_group("gsm8k", "short", 3, deadline=50, min_episodes=1)
    await buffer.add_episode("short", episode())
    await buffer.open_group("gsm8k", "empty", 2, deadline=50)
    clock.jump(60)
    await buffer.sample(1)
    await buffer.sample(1)
    lease = await buffer.lease(1, ttl=50)
    await lease.nack(reason="no use")
    lease = await buffer.lease(1, ttl=50)
    await lease.nack(reason="no use")
    logged = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert logged == [
        ("WARNING", "buffer 'math': lease 1 of 'trainer-7' expired, 2 groups released"),
        ("WARNING", "buffer 'math': lease 2 of 'trainer-7' expired, 2 groups released"),
        ("WARNING", "buffer 'math': groups 1, 2 failed at their last attempt: lease expired"),
        ("INFO", "buffer 'math': group 4 is completed: 2 of 3 episodes missing at the deadline"),
        ("WARNING", "buffer 'math': group 5 is failed: 2 of 2 episodes missing at the deadline"),
        ("WARNING", "buffer 'math': groups 3 failed at their last attempt: no use"),
    ]


async def test_a_transaction_that_is_run_again(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await store.buffer("math")
    await buffer.put(groups(1))
    await buffer.lease(1, ttl=50)
    clock.jump(60)
    races = iter([LostRaceError("somebody was faster")])

    def draw(locked: LockedBuffer, request: DrawRequest) -> Drawn:
        drawn = draws_draw(locked, request)
        if lost := next(races, None):
            raise lost
        return drawn

    draws_draw = draws.draw
    monkeypatch.setattr(draws, "draw", draw)
    assert len(await buffer.sample(1)) == 1
    assert [one.getMessage().count("expired") for one in caplog.records] == [1]
