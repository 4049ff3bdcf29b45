"""An acknowledged annotation is stored once, and no draw changes with it.

Judges annotate stored groups, with clocks that are slow at times, while other processes put,
replace, delete, draw and lease them. All are killed at times.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final, Literal, get_args
from uuid import uuid4

import numpy as np

import replaydb as rdb
from replaydb import Annotation, Buffer, Episode, EpisodeGroup, Store
from replaydb.batch import StoredGroup
from replaydb.operations import verify
from support.workers import kill_all
from torture import checker
from torture.checker import Entry, Tables
from torture.context import AttackContext
from torture.workers import BUFFER, CallLog, RoleWorker, Step

PROMISES = (16,)
ENGINES = ("sqlite", "postgresql")
#: Offsets in seconds of the clocks of judges: annotations can have earlier times than draws.
CLOCKS: Final = [0.0, -30.0]
How = Literal["put", "replace", "renew", "delete"]
#: A reward that a call gives to an episode: uid of the group, position, reward.
Value = tuple[str, int, float]


async def attack(context: AttackContext) -> None:
    """Kill a process after every few annotations."""
    chance, end = context.chance, time.monotonic() + context.seconds
    folder = context.folder / "payloads"
    folder.mkdir()
    payloads = chance.choice([None, folder.as_uri()])
    async with Store.open(context.url, payloads=payloads) as store:
        buffer = await store.buffer(BUFFER)
        for number in range(10):
            await edit(buffer, CallLog(str(context.log)), chance, -number)

    def start(role: str) -> RoleWorker:
        options: dict[str, Any] = {"patches": {"torture.workers.ROLES": ROLES}}
        if role == "judge":
            options["clocks"] = CLOCKS
        return RoleWorker(context.url, context.log, role, chance.getrandbits(32), **options)

    roles = [*ROLES, "judge", "judge"]
    workers = [start(role) for role in roles]
    try:
        while not context.figures["kills"] or time.monotonic() < end:
            await context.progress([*workers], 30, "annotate")
            await asyncio.sleep(chance.uniform(0, 0.1))
            victim = chance.randrange(len(workers))
            workers[victim].kill()
            context.figures["kills"] += 1
            workers[victim] = start(roles[victim])
    finally:
        await kill_all([*workers])
    tables, entries = await context.check(), checker.read_log(context.log)
    check(entries, tables)
    async with Store.open(context.url) as store:
        buffer = await store.buffer(BUFFER)
        rewards = _rewards(tables)
        for group in await buffer.get([row["id"] for row in tables.groups]):
            found = dict(zip(group.positions, group.rewards.tolist(), strict=True))
            assert found == rewards[group.id], f"{group.group_uid}: {found}"
        await _check_redraws(context, buffer, entries)
        report = await verify(store)
        assert report.is_sound, report.problems[:3]


async def edit(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Put a group, or replace or delete one. Logged before, and when the call has returned."""
    begin, call = time.monotonic(), uuid4().hex
    infos = await buffer.find(order_by=rdb.col.id.desc(), limit=20)
    how: How = "put" if len(infos) < 10 else chance.choice(get_args(How))
    uid = f"judged-{os.getpid()}.{number}" if how == "put" else chance.choice(infos).group_uid
    rewards = [-chance.random() for _ in range(chance.randint(1, 4))]
    if how != "put":
        log.record("changing", begin, {"call": call, "uid": uid})
    if how == "delete":
        log.record("deleting", begin, [uid])
        await buffer.delete(uids=uid)
    else:
        log.record("content", begin, {"uid": uid, "rewards": rewards})
        episodes = [Episode(prompt_ids=[1], response_ids=[2, 3], reward=one) for one in rewards]
        one = EpisodeGroup(chance.choice(["code", "math"]), episodes, group_uid=uid)
        with suppress(rdb.ConsumedGroupError):  # it is archived, and not replaced
            await buffer.put(one, on_duplicate="error" if how == "put" else how)
        log.record("put", begin, [uid])
    if how != "put":
        log.record("changed", begin, {"call": call, "uid": uid})


async def judge(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Give rewards to some episodes of a few groups, in some cases only if these are unchanged.

    The uid of the call is the author. It is logged as "try" before, and as "annotate" or "refused".
    """
    infos = await buffer.find(order_by=rdb.col.id.desc(), limit=20)
    if not infos:
        await asyncio.sleep(0.05)
        return
    call, chosen = uuid4().hex, chance.sample(infos, min(len(infos), chance.randint(1, 3)))
    values: list[Value] = [
        (info.group_uid, position, chance.random())
        for info in chosen
        for position in range(info.num_episodes)
        if position == 0 or chance.random() < 0.5
    ]
    more = {"by": call} if chance.random() < 0.5 else {}
    annotations = [
        Annotation(uid, position, reward=reward, metadata=more) for uid, position, reward in values
    ]
    if_match = {info.group_uid: info.etag for info in chosen} if chance.random() < 0.3 else None
    begin, detail = time.monotonic(), {"call": call, "values": values}
    log.record("try", begin, detail)
    with suppress(rdb.ContentChangedError, rdb.InvalidInputError):  # there are fewer episodes now
        try:
            await buffer.annotate(annotations, author=call, if_match=if_match)
        except rdb.ReplayDBError:
            log.record("refused", begin, detail)
            raise
        log.record("annotate", begin, detail)


async def draw(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Sample groups, and log the rewards with which they were drawn."""
    begin, size = time.monotonic(), chance.choice([1, 4])
    batch = await buffer.sample(size, rdb.Uniform(), timeout=0.5, at_least=1)
    rewards = {one.group_uid: one.rewards.tolist() for one in batch}
    log.record("sample", begin, {"draw": batch.draw_id, "rewards": rewards})


async def hold(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Lease a group, which may be replaced meanwhile, and ack it."""
    begin = time.monotonic()
    async with buffer.lease(1, ttl=0.5, timeout=0.5):
        await asyncio.sleep(chance.uniform(0, 0.05))
    log.record("hold", begin, None)


ROLES: Mapping[str, Step] = {"edit": edit, "judge": judge, "draw": draw, "hold": hold}


def check(entries: Iterable[Entry], tables: Tables) -> None:
    """Check that exactly what was acknowledged is stored, and that it is in all columns."""
    entries = list(entries)
    tried = {entry.detail["call"]: entry for entry in entries if entry.call == "try"}
    acknowledged = {entry.detail["call"] for entry in entries if entry.call == "annotate"}
    refused = {entry.detail["call"] for entry in entries if entry.call == "refused"}
    changed = _changed(entries)
    uids = {row["id"]: row["group_uid"] for row in tables.groups}
    found: dict[str, Counter[Value]] = defaultdict(Counter)
    for row in tables.annotations:
        if row["name"] == "reward":
            value = (uids[row["group_id"]], row["position"], row["value"])
            found[row["author"]][value] += 1
    assert found.keys() <= tried.keys() - refused, "a value is stored that was refused, or not sent"
    for call, entry in tried.items():
        values = {(uid, position, reward) for uid, position, reward in entry.detail["values"]}
        left = {one for one in values if changed.get(one[0], -inf) < entry.begin}
        mine = found[call]
        assert mine.keys() <= values, f"{call} has stored {mine.keys() - values}"
        assert max(mine.values(), default=1) == 1, f"a value of {call} is stored twice"
        if call in acknowledged:
            assert left <= mine.keys(), f"acknowledged values are lost: {left - mine.keys()}"
        assert not mine or left <= mine.keys(), f"only some values of {call} are stored"
    _check_history(entries, tables)
    _check_draws(entries, tables)


def _changed(entries: Iterable[Entry]) -> dict[str, float]:
    """Return by uid of a group the time at which it was last replaced or deleted, at the latest."""
    entries = list(entries)
    ends = {entry.detail["call"]: entry.end for entry in entries if entry.call == "changed"}
    found: dict[str, float] = {}
    for entry in entries:
        if entry.call == "changing":
            uid, end = entry.detail["uid"], ends.get(entry.detail["call"], inf)
            found[uid] = max(end, found.get(uid, -inf))
    return found


def _rewards(tables: Tables) -> dict[int, dict[int, float]]:
    """Return the rewards of episodes by group and position."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for row in tables.episodes:
        found[row["group_id"]][row["position"]] = row["reward"]
    return found


def _check_history(entries: Iterable[Entry], tables: Tables) -> None:
    """The history begins with what was put, and ends with what the rows have, without gaps."""
    contents: dict[str, list[list[float]]] = defaultdict(list)
    for entry in entries:
        if entry.call == "content":
            contents[entry.detail["uid"]].append(entry.detail["rewards"])
    of_group: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(tables.annotations, key=lambda one: int(one["number"])):
        of_group[row["group_id"]].append(row)
    now = _rewards(tables)
    for group in tables.groups:
        key, rewards = group["id"], now[group["id"]]
        numbers = sorted({row["number"] for row in of_group[key]})
        assert numbers == [*range(1, group["times_annotated"] + 1)], f"{group}: {numbers}"
        first, last = dict(rewards), dict[int, float]()
        for row in of_group[key]:
            if row["name"] == "reward":
                at = row["position"]
                if at not in last:
                    first[at] = last[at] = row["previous"]
                assert row["previous"] == last[at], f"a value before {row} is lost"
                last[at] = row["value"]
        assert rewards == rewards | last, f"rewards of {group} are not the last ones, {last}"
        assert [first[at] for at in sorted(first)] in contents[group["group_uid"]], group
        columns = [group[f"reward_{name}"] for name in ("mean", "min", "max")]
        known = [*rewards.values()]
        expected = [sum(known) / len(known), min(known), max(known)]
        assert np.allclose(columns, expected, rtol=1e-9), f"{group}: {expected}"


def _check_draws(entries: Iterable[Entry], tables: Tables) -> None:
    """Records of draws have the rewards with which they were made."""
    means = {row["draw_id"]: Counter[float]() for row in tables.history}
    for row in tables.history:
        if row["reward_mean"] is not None:  # of a group that was deleted since
            means[row["draw_id"]][round(row["reward_mean"], 5)] += 1
    for entry in entries:
        if entry.call == "sample":
            drawn = [float(np.mean(one)) for one in entry.detail["rewards"].values()]
            for mean in means[entry.detail["draw"]]:
                assert np.isclose(drawn, mean, atol=2e-5).any(), f"{entry.detail}: {mean}"


async def _check_redraws(context: AttackContext, buffer: Buffer, entries: list[Entry]) -> None:
    changed = _changed(entries)
    for entry in entries:
        if entry.call != "sample":
            continue
        try:
            batch: Iterable[StoredGroup] = await buffer.redraw(entry.detail["draw"])
        except rdb.PayloadGoneError as error:
            batch = error.batch or ()
        again = {one.group_uid: one.rewards.tolist() for one in batch}
        drawn = entry.detail["rewards"]
        assert again.items() <= drawn.items(), f"drawn with {drawn}, redrawn with {again}"
        assert drawn.keys() - changed.keys() <= again.keys(), "a drawn group is lost"
        context.figures["redrawn"] += len(again)
