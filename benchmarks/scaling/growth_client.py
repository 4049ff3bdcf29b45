"""A process that makes calls on the buffer "bench" of `growth`."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx

import replaydb as rdb
from benchmarks.filling import TASKS
from benchmarks.processes import serve
from benchmarks.results import seconds
from benchmarks.scaling.calls import POLICIES, TTL, N
from replaydb.domain.policies import SamplingPolicy
from replaydb.operations import examine
from replaydb.ui import application

#: Rows of a page, and the id of a group that is not deleted.
PAGE, ONE = 50, 100

Call = Callable[[rdb.Store, rdb.Buffer], Awaitable[object]]


def _group(number: int) -> rdb.EpisodeGroup:
    one = rdb.Episode(prompt_ids=[1], response_ids=[2], reward=1.0, policy_version=0)
    return rdb.EpisodeGroup(
        TASKS[number % len(TASKS)], [one], prompt_uid="prompt-7", tags={"level": "easy"}
    )


async def _put(_: rdb.Store, buffer: rdb.Buffer, count: int) -> None:
    await buffer.put([_group(number) for number in range(count)])


async def _sample(
    _: rdb.Store, buffer: rdb.Buffer, policy: SamplingPolicy, where: Any = None
) -> None:
    await buffer.sample(N, policy, where=where, at_least=0)


async def _lease(_: rdb.Store, buffer: rdb.Buffer, policy: SamplingPolicy) -> None:
    async with buffer.lease(N, policy, ttl=TTL, at_least=0):
        pass


async def _cycle(store: rdb.Store, buffer: rdb.Buffer) -> None:
    await _put(store, buffer, N)
    await _lease(store, buffer, rdb.Fifo())


async def _update_priorities(_: rdb.Store, buffer: rdb.Buffer) -> None:
    [newest] = await buffer.find(limit=1, order_by=rdb.col.id.desc())
    ids = random.sample(range(newest.id // 2, newest.id), N)
    await buffer.update_priorities(ids, [random.uniform(1, 13) for _ in ids])


async def _delete(_: rdb.Store, buffer: rdb.Buffer) -> None:
    await buffer.delete([(await buffer.find(limit=1))[0].id])


async def _advance(_: rdb.Store, buffer: rdb.Buffer) -> None:
    await buffer.advance_policy(buffer.policy_version + 1)


#: Calls that should not depend on the number of groups.
BOUNDED: Mapping[str, Call] = {
    "open": lambda _, buffer: asyncio.sleep(0),
    "put 1": partial(_put, count=1),
    "put 50": partial(_put, count=50),
    **{f"sample {N}, {type(one).__name__}": partial(_sample, policy=one) for one in POLICIES},
    f"sample {N}, half eligible by tag": partial(
        _sample, policy=rdb.Uniform(), where=rdb.col.tags["level"].as_string() == "hard"
    ),
    f"lease + ack {N}, Fifo": partial(_lease, policy=rdb.Fifo()),
    f"lease + ack {N}, Uniform": partial(_lease, policy=rdb.Uniform()),
    f"update_priorities {N}": _update_priorities,
    f"peek {N}, Fifo": lambda _, buffer: buffer.peek(N, rdb.Fifo(), at_least=0),
    "delete 1": _delete,
    "stats(totals=False)": lambda _, buffer: buffer.stats(totals=False),
    "metrics(totals=False)": lambda _, buffer: buffer.metrics(totals=False),
    "count(limit=1000)": lambda _, buffer: buffer.count(limit=1000),
    "count(statuses='pending')": lambda _, buffer: buffer.count(statuses="pending"),
    f"find(limit={PAGE})": lambda _, buffer: buffer.find(limit=PAGE),
    f"find(limit={PAGE}, order_by=priority)": lambda _, buffer: buffer.find(
        limit=PAGE, order_by=rdb.col.priority.desc()
    ),
    f"find(limit={PAGE}, order_by=created_at)": lambda _, buffer: buffer.find(
        limit=PAGE, order_by=rdb.col.created_at.desc()
    ),
    f"find(limit={PAGE}, statuses='failed')": lambda _, buffer: buffer.find(
        limit=PAGE, statuses="failed"
    ),
    "get 1": lambda _, buffer: buffer.get([ONE]),
    f"draws(limit={PAGE})": lambda _, buffer: buffer.draws(limit=PAGE),
    f"steps(limit={PAGE})": lambda _, buffer: buffer.steps(limit=PAGE),
    "leases": lambda _, buffer: buffer.leases(),
    "runs": lambda store, _: store.runs(),
    "run_stats": lambda store, _: store.run_stats("bench"),
}
#: Calls that read or write every group.
UNBOUNDED: Mapping[str, Call] = {
    "count()": lambda _, buffer: buffer.count(),
    "buffers": lambda store, _: store.buffers(),
    f"peek {N}, Uniform": lambda _, buffer: buffer.peek(N, rdb.Uniform(), at_least=0),
    "stats()": lambda _, buffer: buffer.stats(),
    "metrics()": lambda _, buffer: buffer.metrics(),
    f"find(limit={PAGE}, order_by=reward_mean)": lambda _, buffer: buffer.find(
        limit=PAGE, order_by=rdb.col.reward_mean.desc()
    ),
    "advance_policy": _advance,
}
PAGES = {
    "page: overview": "/?buffer=bench",
    "page: groups": "/groups?buffer=bench",
    "page: group": f"/group?buffer=bench&id={ONE}",
    "page: prompt": "/prompt?buffer=bench&uid=prompt-7",
    "page: runs": "/runs",
    "page: run": "/run?name=bench",
}
DOCTOR = "doctor"
CALLS = (*BOUNDED, DOCTOR, *PAGES, *UNBOUNDED)
#: Calls of the load. As many groups are put as are archived.
KINDS: Mapping[str, Call] = {
    "put 1": partial(_put, count=1),
    f"put + lease + ack {N}": _cycle,
    f"sample {N}": partial(_sample, policy=rdb.Uniform()),
    f"update_priorities {N}": _update_priorities,
}


async def _once(url: str, name: str) -> float:
    """Make a call with connections of its own. Return its seconds."""
    if name == DOCTOR:
        return await seconds(examine(url))
    if name in PAGES:
        async with _pages(url) as client:
            return await seconds(_page(client, PAGES[name]))
    async with rdb.Store.open(url) as store:
        buffer = await store.buffer("bench")
        return await seconds((BOUNDED.get(name) or UNBOUNDED[name])(store, buffer))


@asynccontextmanager
async def _pages(url: str) -> AsyncIterator[httpx.AsyncClient]:
    app = application(url)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as client,
    ):
        yield client


async def _page(client: httpx.AsyncClient, address: str) -> None:
    (await client.get(address)).raise_for_status()


async def _serve(url: str) -> None:
    stores: list[rdb.Store] = []

    async def repeat(kind: str, lasting: float) -> list[float]:
        """Repeat a call for some seconds. Return the seconds of each."""
        if not stores:
            stores.append(await rdb.Store.open(url))
        buffer = await stores[0].buffer("bench")
        end = time.perf_counter() + lasting
        times = []
        while not times or time.perf_counter() < end:
            times.append(await seconds(KINDS[kind](stores[0], buffer)))
        return times

    async def work(what: str, name: str, *arguments: float) -> Any:
        return await (_once(url, name) if what == "once" else repeat(name, *arguments))

    await serve(work)
    for store in stores:
        await store.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
