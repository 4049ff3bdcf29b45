"""Roles of workers that attack annotations, and groups that wait for them.

A call that annotates is logged as "try" before it begins, and as "annotate" when it has returned.
A call that was refused, and so stored nothing, is logged as "refused". "leave" is logged before a
claim is ended.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final, Literal, get_args
from uuid import uuid4

import replaydb as rdb
from replaydb import Annotation, Buffer, Claim, Episode, EpisodeGroup
from replaydb.batch import StoredGroup
from torture.agents import ENDED, TTL
from torture.workers import CallLog, Step

#: The task whose groups wait for values, and the names of these.
WAITING: Final = "waiting"
REWARD, LABEL = VALUES = ("reward", "metadata.label")
How = Literal["put", "replace", "renew", "delete"]
#: A value that a call gives to an episode: uid of the group, position, name, value.
Value = tuple[str, int, str, float]


async def edit(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Put a group, or replace or delete one. Logged before, and when the call has returned."""
    begin, call = time.monotonic(), uuid4().hex
    infos = await buffer.find(order_by=rdb.col.id.desc(), limit=20)
    how: How = "put" if len(infos) < 10 else chance.choice(get_args(How))
    uid = f"judged-{os.getpid()}.{number}" if how == "put" else chance.choice(infos).group_uid
    task = chance.choice(["code", "math", WAITING, WAITING])
    size = range(chance.randint(1, 4))
    episodes = [random_episode(chance, may_lack=task == WAITING) for _ in size]
    if how != "put":
        log.record("changing", begin, {"call": call, "uid": uid})
    if how == "delete":
        log.record("deleting", begin, [uid])
        await buffer.delete(uids=uid)
    else:
        log.record("content", begin, {"uid": uid, "rewards": [one.reward for one in episodes]})
        one = EpisodeGroup(task, episodes, group_uid=uid)
        with suppress(rdb.ConsumedGroupError):  # it is archived, and not replaced
            await buffer.put(one, on_duplicate="error" if how == "put" else how)
        log.record("put", begin, [uid])
    if how != "put":
        log.record("changed", begin, {"call": call, "uid": uid})


def random_episode(chance: random.Random, *, may_lack: bool) -> Episode:
    """Return an episode that may lack some of the values that its task requires."""
    lacks = {name for name in VALUES if may_lack and chance.random() < 0.7}
    return Episode(
        prompt_ids=[1],
        response_ids=[2, 3],
        reward=None if REWARD in lacks else -chance.random(),
        metadata={} if LABEL in lacks else {"label": chance.random()},
    )


async def add(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Add episodes to incremental groups that wait for values. If none is open, open one."""
    await asyncio.sleep(chance.uniform(0, 0.05))
    begin = time.monotonic()
    claims = await buffer.claim(2, ttl=TTL, tasks=WAITING, timeout=0)
    if not claims:
        uid = f"open-{os.getpid()}.{number}"
        size = chance.randint(1, 4)
        rewards = [episode_of(uid, position).reward for position in range(size)]
        log.record("content", begin, {"uid": uid, "rewards": rewards})
        await buffer.open_group(WAITING, uid, size)
        log.record("put", begin, [uid])
    for claim in claims:
        await add_one(claim)


async def add_one(claim: Claim) -> None:
    """Add the episode of a claimed position, unless the claim has ended."""
    [position] = claim.positions
    with suppress(*ENDED):
        await claim.add_episode(episode_of(claim.group.group_uid, position))


def episode_of(uid: str, position: int) -> Episode:
    """Return the episode of an incremental group, which is the same in each process."""
    return random_episode(random.Random(f"{uid}/{position}"), may_lack=True)


async def judge(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Give rewards to some episodes of a few groups, in some cases only if these are unchanged.

    The uid of the call is the author.
    """
    infos = await buffer.find(order_by=rdb.col.id.desc(), limit=20)
    if not infos:
        await asyncio.sleep(0.05)
        return
    call, chosen = uuid4().hex, chance.sample(infos, min(len(infos), chance.randint(1, 3)))
    values: list[Value] = [
        (info.group_uid, position, REWARD, chance.random())
        for info in chosen
        for position in range(info.num_episodes)
        if position == 0 or chance.random() < 0.5
    ]
    more = {"by": call} if chance.random() < 0.5 else {}
    annotations = [
        Annotation(uid, position, reward=reward, metadata=more)
        for uid, position, _, reward in values
    ]
    if_match = {info.group_uid: info.etag for info in chosen} if chance.random() < 0.3 else None
    annotate = partial(buffer.annotate, annotations, author=call, if_match=if_match)
    with suppress(rdb.ContentChangedError, rdb.InvalidInputError):  # there are fewer episodes now
        await _logged(log, {"call": call, "values": values}, annotate)


async def give(name: str, buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Claim episodes that lack a value, and give it to some of them."""
    begin = time.monotonic()
    claims = await buffer.claim(
        chance.choice([1, 1, 4]),
        ttl=TTL,
        missing=name,
        whole_groups=chance.random() < 0.3,
        timeout=0.5,
    )
    for claim in claims:
        detail = {"claim": claim.uid, "uid": claim.group.group_uid, "positions": claim.positions}
        log.record("claim", begin, {**detail, "name": name})
    for claim in claims:
        with suppress(rdb.ClaimExpiredError):  # without the block it is not extended
            async with claim if chance.random() < 0.8 else nullcontext():
                try:
                    await give_some(claim, log, chance, chance.choice([0.5, 1.0]))
                finally:
                    log.record("leave", begin, {"claim": claim.uid})


async def give_some(claim: Claim, log: CallLog, chance: random.Random, share: float) -> None:
    """Give the value of a claim to a share of its episodes, and in some cases the other one too."""
    uid, name = claim.group.group_uid, claim.missing
    for _ in range(chance.choice([1, 1, 2])):  # the second call is of a claim that may have ended
        await asyncio.sleep(chance.uniform(0, 0.2))
        names = VALUES if chance.random() < 0.2 else (name,)
        values: list[Value] = [
            (uid, position, str(one), chance.random())
            for position in claim.positions
            if chance.random() < share
            for one in names
        ]
        call = uuid4().hex
        annotations = [
            Annotation(uid, position, reward=value)
            if one == REWARD
            else Annotation(uid, position, metadata={"label": value})
            for _, position, one, value in values
        ]
        if annotations:
            detail = {"call": call, "values": values, "claim": claim.uid, "name": name}
            await _logged(log, detail, partial(claim.annotate, annotations, author=call))


async def _logged(
    log: CallLog, detail: Mapping[str, Any], call: Callable[[], Awaitable[Any]]
) -> None:
    """Log a call that annotates before it begins, and when it has returned or was refused."""
    begin = time.monotonic()
    log.record("try", begin, detail)
    try:
        await call()
    except rdb.ReplayDBError as error:
        if not isinstance(error, rdb.DatabaseError):  # after which the values may be stored
            log.record("refused", begin, detail)
        raise
    log.record("annotate", begin, detail)


async def draw(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Sample groups, and log the rewards with which they were drawn."""
    begin, size = time.monotonic(), chance.choice([1, 4])
    batch = await buffer.sample(size, rdb.Uniform(), timeout=0.5, at_least=1)
    rewards = {one.group_uid: [it.reward for it in one.episodes] for one in batch.groups}
    lacking = [one.group_uid for one in batch.groups if _lacks(one)]
    log.record("sample", begin, {"draw": batch.draw_id, "rewards": rewards, "lacking": lacking})


async def hold(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Lease a group, which may be replaced meanwhile, and ack it."""
    begin = time.monotonic()
    async with buffer.lease(1, ttl=0.5, timeout=0.5) as leased:
        lacking = [one.group_uid for one in leased.batch.groups if _lacks(one)]
        log.record("hold", begin, {"lacking": lacking})
        await asyncio.sleep(chance.uniform(0, 0.05))


def _lacks(group: StoredGroup) -> bool:
    """Whether a group lacks values that its task requires."""
    return group.task_name == WAITING and any(
        one.reward is None or "label" not in one.metadata for one in group.episodes
    )


ROLES: Mapping[str, Step] = {
    "reward": partial(give, REWARD),
    "label": partial(give, LABEL),
    "edit": edit,
    "add": add,
    "judge": judge,
    "draw": draw,
    "hold": hold,
}
