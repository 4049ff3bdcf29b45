"""Many clients of a PgBouncer that is reloaded, paused, killed and started meanwhile."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from multiprocessing import Pipe

import pytest
from sqlalchemy import func, select

from replaydb import Store
from replaydb.database.tables.schema import draw, draw_group, episode_group
from replaydb.operations import verify
from support import pgbouncer
from support.connections import transaction
from support.groups import groups
from support.invariants import check_invariants
from support.pgbouncer import Pooler
from support.pooled_clients import BUFFER, TASKS, Report, run_clients
from support.workers import Worker, workers

#: Groups that are stored before, so that every draw finds enough.
STORED = [one for task in TASKS for one in groups(100, task)]


@pytest.mark.parametrize(
    ("num_processes", "num_clients", "num_restarts"),
    [(2, 15, 1), pytest.param(4, 50, 5, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("how", ["true", pytest.param("prepared", marks=pytest.mark.nightly)])
async def test_a_pooler_that_is_restarted_under_load(
    postgresql_url: str, num_processes: int, num_clients: int, num_restarts: int, how: str
) -> None:
    """Ten clients share a server connection. No call fails, no group is lost or duplicated."""
    if pgbouncer.executable() is None:
        pytest.skip(pgbouncer.MISSING)
    if how == "prepared" and not pgbouncer.prepares():
        pytest.skip("PgBouncer 1.21 or later is not installed.")
    async with Store.open(postgresql_url) as store:
        await (await store.buffer(BUFFER)).put(STORED)
    settings = f"default_pool_size = {num_processes * num_clients // 10}"
    with ExitStack() as stack:
        pooler = stack.enter_context(pgbouncer.pgbouncer(postgresql_url, settings))
        pipes, started = [], []
        for number in range(num_processes):
            ours, theirs = Pipe()
            pipes.append(stack.enter_context(ours))
            url = pooler.url.replace("pgbouncer=true", f"pgbouncer={how}")
            started.append(Worker(run_clients, theirs, url, f"c{number}", num_clients))
            theirs.close()
        stack.enter_context(workers(*started))
        for pipe in pipes:
            assert await asyncio.to_thread(pipe.recv) == "ready"
        for _ in range(num_restarts):
            await restart(pooler)
        for pipe in pipes:
            pipe.send("stop")
        reports = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
    await check(postgresql_url, reports)


async def restart(pooler: Pooler) -> None:
    """Reload a pooler, pause and resume it, and kill and start it, in about three seconds."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        await asyncio.sleep(0.5)
        pooler.send(number)
    await asyncio.sleep(0.5)
    pooler.kill()
    await asyncio.sleep(0.3)
    pooler.start()
    await asyncio.sleep(0.7)


async def check(url: str, reports: list[Report]) -> None:
    """Compare the tables with the calls that have returned."""
    put = [uid for report in reports for uid in report.put]
    acked = [group_id for report in reports for group_id in report.acked]
    consumed = select(draw_group.c.group_id).where(draw_group.c.outcome == "acked")
    unsettled = select(draw_group.c.group_id).where(draw_group.c.outcome == "leased")
    async with transaction(url) as connection:
        stored = await connection.scalars(select(episode_group.c.group_uid))
        assert sorted(stored) == sorted([*put, *(one.group_uid for one in STORED)])
        num_draws = await connection.scalar(select(func.count()).select_from(draw))
        assert num_draws == sum(report.num_draws for report in reports)
        assert sorted(await connection.scalars(consumed)) == sorted(set(acked)) == sorted(acked)
        assert not (await connection.scalars(unsettled)).all()
    async with Store.open(url, read_only=True) as store:
        assert not (await verify(store)).problems
    await check_invariants(url)
