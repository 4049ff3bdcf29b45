"""Calls that are timed on buffers of every size; each returns the seconds that count."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from sqlalchemy import ColumnElement

import replaydb as rdb
from benchmarks.filling import TASKS
from benchmarks.groups import TASK, small_group
from benchmarks.results import seconds
from replaydb.domain.policies import SamplingPolicy

Call = Callable[[rdb.Buffer], Awaitable[float]]
Calls = Mapping[str, Call]

N, PUT = 64, 50
TTL = 600

POLICIES: tuple[SamplingPolicy, ...] = (
    rdb.Uniform(),
    rdb.Prioritized(),
    rdb.Fifo(),
    rdb.Lifo(),
    rdb.StalestFirst(),
    rdb.FreshestFirst(),
    rdb.TopPriority(),
    rdb.LeastSampled(),
)


def _level(name: str) -> ColumnElement[bool]:
    is_level: ColumnElement[bool] = rdb.col.tags["level"].as_string() == name
    return is_level


async def _draw(
    buffer: rdb.Buffer, policy: SamplingPolicy, where: ColumnElement[bool] | None = None
) -> float:
    return await seconds(buffer.sample(N, policy, tasks=TASK, where=where, at_least=1))


async def _draw_of_all(buffer: rdb.Buffer) -> float:
    return await seconds(buffer.sample(N, rdb.Uniform()))


async def _draw_quotas(buffer: rdb.Buffer) -> float:
    return await seconds(buffer.sample(dict.fromkeys(TASKS, N // len(TASKS)), rdb.Uniform()))


async def _lease_and_ack(buffer: rdb.Buffer, policy: SamplingPolicy) -> float:
    async def cycle() -> None:
        async with buffer.lease(N, policy, ttl=TTL, tasks=TASK):
            pass

    return await seconds(cycle())


async def _put(buffer: rdb.Buffer, count: int) -> float:
    return await seconds(buffer.put([small_group() for _ in range(count)]))


async def _advance(buffer: rdb.Buffer) -> float:
    return await seconds(buffer.advance_policy(buffer.policy_version + 1))


def _sample(policy: SamplingPolicy, where: ColumnElement[bool] | None = None) -> Call:
    return partial(_draw, policy=policy, where=where)


#: Draws whose cost depends on the size of the batch, not of the buffer.
DRAWS: Calls = {
    **{f"sample {N}, {type(policy).__name__}": _sample(policy) for policy in POLICIES},
    f"sample {N}, half eligible by reward": _sample(rdb.Uniform(), rdb.col.reward_mean > 0.45),
    f"sample {N}, half eligible by tag": _sample(rdb.Uniform(), _level("hard")),
    f"sample {N}, of {len(TASKS)} tasks": _draw_of_all,
    f"sample {N}, quotas of {len(TASKS)} tasks": _draw_quotas,
}
#: Draws that have to search for eligible groups.
RARE_DRAWS: Calls = {
    f"sample {N}, 1 in 100 eligible by tag": _sample(rdb.Uniform(), _level("rare")),
    f"sample {N}, 1 in 10,000 eligible by tag": _sample(rdb.Uniform(), _level("rarest")),
    f"sample {N}, TopPriority, 1 in 10,000 by tag": _sample(rdb.TopPriority(), _level("rarest")),
}
#: The same draws with an indexed tag, and calls that the index must not slow down.
INDEXED_DRAWS: Calls = {
    **{f"{name}, indexed": call for name, call in RARE_DRAWS.items()},
    f"sample {N}, half eligible by tag, indexed": _sample(rdb.Uniform(), _level("hard")),
    f"put {PUT}, with an indexed tag": partial(_put, count=PUT),
}
LEASES: Calls = {
    f"lease + ack {N}, {type(policy).__name__}": partial(_lease_and_ack, policy=policy)
    for policy in (rdb.Fifo(), rdb.Uniform())
}
PUTS: Calls = {f"put {count}": partial(_put, count=count) for count in (1, PUT)}
PUTS_AT_CAPACITY: Calls = {
    f"put {count}, evict {count}": partial(_put, count=count) for count in (1, PUT)
}
#: Calls that update every live group.
ADVANCES: Calls = {"advance_policy": _advance}
EXPIRIES: Calls = {"advance_policy, 2 % expire": _advance}
