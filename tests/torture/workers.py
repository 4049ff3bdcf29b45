"""Worker processes of attacks, which are killed, frozen, disconnected and given wrong clocks.

Each worker performs one role on a database until it is killed or its time is up. After each call
has returned, it appends the result to a log as one line of JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import replaydb as rdb
from processes.derived import check_group, derived_group
from replaydb import Buffer, Store
from replaydb.database.postgresql import backend as postgresql
from replaydb.database.sqlite import backend as sqlite
from support.groups import episode
from support.workers import Worker

BUFFER = "torture"
#: Errors that concurrent calls of other workers can cause. Any other error is a violation.
EXPECTED = (
    rdb.NotEnoughGroupsError,
    rdb.BufferFullError,
    rdb.RateLimitedError,
    rdb.LeaseExpiredError,
    rdb.GroupLeasedError,
    rdb.UnknownGroupError,
    rdb.PayloadGoneError,
)


class RoleWorker(Worker):
    """A worker process that performs a role. Options are those of `main`."""

    def __init__(self, url: str, log: Path, role: str, seed: int, **options: Any) -> None:
        super().__init__(main, url, str(log), role, seed, options)

    def freeze(self) -> None:
        """Stop the process at any point."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process."""
        os.kill(self.pid, signal.SIGCONT)


class CallLog:
    """Log of the calls of this process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(self, call: str, begin: float, detail: Any) -> None:
        line = json.dumps([call, begin, time.monotonic(), os.getpid(), detail])
        os.write(self._file, f"{line}\n".encode())


#: Possible ttls of leases in seconds; the attack on clocks replaces them.
TTLS = [0.5, 600.0]

Step = Callable[[Buffer, CallLog, random.Random, int], Awaitable[None]]


async def put(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Put one to four groups, whose uids contain their number, with a cursor that lists them."""
    size, begin = chance.randint(1, 4), time.monotonic()
    uids = [f"{os.getpid()}.{number}:{i}:{size}" for i in range(size)]
    cursor = {f"put-{os.getpid()}": uids}
    await buffer.put([derived_group(uid) for uid in uids], cursor=cursor, timeout=5)
    log.record("put", begin, uids)


async def sample(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Sample groups and check their content."""
    policies: list[rdb.SamplingPolicy] = [rdb.Uniform(), rdb.Prioritized(), rdb.Fifo()]
    policy = chance.choice(policies)
    begin = time.monotonic()
    batch = await buffer.sample(chance.choice([1, 4]), policy, timeout=0.5, at_least=1)
    for group in batch.groups:
        if ":" in group.group_uid:
            check_group(group)
    log.record("sample", begin, batch.ids)


async def lease(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Lease groups for a short time, and ack, nack or revoke the lease."""
    ttl, begin = chance.choice(TTLS), time.monotonic()
    leased = await buffer.lease(3, ttl=ttl, timeout=0.5, at_least=1)
    facts = {"lease": leased.id, "ids": leased.batch.ids, "ttl": ttl}
    log.record("lease", begin, facts)
    await asyncio.sleep(chance.uniform(0, 0.03))
    how, begin = chance.choice(["ack", "ack", "nack", "revoke"]), time.monotonic()
    if how == "revoke":
        await buffer.revoke(leased.id)
    elif chance.random() < 0.3:  # as another process would continue it
        again = await buffer.open_lease(leased.id, ttl=ttl)
        await (again.ack() if how == "ack" else again.nack())
    else:
        await (leased.ack() if how == "ack" else leased.nack())
    log.record(how, begin, facts)


async def add_episodes(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Open a group and add its episodes one by one."""
    uid, begin = f"incremental-{os.getpid()}.{number}", time.monotonic()
    await buffer.open_group("math", uid, 3, timeout=5)
    for position in range(3):
        await buffer.add_episode(uid, episode(float(position)), position=position, timeout=5)
    log.record("put", begin, [uid])


async def train(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Make the other calls of a trainer: priorities, policy version and statistics."""
    begin = time.monotonic()
    batch = await buffer.sample(2, timeout=0.5)
    await buffer.update_priorities(batch.ids, [chance.uniform(0, 4) for _ in batch.ids])
    with suppress(rdb.InvalidInputError):  # another worker has set a higher version
        await buffer.advance_policy(buffer.policy_version + 1)
    await buffer.stats()
    log.record("train", begin, None)


async def curate(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Update priority and tags of the best groups, and the status of others."""
    begin = time.monotonic()
    best = await buffer.find(statuses="completed", order_by=rdb.col.priority.desc(), limit=3)
    ids = [one.id for one in best]
    await buffer.update(ids[:2], priority=chance.uniform(0, 4), tags={"seen": number})
    status = chance.choice(["archived", "filtered", "failed", "expired", "completed"])
    await buffer.update(ids[2:], status=status, reason="curated")
    log.record("curate", begin, {"ids": ids[2:], "status": status})


ROLES: Mapping[str, Step] = {
    "put": put,
    "sample": sample,
    "lease": lease,
    "add_episodes": add_episodes,
    "train": train,
    "curate": curate,
}


def main(url: str, log: str, role: str, seed: int, options: dict[str, Any]) -> None:
    """Perform a role.

    Options: `seconds`: duration, by default until the process is killed; `unavailable`: whether
    lost connections are expected; `patches`: values of module attributes; `clocks`: offsets of the
    clock in seconds, used in turn.
    """
    for name, value in options.get("patches", {}).items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    if seed % 2:  # read payloads as for large groups
        sqlite.SMALL_DRAW_BYTES = postgresql.SMALL_DRAW_BYTES = -1
    if skews := options.get("clocks"):
        shift_clock(skews)
    logging.getLogger("replaydb").setLevel(logging.ERROR)  # warnings are expected
    asyncio.run(_work(url, CallLog(log), role, random.Random(seed), options))


async def _work(
    url: str, log: CallLog, role: str, chance: random.Random, options: dict[str, Any]
) -> None:
    end = None
    expected: tuple[type[Exception], ...] = EXPECTED
    if options.get("unavailable"):
        expected = (*EXPECTED, rdb.DatabaseUnavailableError)
    number = 0
    while end is None or time.monotonic() < end:
        try:
            async with Store.open(url, run=f"workers-{os.getpid()}", lineage="workers") as store:
                buffer = await store.buffer(BUFFER)
                end = end or time.monotonic() + options.get("seconds", float("inf"))
                while time.monotonic() < end:
                    number += 1
                    chosen = chance.choice(sorted(ROLES)) if role == "any" else role
                    try:
                        await ROLES[chosen](buffer, log, chance, number)
                    except rdb.DatabaseReplacedError:  # never expected
                        raise
                    except expected as error:
                        log.record(type(error).__name__, time.monotonic(), None)
        except rdb.DatabaseReplacedError:
            log.record("error", time.monotonic(), traceback.format_exc())
        except expected as error:  # while opening or closing
            log.record(type(error).__name__, time.monotonic(), None)
            await asyncio.sleep(0.1)
        except Exception:
            log.record("error", time.monotonic(), traceback.format_exc())
            return


def shift_clock(skews: list[float]) -> None:
    """Shift the clock that replaydb reads, by another offset every half second."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            skew = skews[int(2 * time.time()) % len(skews)]
            return datetime.now(tz) + timedelta(seconds=skew)

    # Otherwise the first store would import these later, with the right clock.
    importlib.import_module("replaydb.database.sqlite.backend")
    importlib.import_module("replaydb.database.postgresql.backend")
    for name, module in list(sys.modules.items()):
        if name.startswith("replaydb.") and getattr(module, "datetime", None) is datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]
