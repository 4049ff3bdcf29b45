"""Log messages about opening a store and about lost connections."""

from __future__ import annotations

import pytest

from replaydb import Store
from support.connections import terminate_connections
from support.groups import group


async def test_opening_is_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "replaydb")
    async with Store.open(url):
        pass
    [logged] = [record for record in caplog.records if record.message.startswith("opened ")]
    assert url.split("/")[-1] in logged.message


async def test_a_loss_of_connections_is_logged_once(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Store.open(postgresql_url, run="a") as store:
        buffer = await store.buffer("math")
        await buffer.put(group())
        await buffer.sample(1)
        caplog.set_level("INFO", "replaydb.database.postgresql.connections")
        for _ in range(2):
            await terminate_connections(postgresql_url)
            await buffer.put(group())
            await buffer.sample(1)
            logged = [(one.levelname, one.message.split(": ")[1]) for one in caplog.records]
            assert logged == [("WARNING", "a connection was lost"), ("INFO", "connected again")]
            caplog.clear()
