"""Clients of one process that put, sample, lease and acknowledge through a pooler."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from replaydb import Buffer, Prioritized, Store
from support.groups import group

BUFFER = "math"
TASKS = tuple(f"task-{i}" for i in range(10))
#: Time limit of a call, in seconds: 200 clients take long on a busy machine.
PATIENCE = 180.0


@dataclass
class Report:
    """What the clients of a process did.

    Attributes:
        put: The uids of groups whose put has returned.
        acked: The ids of groups whose ack has returned.
        num_draws: The number of samples and leases that have returned.
    """

    put: list[str] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    num_draws: int = 0


def run_clients(pipe: Connection, url: str, name: str, number: int) -> None:
    """Run clients, each with a store, until a message arrives; then send their `Report`.

    Sends `"ready"` once all stores are open. An error of a call ends the process.
    """
    pipe.send(asyncio.run(_run_all(pipe, url, name, number)))


async def _run_all(pipe: Connection, url: str, name: str, number: int) -> Report:
    report, is_over, are_open = Report(), asyncio.Event(), asyncio.Barrier(number + 1)

    async def client(i: int) -> None:
        async with Store.open(url, run=f"{name}-{i}", pool_size=1) as store:
            buffer = await store.buffer(BUFFER, create=False)
            await are_open.wait()
            turn = 0
            while not is_over.is_set():
                await _act(buffer, report, TASKS[i % len(TASKS)], f"{name}-{i}-{turn}")
                turn += 1

    async with asyncio.TaskGroup() as clients:
        for i in range(number):
            clients.create_task(client(i))
        await are_open.wait()
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        is_over.set()
    return report


async def _act(buffer: Buffer, report: Report, task: str, name: str) -> None:
    """Put three groups of a task, sample four, and lease and acknowledge two."""
    uids = [f"{name}-{i}" for i in range(3)]
    await buffer.put([group(uid, task) for uid in uids], timeout=PATIENCE)
    report.put += uids
    await buffer.sample(4, Prioritized(), tasks=task, timeout=PATIENCE)
    report.num_draws += 1
    lease = await buffer.lease(2, ttl=2 * PATIENCE, tasks=task, timeout=PATIENCE)
    report.num_draws += 1
    await lease.ack()
    report.acked += lease.batch.ids
