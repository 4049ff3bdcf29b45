"""Several processes on one database at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from processes.children import Child, child
from processes.derived import derived_group
from processes.stored import acknowledged, check_draws, check_stored
from processes.worker import BUFFER
from replaydb import Store

SECONDS = 4


async def test_two_processes_put_and_sample_for_a_while(
    sqlite_url: str, postgresql_url: str, tmp_path: Path
) -> None:
    """On both engines at the same time: no errors, no partial puts, no lost groups."""

    async def put_and_sample(url: str, acks: Path) -> list[dict[str, int]]:
        async with (
            child("put_and_sample", url, str(acks), str(SECONDS)) as one,
            child("put_and_sample", url, str(acks), str(SECONDS)) as two,
        ):
            return list(await asyncio.gather(one.receive(), two.receive()))

    urls = {sqlite_url: tmp_path / "sqlite", postgresql_url: tmp_path / "postgresql"}
    reports = await asyncio.gather(*(put_and_sample(url, acks) for url, acks in urls.items()))
    for (url, acks), workers in zip(urls.items(), reports, strict=True):
        assert all(worker["puts"] > 20 and worker["sampled"] > 50 for worker in workers)
        stored = await check_stored(url, acks)
        assert stored == len(acknowledged(acks))
        assert await check_draws(url) == sum(worker["sampled"] for worker in workers)


async def _waiting(worker: Child) -> None:
    assert await worker.receive() == {"ready": True}
    await asyncio.sleep(0.3)


async def test_a_put_wakes_a_sampler_of_another_process(url: str) -> None:
    async with Store.open(url) as store, child("wait", url) as worker:
        buffer = await store.buffer(BUFFER)
        await _waiting(worker)
        await buffer.put(derived_group("at-last"))
        woken = await asyncio.wait_for(worker.receive(), 30)
    assert woken == {"uid": "at-last"}
