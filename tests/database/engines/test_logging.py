"""What the log tells of connections."""

from __future__ import annotations

import pytest

from replaydb import Store
from support.connections import cut_off
from support.groups import group


async def test_opening_is_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "replaydb")
    async with Store.open(url):
        pass
    [told] = [record for record in caplog.records if record.message.startswith("opened ")]
    assert url.split("/")[-1] in told.message


async def test_what_is_lost_and_found_is_told_once(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Store.open(postgresql_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        await buffer.sample(1)
        caplog.set_level("INFO", "replaydb.database.engines.connecting")
        for _ in range(2):
            await cut_off(postgresql_url)
            await buffer.put(group())
            await buffer.sample(1)
            told = [(record.levelname, record.message.split(": ")[1]) for record in caplog.records]
            assert told == [("WARNING", "a connection was lost"), ("INFO", "connected again")]
            caplog.clear()
