"""An acknowledged annotation is stored once, and no draw changes with it.

Judges annotate stored groups, with clocks that are slow at times, while other processes put,
replace, delete, draw and lease them. Groups of one task wait for values, which other judges add
with claims. All are killed at times, and frozen for longer than their claims last. At the end, one
process gives all groups what they lack.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final

import numpy as np

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.batch import StoredGroup
from replaydb.operations import verify
from support.workers import kill_all
from torture import checker
from torture.agents import TTL
from torture.attacks import trajectories
from torture.checker import Entry, Tables
from torture.context import AttackContext
from torture.judging import LABEL, REWARD, ROLES, VALUES, WAITING, Value, add_one, edit, give_some
from torture.workers import BUFFER, CallLog, RoleWorker

PROMISES = (15, 16)
ENGINES = ("sqlite", "postgresql")
#: Offsets in seconds of the clocks of judges: annotations can have earlier times than draws.
CLOCKS: Final = [0.0, -30.0]
#: Settings of a round. With the first ones, groups wait until they have all values.
SETTINGS: Final[list[dict[str, Any]]] = [
    {},
    {"requires_timeout": 1.5, "max_attempts": 3},
    {"requires_timeout": 1.5, "max_attempts": 3, "on_missing": "complete"},
]
#: An episode, by the id of its group and its position, and the name of a value.
Place = tuple[int, int, str]


async def attack(context: AttackContext) -> None:
    """Kill or freeze a process after every few annotations; at the end add all missing values."""
    chance, end = context.chance, time.monotonic() + context.seconds
    log, frozen = CallLog(str(context.log)), list[RoleWorker]()
    folder = context.folder / "payloads"
    folder.mkdir()
    payloads = chance.choice([None, folder.as_uri()])
    settings = chance.choice([SETTINGS[0], *SETTINGS])
    async with Store.open(context.url, payloads=payloads) as store:
        buffer = await store.buffer(BUFFER, requires={WAITING: VALUES}, **settings)
        for number in range(10):
            await edit(buffer, log, chance, -number)

    def start(role: str) -> RoleWorker:
        options: dict[str, Any] = {"patches": {"torture.workers.ROLES": ROLES}}
        if role == "judge":
            options["clocks"] = CLOCKS
        seed = chance.getrandbits(32)
        return RoleWorker(context.url, context.log, role, seed, unavailable=True, **options)

    roles = ["reward", "label", *ROLES, "judge"]
    workers = [start(role) for role in roles]
    try:
        while not (context.figures["kills"] and frozen) or time.monotonic() < end:
            await context.progress([*workers], 5, "annotate")
            await asyncio.sleep(chance.uniform(0, 0.1))
            victim = chance.randrange(len(workers))
            if chance.random() < 0.6:
                workers[victim].kill()
                context.figures["kills"] += 1
                workers[victim] = start(roles[victim])
            else:  # if all are frozen, the first ones continue with claims that no process ended
                frozen = chance.choice([[workers[victim]], workers, workers])
                await context.progress([*workers], 1, "claim")
                await trajectories.freeze(log, frozen)
            tables = await checker.read_tables(context.url)
            check_waiting(checker.read_log(context.log), tables, settings)
    finally:
        await kill_all([*workers])
    tables, entries = await context.check(), checker.read_log(context.log)
    check(entries, tables)
    check_waiting(entries, tables, settings)
    async with Store.open(context.url) as store:
        buffer = await store.buffer(BUFFER)
        await _give_all(context, buffer, log)
        tables, entries = await checker.read_tables(context.url), checker.read_log(context.log)
        checker.check_tables(tables)
        check(entries, tables)
        check_waiting(entries, tables, settings)
        assert not tables.with_status("pending"), "some groups could not be completed"
        await _check_read(buffer, tables)
        await _check_redraws(context, buffer, entries)
        report = await verify(store)
        assert report.is_sound, report.problems[:3]


async def _give_all(context: AttackContext, buffer: Buffer, log: CallLog) -> None:
    """Add all missing episodes and values, when the claims of killed processes have expired."""
    while claims := await buffer.claim(8, ttl=60, timeout=1.5 * TTL):
        for claim in claims:
            await add_one(claim)
    for name in VALUES:
        while claims := await buffer.claim(8, ttl=60, missing=name, timeout=1.5 * TTL):
            for claim in claims:
                with suppress(rdb.ClaimExpiredError):  # at the deadline, or in the second call
                    await give_some(claim, log, context.chance, 1.0)
                context.figures["given at the end"] += 1


async def _check_read(buffer: Buffer, tables: Tables) -> None:
    """Groups are read with the values that their rows have."""
    values = _values(tables)
    for group in await buffer.get([row["id"] for row in tables.groups]):
        found = {
            (position, name): value
            for position, one in zip(group.positions, group.episodes, strict=True)
            for name, value in ((REWARD, one.reward), (LABEL, one.metadata.get("label")))
        }
        assert found == values[group.id], f"{group.group_uid}: {found}"


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
        for name, value, _ in _stored(row):
            found[row["author"]][uids[row["group_id"]], row["position"], name, value] += 1
    assert found.keys() <= tried.keys() - refused, "a value is stored that was refused, or not sent"
    for call, entry in tried.items():
        values: set[Value] = {(*one,) for one in entry.detail["values"]}
        left = {one for one in values if changed.get(one[0], -inf) < entry.begin}
        mine = found[call]
        assert mine.keys() <= values, f"{call} has stored {mine.keys() - values}"
        assert max(mine.values(), default=1) == 1, f"a value of {call} is stored twice"
        if call in acknowledged:
            assert left <= mine.keys(), f"acknowledged values are lost: {left - mine.keys()}"
        assert not mine or left <= mine.keys(), f"only some values of {call} are stored"
    _check_history(entries, tables)
    _check_draws(entries, tables)
    check_claims(entries)


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


def _values(tables: Tables) -> dict[int, dict[tuple[int, str], float | None]]:
    """Return the rewards and labels of episodes by group, position and name."""
    found: dict[int, dict[tuple[int, str], float | None]] = defaultdict(dict)
    for row in tables.episodes:
        label = json.loads(row["metadata"]).get("label")
        found[row["group_id"]] |= {
            (row["position"], REWARD): row["reward"],
            (row["position"], LABEL): label,
        }
    return found


def _stored(row: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """Yield the name of each value that a row of the history sets, the value, and the earlier."""
    if row["name"] == REWARD:
        yield REWARD, row["value"], row["previous"]
    elif one := json.loads(row["changes"]).get("label"):
        yield LABEL, one["to"], one.get("from")


def check_claims(entries: list[Entry]) -> None:
    """Claims are exclusive, and calls of a claim are refused after its end or that of the wait."""
    changed = _changed(entries)
    claims_at: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    given: dict[tuple[str, int, str], float] = {}
    for entry in entries:
        detail = entry.detail
        if entry.call == "claim":  # its episodes can be claimed again if the group is changed
            is_same = changed.get(detail["uid"], -inf) < entry.begin
            where = f"{detail['name']} of {detail['uid']}" if is_same else detail["claim"]
            for position in detail["positions"]:
                claims_at[where, position].append(entry)
        if entry.call == "annotate":
            for uid, position, name, _ in detail["values"]:
                if changed.get(uid, -inf) < entry.begin:
                    given[uid, position, name] = min(
                        entry.end, given.get((uid, position, name), inf)
                    )
    trajectories.check_exclusive(entries, claims_at)
    freezes = [entry for entry in entries if entry.call == "freeze"]
    over = trajectories.ends(freezes, claims_at, {})
    for entry in entries:
        if entry.call == "annotate" and "claim" in entry.detail:
            claim, name = entry.detail["claim"], entry.detail["name"]
            is_in_time = entry.begin <= over.get(claim, inf)
            assert is_in_time, f"{entry.detail} began after its claim had ended"
            for uid, position, *_ in entry.detail["values"]:
                is_first = entry.begin <= given.get((uid, position, name), inf)
                assert is_first, f"{entry.detail} began when the episode had its {name}"


def check_waiting(entries: list[Entry], tables: Tables, settings: Mapping[str, Any]) -> None:
    """Check that groups wait for exactly what they lack, and that none is drawn without it.

    Args:
        entries: The log, read after the tables.
        tables: The tables, perhaps while other processes write.
        settings: One of `SETTINGS`.
    """
    lacking: dict[int, set[Place]] = defaultdict(set)
    waits: dict[int, dict[Place, str | None]] = defaultdict(dict)
    for group_id, values in _values(tables).items():
        lacking[group_id] = {(group_id, *at) for at, value in values.items() if value is None}
    for row in tables.trajectories:
        place = (row["group_id"], row["position"], row["missing"])
        waits[row["group_id"]][place] = row["unusable_reason"]
    may_complete = settings.get("on_missing") == "complete"
    drawn = {row["group_id"] for row in tables.drawn}
    changed = _changed(entries)
    for group in tables.groups:
        key, is_pending = group["id"], group["group_status"] == "pending"
        mine = lacking[key] if group["task_name"] == WAITING else set()
        rows = {place: why for place, why in waits[key].items() if place[2] != "episode"}
        assert rows.keys() <= mine, f"{group} waits for {rows.keys() - mine}, which it has"
        if is_pending:
            assert rows.keys() == mine, f"{group} does not wait for {mine - rows.keys()}"
            assert None in waits[key].values(), f"{group} has nothing open"
            assert settings or {*waits[key].values()} == {None}, f"{group}: {waits[key]}"
        elif mine and not may_complete:
            assert settings, f"{group} is closed without {mine}"
            assert group["group_status"] == "failed", f"{group} is not failed, without {mine}"
            assert group["status_reason"], f"{group} failed without a reason"
        elif mine:  # a lease that ends replaces the reason
            why = group["status_reason"] or ""
            is_known = why.startswith("no ") or key in drawn or group["attempts"]
            assert is_known, f"{group} is completed without {mine}"
        if mine and not may_complete and group["group_uid"] not in changed:
            assert key not in drawn, f"{group} was drawn without {mine}"
    for entry in entries:
        is_sound = may_complete or entry.call not in ("sample", "hold")
        assert is_sound or not entry.detail["lacking"], f"drawn without values: {entry.detail}"


def _check_history(entries: Iterable[Entry], tables: Tables) -> None:
    """The history begins with what was put, and ends with what the rows have, without gaps."""
    contents: dict[str, list[list[float | None]]] = defaultdict(list)
    for entry in entries:
        if entry.call == "content":
            contents[entry.detail["uid"]].append(entry.detail["rewards"])
    of_group: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(tables.annotations, key=lambda one: int(one["number"])):
        of_group[row["group_id"]].append(row)
    now = _values(tables)
    for group in tables.groups:
        key, values = group["id"], now[group["id"]]
        numbers = sorted({row["number"] for row in of_group[key]})
        assert numbers == [*range(1, group["times_annotated"] + 1)], f"{group}: {numbers}"
        first, last = dict(values), dict[tuple[int, str], float | None]()
        for row in of_group[key]:
            for name, value, previous in _stored(row):
                at = row["position"], name
                if at not in last:
                    first[at] = last[at] = previous
                assert previous == last[at], f"a value before {row} is lost"
                last[at] = value
        assert values == values | last, f"values of {group} are not the last ones, {last}"
        initial = {at: value for (at, name), value in first.items() if name == REWARD}
        is_whole = group["expected_episodes"] is None
        assert any(
            initial.items() <= dict(enumerate(one)).items()
            and (len(one) == len(initial) or not is_whole)
            for one in contents[group["group_uid"]]
        ), group
        columns = [group[f"reward_{name}"] for name in ("mean", "min", "max")]
        known = [one for (_, name), one in values.items() if name == REWARD and one is not None]
        if not known:
            assert columns == [None] * 3, group
            continue
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
            known = [
                [it for it in one if it is not None] for one in entry.detail["rewards"].values()
            ]
            drawn = [float(np.mean(one)) for one in known if one]
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
        again = {one.group_uid: [it.reward for it in one.episodes] for one in batch}
        drawn = entry.detail["rewards"]
        assert again.items() <= drawn.items(), f"drawn with {drawn}, redrawn with {again}"
        assert drawn.keys() - changed.keys() <= again.keys(), "a drawn group is lost"
        context.figures["redrawn"] += len(again)
