"""Main functions of child processes."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.buffer import core
from replaydb.database.repository import policy
from support.agents import NUM_TURNS, chain, long_prompt
from support.groups import episode, group
from support.watching import watched


def consume(url: str, log: str, seed: int) -> None:
    """Lease and ack until no groups are left, and append every step to a log file."""
    chance = random.Random(seed)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def log_step(step: str, lease: rdb.Lease) -> None:
        entry = [step, time.monotonic(), os.getpid(), lease.id, lease.batch.ids]
        os.write(file, f"{json.dumps(entry)}\n".encode())

    async def work(buffer: Buffer) -> None:
        while await buffer.count(statuses=["completed", "leased"]):
            try:
                lease = await buffer.lease(40, ttl=1.0, timeout=0.3, at_least=1)
            except rdb.NotEnoughGroupsError:
                continue
            log_step("hold", lease)
            await asyncio.sleep(chance.uniform(0, 0.02))
            try:
                await lease.ack()
            except rdb.LeaseExpiredError:
                log_step("lost", lease)
            else:
                log_step("ack", lease)

    _run(url, work)


def write(url: str, name: str, puts: int, pause: float) -> None:
    """Put one to three groups at a time."""

    async def work(buffer: Buffer) -> None:
        for i in range(puts):
            several = [group(f"{name}-{i}-{k}", version=i) for k in range(1 + i % 3)]
            await buffer.put(several)
            await asyncio.sleep(pause)

    _run(url, work)


def read(url: str, draws: int, n: int, pause: float) -> None:
    """Sample n groups at a time."""

    async def work(buffer: Buffer) -> None:
        for _ in range(draws):
            await buffer.sample(n, timeout=60)
            await asyncio.sleep(pause)

    _run(url, work)


def add(url: str, num_groups: int, position: int) -> None:
    """Add an episode to each of the open groups `group-0`, `group-1` and so on, in any order."""
    order = random.Random(position).sample(range(num_groups), num_groups)

    async def work(buffer: Buffer) -> None:
        for i in order:
            await buffer.add_episode(f"group-{i}", episode(float(position)), position=position)

    _run(url, work)


def die_with_lease(url: str, n: int, how: dict[str, Any]) -> None:
    """Take a lease, and kill this process."""

    async def work(buffer: Buffer) -> None:
        await buffer.lease(n, ttl=600, **how)
        os.kill(os.getpid(), signal.SIGKILL)

    _run(url, work)


def die_at(url: str, action: str, where: str) -> None:
    """Perform an action, and kill this process when it calls a function, given as `module:name`."""
    module_name, _, name = where.partition(":")
    module = importlib.import_module(module_name)

    def killed(*arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def work(buffer: Buffer) -> None:
        if action == "ack":
            lease = await buffer.lease(2, ttl=600)
            setattr(module, name, killed)
            await lease.ack(cursor={"step": 7})
        elif action == "revoke":
            lease = await buffer.lease(2, ttl=36_000)
            setattr(module, name, killed)
            await buffer.revoke(lease.id)
        setattr(module, name, killed)
        if action == "put":
            await buffer.put([group("new-0"), group("new-1")], cursor={"dataset": 2})
        elif action == "add":
            await buffer.add_episode("open", episode(2.0), position=1)
        elif action == "sample":
            await buffer.sample(2)
        elif action == "index":
            await buffer.update_settings(indexed_tags=["level"])
        elif action == "lease":
            await buffer.lease(2, ttl=600)

    _run(url, work)


def die_in_trajectory(url: str, uid: str, log: str, at: int) -> None:
    """Generate a trajectory, and kill this process before the statement of a number, from 1.

    The uids of the turns whose append returned are written to the log.
    """

    async def work(buffer: Buffer) -> None:
        [claim] = await buffer.claim(ttl=600, where=rdb.col.group_uid == uid)
        for one in chain(NUM_TURNS):
            await claim.append_turn(one)
            acknowledged.write(f"{one.uid}\n")
        await claim.finish_episode()

    with Path(log).open("w", buffering=1) as acknowledged:
        _run_until(url, at, work)


def die_joining(url: str, uid: str, at: int) -> None:
    """Complete a group, and kill this process before the statement of a number, from 1."""

    async def work(buffer: Buffer) -> None:
        await buffer.add_episode(uid, long_prompt(1))
        await buffer.drain()

    _run_until(url, at, work)


def die_annotating(url: str, annotations: list[rdb.Annotation], at: int) -> None:
    """Annotate groups, and kill this process before the statement of a number, from 1."""

    async def work(buffer: Buffer) -> None:
        await buffer.annotate(annotations, author="judge")

    _run_until(url, at, work)


def _run_until(url: str, at: int, work: Callable[[Buffer], Any]) -> None:
    """Work, and kill this process before the statement of a number, from 1."""
    left = at

    def watch(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    async def main() -> None:
        async with Store.open(url, run="worker") as store:
            buffer = await store.buffer("math", create=False)
            with watched(store, watch):
                await work(buffer)

    asyncio.run(main())


def die_advancing(url: str) -> None:
    """Advance the policy, and kill this process before the staleness of groups is updated."""
    policy.AT_ONCE = 0

    def killed(*arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def work(buffer: Buffer) -> None:
        setattr(core, "behind_locked", killed)  # noqa: B010 - core does not export it
        await buffer.advance_policy(5)

    _run(url, work)


def _run(url: str, work: Callable[[Buffer], Any]) -> None:
    async def main() -> None:
        async with Store.open(url, run="worker") as store:
            await work(await store.buffer("math", create=False))

    asyncio.run(main())
