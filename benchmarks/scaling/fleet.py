"""Cost of one group for each component of a fleet, and the throughput of one task.

Workers put groups of one task, one group per put. Trainer ranks lease them, each group once, and
ack them, which deletes them. Or they sample groups that stay stored, or wait for groups. Each
worker and each rank is a process of its own. PostgreSQL and the bucket are reached through relays
that delay every answer and count bytes.

The load is paced, below what the machine can do. What the same processes use while they make no
calls is subtracted. Every measurement begins after a VACUUM and a checkpoint and ends with both,
so that they are included. Last, the processes call without pauses: with long round trips the lock
of the task limits them, and not the processors. The benchmark needs a superuser of PostgreSQL
18 on this machine, which runs Linux.

`benchmarks.scaling.projection` computes from the results what larger fleets need.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil

import replaydb as rdb
from benchmarks.bench import Bench
from benchmarks.databases import databases
from benchmarks.groups import Extras, Shape, Source
from benchmarks.object_store import own_object_store
from benchmarks.options import Options
from benchmarks.processes import Child, children, cpu_seconds
from benchmarks.relay import Relay, relayed
from benchmarks.results import Result
from benchmarks.scaling import fleet_client
from benchmarks.scaling.fleet_client import BATCH, DRAWN_AGAIN, DRAWN_ONCE

WORKERS, RANKS = 4, 2
#: Groups that are sampled again.
STORED = 32
#: Groups put per second by all workers, unless they exceed `BYTES` per second.
PACE, BYTES = 16.0, 32e6
#: Delays of a round trip, in milliseconds.
NEAR, FAR = 0.0, 1.0
SLOW = (20.0, 60.0)
DATABASE, BUCKET = "database", "bucket"
ONCE, AGAIN, WAIT = "put, lease and ack", "sample again", "put while ranks wait"
MOST, PUTS, LEASES = "as fast as possible", "puts without pauses", "leases without pauses"
CONNECTIONS, RATE, CORES = "connections", "groups", "cores of the machine in use"
FOR_RANKS = "database: CPU for ranks"
#: The calls of workers and of ranks during each load.
_CALLS: dict[str, tuple[str | None, str | None]] = {
    ONCE: ("put", "lease"),
    AGAIN: (None, "sample"),
    WAIT: ("put", "wait"),
    MOST: ("put", "lease all"),
    PUTS: ("put", "put"),
    LEASES: ("lease again", "lease again"),
}
#: What is measured, mostly for one group: the unit, and how many of it are one second or byte.
SIDES: dict[str, tuple[str, float]] = {
    "workers: CPU": ("ms", 1e3),
    "ranks: CPU": ("ms", 1e3),
    "database: CPU": ("ms", 1e3),
    FOR_RANKS: ("ms", 1e3),
    "database: transactions": ("", 1),
    "database: WAL": ("kB", 1e-3),
    "database: disk operations": ("", 1),
    "database: disk writes": ("kB", 1e-3),
    "database: network in": ("kB", 1e-3),
    "database: network out": ("kB", 1e-3),
    "bucket: CPU": ("ms", 1e3),
    "bucket: PUT": ("requests", 1),
    "bucket: GET": ("requests", 1),
    "bucket: LIST": ("requests", 1),
    "bucket: DELETE": ("requests", 1),
    "bucket: network in": ("kB", 1e-3),
    "bucket: network out": ("kB", 1e-3),
    RATE: ("groups/s", 1),
    CORES: ("cores", 1),
}
_COUNTERS = """
SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn AS "database: WAL",
  (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database())
    AS "database: transactions",
  sum(reads + writes + fsyncs) AS "database: disk operations",
  sum(write_bytes) AS "database: disk writes"
FROM (
  SELECT coalesce(reads, 0) AS reads, coalesce(writes, 0) AS writes,
    coalesce(fsyncs, 0) AS fsyncs, coalesce(write_bytes, 0) AS write_bytes
  FROM pg_stat_io
)
"""
_NAME = "fleet-"
_BACKENDS = """
SELECT substr(application_name, length($1) + 1) AS client, pid FROM pg_stat_activity
WHERE datname = current_database() AND starts_with(application_name, $1)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """Groups of a shape, and where their payloads are."""

    shape: Shape
    payloads: str

    def __str__(self) -> str:
        extras = "" if self.shape.extras == "none" else f", {self.shape.extras}"
        return f"{self.shape}{extras}, payloads in the {self.payloads}"

    @property
    def rate(self) -> float:
        """Groups that all workers put per second."""
        return min(PACE, BYTES / self.shape.num_bytes)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the results."""
        shape = self.shape
        return {
            "shape": str(shape),
            "extras": shape.extras,
            "payloads": self.payloads,
            "tokens": shape.num_tokens,
        }


async def run(bench: Bench) -> AsyncIterator[Result]:
    """Measure every case in rounds."""
    for case in cases(bench.options):
        async with AsyncExitStack() as stack:
            for result in await (await _Fleet.start(bench, case, stack)).measure():
                yield result


def cases(options: Options) -> list[Case]:
    """Return the cases: dense groups of up to two sizes, and the larger ones with token extras."""
    shapes = options.shapes[:2]
    return [Case(shape, payloads) for shape in shapes for payloads in (DATABASE, BUCKET)] + [
        Case(replace(shapes[-1], extras=extras), BUCKET) for extras in get_args(Extras)[1:]
    ]


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The processes of one case."""

    bench: Bench
    case: Case
    workers: list[Child]
    ranks: list[Child]
    relays: dict[str, Relay]
    servers: dict[str, psutil.Process]
    connection: asyncpg.Connection

    @classmethod
    async def start(cls, bench: Bench, case: Case, stack: AsyncExitStack) -> _Fleet:
        """Start all processes, with a server of their own, and store what is sampled again."""
        bench.report(f"{case}: starting")
        made = await stack.enter_async_context(databases())
        url = await made.make(bench.engine)
        bench.databases.facts |= made.facts
        server = await made.server_process()
        if server is None:
            raise RuntimeError("fleet needs a PostgreSQL server on this machine")
        relays, servers = {}, {DATABASE: server}
        where: dict[str, Any] = {}
        distant, relays[DATABASE] = await stack.enter_async_context(relayed(url))
        if case.payloads == BUCKET:
            direct, servers[BUCKET] = await stack.enter_async_context(own_object_store())
            [endpoint] = parse_qs(urlsplit(direct).query)["endpoint"]
            near, relays[BUCKET] = await stack.enter_async_context(relayed(endpoint))
            # Packs of deleted groups are removed soon, as they are in a fleet that runs for long.
            where = {"payloads": direct.replace(endpoint, near), "payload_grace": 5.0}
        async with rdb.Store.open(url, **where) as store:
            await store.buffer(DRAWN_ONCE, on_evict="delete")
            again, source = (
                await store.buffer(DRAWN_AGAIN, on_ack="return"),
                Source(case.shape, variety=2),
            )
            for _ in range(STORED):  # one by one, so that each has a pack of its own
                await again.put(source.take(1))
        shape = (case.shape.episodes, case.shape.tokens, case.shape.extras)
        workers, ranks = [
            await stack.enter_async_context(
                children(
                    fleet_client.__name__,
                    count,
                    f"{distant}?application_name={_NAME}{name}",
                    *shape,
                )
            )
            for name, count in (("workers", WORKERS), ("ranks", RANKS))
        ]
        connection = await asyncpg.connect(url)
        stack.push_async_callback(connection.close)
        return cls(bench, case, workers, ranks, relays, servers, connection)

    async def measure(self) -> list[Result]:
        """Return the results of all loads."""
        loads = [(ONCE, NEAR), (ONCE, FAR), (AGAIN, FAR)]
        if self.case.shape.extras == "none":
            loads += [(WAIT, FAR), (MOST, FAR)]
            loads += [(load, delay) for load in (PUTS, LEASES) for delay in SLOW]
        rounds: dict[tuple[str, float], list[dict[str, float]]] = {load: [] for load in loads}
        number = min(2, self.bench.options.long_rounds)
        self.bench.report(f"{self.case}: idle")
        idle = await self._window("", FAR)
        for this in range(number):
            for load, delay in loads:
                self.bench.report(
                    f"{self.case}, {load}, {delay:g} ms: round {this + 1} of {number}"
                )
                counted = await self._window(load, delay)
                rounds[load, delay].append(_per_group(load, counted, idle))
        backends = await self._backends()
        results = [
            self._result(CONNECTIONS, FAR, name, len(backends[name]) / count, "")
            for name, count in (("workers", WORKERS), ("ranks", RANKS))
        ]
        for (load, delay), several in rounds.items():
            for side in several[0]:
                unit, factor = SIDES[side]
                value = factor * statistics.median(one[side] for one in several)
                results.append(self._result(load, delay, side, value, unit))
        return results

    def _result(self, load: str, delay: float, side: str, value: float, unit: str) -> Result:
        return self.bench.result(
            *(f"{self.case}, {load}, {delay:g} ms: {side}", value, unit),
            **self.case.facts, load=load, delay=delay, side=side,
        )  # fmt: skip

    async def _window(self, load: str, delay: float) -> dict[str, float]:
        """Return what was counted during a load."""
        for relay in self.relays.values():
            await relay.delay(delay / 1e3)
        cycle = RANKS * BATCH / self.case.rate
        calls = _CALLS.get(load, (None, None))
        for clients, call, period in zip(
            (self.workers, self.ranks), calls, (WORKERS / self.case.rate, cycle), strict=True
        ):
            if call is not None:
                pace = 0.0 if load in (MOST, PUTS, LEASES) else period
                for at, one in enumerate(clients):
                    await one.ask("begin", call, pace, at * pace / len(clients))
        await asyncio.sleep(max(self.bench.options.seconds / 3, cycle))
        before = await self._counted()
        await asyncio.sleep(max(2 * self.bench.options.seconds, 2 * cycle))
        after = await self._counted()
        await asyncio.gather(*(one.ask("end") for one in (*self.workers, *self.ranks)))
        if load != ONCE:  # the groups that are left would be drawn during the next load
            await self.workers[0].ask("empty")
        return {name: after[name] - before[name] for name in after}

    async def _counted(self) -> dict[str, float]:
        """Clean up, then return all counters."""
        tables = "episode_group, episode, payload, task, lease"
        # Truncation would wait up to 5 s for the locks of each table.
        await self.connection.execute(f"VACUUM (TRUNCATE false) {tables}")
        await self.connection.execute("CHECKPOINT")
        found: defaultdict[str, float] = defaultdict(float)
        for name, several in (("workers", self.workers), ("ranks", self.ranks)):
            for counts in await asyncio.gather(*(one.ask("count") for one in several)):
                found[name] += counts.pop("groups")
                found[f"{name}: CPU"] += counts.pop("CPU")
                if BUCKET in self.servers:
                    for kind, number in counts.items():
                        found[f"bucket: {kind}"] += number
        for name, relay in self.relays.items():
            came, went = await relay.num_bytes()
            found |= {f"{name}: network in": came, f"{name}: network out": went}
        row = await self.connection.fetchrow(_COUNTERS)
        found |= {name: float(value) for name, value in row.items()}
        for pid in (await self._backends())["ranks"]:
            found[FOR_RANKS] += _cpu_of_backend(pid)
        for name, process in self.servers.items():
            found[f"{name}: CPU"] = cpu_seconds(process)
        times = psutil.cpu_times()
        found[CORES] = sum(times) - times.idle - times.iowait
        found["seconds"] = time.perf_counter()
        return dict(found)

    async def _backends(self) -> dict[str, list[int]]:
        """Return the process ids of the connections of workers and ranks."""
        found = defaultdict[str, list[int]](list)
        for row in await self.connection.fetch(_BACKENDS, _NAME):
            found[row["client"]].append(row["pid"])
        return found


def _per_group(load: str, counted: dict[str, float], idle: dict[str, float]) -> dict[str, float]:
    """Return the cost of one group, the rate and the cores in use."""
    put, drawn = counted["workers"], counted["ranks"]
    groups = {
        ONCE: (put + drawn) / 2,
        AGAIN: drawn,
        WAIT: put,
        MOST: min(put, drawn),
    }.get(load, put + drawn)
    costs = {
        side: max(0.0, counted[side] - idle[side]) / max(1.0, groups)
        for side in SIDES
        if side in counted and side != CORES
        if not (load == AGAIN and side == "workers: CPU")
    }
    if load in (MOST, PUTS, LEASES):
        costs = {"database: CPU": costs["database: CPU"]}
    seconds = counted["seconds"]
    return costs | {RATE: max(groups, 1.0) / seconds, CORES: counted[CORES] / seconds}


def _cpu_of_backend(pid: int) -> float:
    """Return the CPU seconds of a process, more exactly than `cpu_seconds`."""
    with suppress(FileNotFoundError):  # the connection was closed
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return 0.0
