"""Other processes, to be killed, frozen, cut off and given a wrong clock.

Each lives one role on one database until it is killed or told to end, and tells in a log, a line
of JSON a call, what it was promised: after the call has returned, never before.
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
from replaydb.database.engines.postgresql import PostgresqlBackend
from replaydb.database.engines.sqlite import SqliteBackend
from support.groups import episode
from support.workers import Worker

BUFFER = "torture"
#: What a call may be told by others' work, or by a lost connection; anything else is an error.
EXPECTED = (
    rdb.NotEnoughGroupsError,
    rdb.BufferFullError,
    rdb.RateLimitedError,
    rdb.LeaseExpiredError,
    rdb.GroupLeasedError,
    rdb.UnknownGroupError,
    rdb.PayloadGoneError,
)


class Member(Worker):
    """One of the crew."""

    def __init__(self, url: str, log: Path, role: str, seed: int, **options: Any) -> None:
        super().__init__(live, url, str(log), role, seed, options)

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)


class Journal:
    """Tells what was done."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, what: str, begin: float, detail: Any) -> None:
        line = json.dumps([what, begin, time.monotonic(), os.getpid(), detail])
        os.write(self._file, f"{line}\n".encode())


#: Seconds a lease may last; patched where clocks jump.
TTLS = [0.5, 600.0]

Step = Callable[[Buffer, Journal, random.Random, int], Awaitable[None]]


async def put(buffer: Buffer, journal: Journal, chance: random.Random, number: int) -> None:
    """One to four groups, whose uids say how many came together, and a cursor that names them."""
    size, begin = chance.randint(1, 4), time.monotonic()
    uids = [f"{os.getpid()}.{number}:{i}:{size}" for i in range(size)]
    cursor = {f"put-{os.getpid()}": uids}
    await buffer.put([derived_group(uid) for uid in uids], cursor=cursor, timeout=5)
    journal.tell("put", begin, uids)


async def sample(buffer: Buffer, journal: Journal, chance: random.Random, number: int) -> None:
    """Every group drawn is checked, byte for byte."""
    policies: list[rdb.SamplingPolicy] = [rdb.Uniform(), rdb.Prioritized(), rdb.Fifo()]
    policy = chance.choice(policies)
    begin = time.monotonic()
    batch = await buffer.sample(chance.choice([1, 4]), policy, timeout=0.5, at_least=1)
    for group in batch.groups:
        if ":" in group.group_uid:
            check_group(group)
    journal.tell("sample", begin, batch.ids)


async def lease(buffer: Buffer, journal: Journal, chance: random.Random, number: int) -> None:
    """Hold some for a moment; ack, give back, take back, or (seldom) forget."""
    ttl, begin = chance.choice(TTLS), time.monotonic()
    held = await buffer.lease(3, ttl=ttl, timeout=0.5, at_least=1)
    facts = {"lease": held.id, "ids": held.batch.ids, "ttl": ttl}
    journal.tell("hold", begin, facts)
    await asyncio.sleep(chance.uniform(0, 0.03))
    what, begin = chance.choice(["ack", "ack", "nack", "revoke"]), time.monotonic()
    if what == "revoke":
        await buffer.revoke(held.id)
    elif chance.random() < 0.3:  # as another process would go on with it
        again = await buffer.open_lease(held.id, ttl=ttl)
        await (again.ack() if what == "ack" else again.nack())
    else:
        await (held.ack() if what == "ack" else held.nack())
    journal.tell(what, begin, facts)


async def pieces(buffer: Buffer, journal: Journal, chance: random.Random, number: int) -> None:
    """A group that arrives episode by episode."""
    uid, begin = f"piece-{os.getpid()}.{number}", time.monotonic()
    await buffer.open_group("math", uid, 3, timeout=5)
    for position in range(3):
        await buffer.add_episode(uid, episode(float(position)), position=position, timeout=5)
    journal.tell("put", begin, [uid])


async def keep(buffer: Buffer, journal: Journal, chance: random.Random, number: int) -> None:
    """A trainer's other calls."""
    begin = time.monotonic()
    batch = await buffer.sample(2, timeout=0.5)
    await buffer.update_priorities(batch.ids, [chance.uniform(0, 4) for _ in batch.ids])
    with suppress(rdb.InvalidInputError):  # another has gone further meanwhile
        await buffer.advance_policy(buffer.policy_version + 1)
    await buffer.stats()
    journal.tell("keep", begin, None)


async def curate(buffer: Buffer, journal: Journal, chance: random.Random, number: int) -> None:
    """Some of the best are marked, the rest of them taken out."""
    begin = time.monotonic()
    best = await buffer.find(statuses="completed", order_by=rdb.col.priority.desc(), limit=3)
    ids = [one.id for one in best]
    await buffer.update(ids[:2], priority=chance.uniform(0, 4), tags={"seen": number})
    out = chance.choice(["archived", "filtered", "failed", "expired", "completed"])
    await buffer.update(ids[2:], status=out, reason="curated")
    journal.tell("curate", begin, {"ids": ids[2:], "status": out})


ROLES: Mapping[str, Step] = {
    "put": put,
    "sample": sample,
    "lease": lease,
    "pieces": pieces,
    "keep": keep,
    "curate": curate,
}


def live(url: str, log: str, role: str, seed: int, options: dict[str, Any]) -> None:
    """The life of a process.

    Options: `seconds` of work until it ends by itself; `unavailable`: whether lost connections
    are to be expected; `patches`: values of module attributes; `clocks`: seconds its clock is
    ahead, in turns.
    """
    for name, value in options.get("patches", {}).items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    if seed % 2:  # as if groups were large
        SqliteBackend.small_draw_bytes = PostgresqlBackend.small_draw_bytes = -1
    if skews := options.get("clocks"):
        shift_clock(skews)
    logging.getLogger("replaydb").setLevel(logging.ERROR)  # losses and retries are meant
    asyncio.run(_live(url, Journal(log), role, random.Random(seed), options))


async def _live(
    url: str, journal: Journal, role: str, chance: random.Random, options: dict[str, Any]
) -> None:
    end = None
    expected: tuple[type[Exception], ...] = EXPECTED
    if options.get("unavailable"):
        expected = (*EXPECTED, rdb.DatabaseUnavailableError)
    number = 0
    while end is None or time.monotonic() < end:
        try:
            async with Store.open(url, run=f"crew-{os.getpid()}", lineage="crew") as store:
                buffer = await store.buffer(BUFFER)
                end = end or time.monotonic() + options.get("seconds", float("inf"))
                while time.monotonic() < end:
                    number += 1
                    chosen = chance.choice(sorted(ROLES)) if role == "any" else role
                    try:
                        await ROLES[chosen](buffer, journal, chance, number)
                    except rdb.DatabaseReplacedError:  # nothing acknowledged may be lost
                        raise
                    except expected as error:
                        journal.tell(type(error).__name__, time.monotonic(), None)
        except rdb.DatabaseReplacedError:
            journal.tell("error", time.monotonic(), traceback.format_exc())
        except expected as error:  # while opening, or closing
            journal.tell(type(error).__name__, time.monotonic(), None)
            await asyncio.sleep(0.1)
        except Exception:
            journal.tell("error", time.monotonic(), traceback.format_exc())
            return


def shift_clock(skews: list[float]) -> None:
    """All of replaydb's own looks at the time are wrong, by another skew every half second."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            skew = skews[int(2 * time.time()) % len(skews)]
            return datetime.now(tz) + timedelta(seconds=skew)

    importlib.import_module(
        "replaydb.database.engines.sqlite"
    )  # which else come with the first store
    importlib.import_module("replaydb.database.engines.postgresql")
    for name, module in list(sys.modules.items()):
        if name.startswith("replaydb.") and getattr(module, "datetime", None) is datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]
