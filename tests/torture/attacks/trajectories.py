"""An acknowledged turn is stored once, and one of a claim that has ended is not stored.

Agents claim trajectories, append turns, and finish them, while other processes interfere and
trainers take complete groups. Agents are killed, or frozen for longer than their claims last. At
the end, one process finishes what they have left.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, permutations
from math import inf
from typing import Final

from replaydb import Buffer, Store
from replaydb.operations import verify
from support.workers import kill_all
from torture import checker
from torture.agents import ENDED, ROLES, TTL, Caller, digest
from torture.checker import Entry, Tables
from torture.context import AttackContext
from torture.workers import BUFFER, CallLog, RoleWorker

PROMISES = (15,)
ENGINES = ("sqlite", "postgresql")
MAX_ATTEMPTS: Final = 2
Place = tuple[str, int]
#: Calls on trajectories.
_DONE = ("turn", "finish", "fail", "release")


@dataclass(frozen=True)
class Trajectory:
    """What is stored at a position of a group.

    Attributes:
        turns: Digests of its turns by their uids, in order.
        discarded: Uids of the turns that were discarded.
        reward: Reward of its episode.
        ended_by: Uid of the call that stored its episode, or why it is unusable; None: it is open.
    """

    turns: Mapping[str, str]
    discarded: frozenset[str] = frozenset()
    reward: float | None = None
    ended_by: str | None = None


async def attack(context: AttackContext) -> None:
    """Kill or freeze an agent after every few calls; at the end finish all trajectories."""
    chance, end = context.chance, time.monotonic() + context.seconds
    log = CallLog(str(context.log))
    folder = context.folder / "payloads"
    folder.mkdir()
    payloads = chance.choice([None, folder.as_uri()])
    async with Store.open(context.url, payloads=payloads) as store:
        await store.buffer(BUFFER, max_attempts=MAX_ATTEMPTS)

    def start(role: str) -> RoleWorker:
        options = {"patches": {"torture.workers.ROLES": ROLES}, "unavailable": True}
        return RoleWorker(context.url, context.log, role, chance.getrandbits(32), **options)

    agents = [start("agent") for _ in range(3)]
    others = [start(role) for role in ROLES if role != "agent"]
    frozen: list[RoleWorker] = []
    try:
        while not (context.figures["kills"] and frozen) or time.monotonic() < end:
            await context.progress([*agents, *others], 10, "try")
            await asyncio.sleep(chance.uniform(0, 0.1))
            victim = chance.randrange(len(agents))
            if chance.random() < 0.6:
                agents[victim].kill()
                agents[victim] = start("agent")
                context.figures["kills"] += 1
            else:  # if all are frozen, no process ends the claims that expire
                frozen = chance.choice([[agents[victim]], [*agents, *others]])
                await freeze(log, frozen)
    finally:
        await kill_all([*agents, *others])
    async with Store.open(context.url) as store:
        buffer = await store.buffer(BUFFER)
        check(checker.read_log(context.log), await stored(buffer))
        check_groups(await context.check())
        await _finish_all(context, buffer, log)
        check(checker.read_log(context.log), await stored(buffer))
        tables = await checker.read_tables(context.url)
        checker.check_tables(tables)
        check_groups(tables)
        assert not tables.with_status("pending"), "some groups could not be completed"
        report = await verify(store)
        assert report.is_sound, report.problems[:3]


async def freeze(log: CallLog, workers: list[RoleWorker]) -> None:
    """Freeze workers until their claims have expired, and continue one after another."""
    begin = time.monotonic()
    for one in workers:
        one.freeze()
    await asyncio.sleep(1.5 * TTL)
    for one in workers:
        log.record("freeze", begin, one.pid)
        one.thaw()
        await asyncio.sleep(0.05)


async def _finish_all(context: AttackContext, buffer: Buffer, log: CallLog) -> None:
    """Continue all trajectories to their end, when the claims of killed agents have expired."""
    while claims := await buffer.claim(8, ttl=60, timeout=2 * TTL):
        for claim in claims:
            [position] = claim.positions
            turns = list(claim.turns[position])
            caller = Caller(buffer, log, context.chance, claim.group.group_uid, position, claim)
            with suppress(*ENDED):  # at the deadline of the group
                await caller.append(turns)
                await caller.end(turns)
                context.figures["finished at the end"] += 1


async def stored(buffer: Buffer) -> dict[Place, Trajectory]:
    """Read all trajectories, with an episode or without one."""
    found: dict[Place, Trajectory] = {}
    infos = await buffer.find(limit=None)
    for group in await buffer.get([info.id for info in infos]):
        for at, episode in zip(group.positions, group.episodes, strict=True):
            lost = frozenset(str(one.uid) for one in episode.turns if one.is_discarded)
            by = str(episode.metadata["by"])
            turns = {str(one.uid): digest(one) for one in episode.turns}
            assert len(turns) == len(episode.turns), "a turn is stored twice"
            found[group.group_uid, at] = Trajectory(turns, lost, episode.reward, by)
    for one in await buffer.trajectories(uids=[info.group_uid for info in infos], limit=10**6):
        read = await buffer.turns(one.group_uid, one.position)
        turns = {str(turn.uid): digest(turn) for turn in read}
        assert len(turns) == len(read) == one.num_turns, "a turn is stored twice"
        found[one.group_uid, one.position] = Trajectory(turns, ended_by=one.unusable_reason)
    return found


def check(entries: Iterable[Entry], found: Mapping[Place, Trajectory]) -> None:
    """Check that exactly what was acknowledged is stored, and nothing by an ended claim."""
    entries = list(entries)
    tries = [entry for entry in entries if entry.call == "try"]
    tried = {entry.detail["uid"]: entry for entry in reversed(tries)}  # the first one
    done = {entry.detail["uid"]: entry for entry in entries if entry.call in _DONE}
    left = Counter(entry.detail["uid"] for entry in tries)
    left -= Counter(entry.detail["uid"] for entry in entries if entry.call == "refused")
    refused = tried.keys() - done.keys() - left.keys()  # each time

    stored_at = {uid: where for where, one in found.items() for uid in one.turns}
    assert len(stored_at) == sum(len(one.turns) for one in found.values()), "a turn is stored twice"
    assert stored_at.keys() <= tried.keys(), "a turn is stored that no process appended"
    assert not refused & stored_at.keys(), "a turn is stored whose append was refused"
    for uid, where in stored_at.items():
        assert where == _place(tried[uid]), f"turn {uid} is at another position"
        is_same = found[where].turns[uid] == tried[uid].detail["digest"]
        assert is_same, f"turn {uid} has other content"
    lost = {uid for uid, entry in done.items() if entry.call == "turn"} - stored_at.keys()
    assert not lost, f"{len(lost)} acknowledged turns are lost"
    for where, one in found.items():
        owners = [tried[uid].detail["claim"] or uid for uid in one.turns]
        runs = [owner for owner, _ in groupby(owners)]
        assert len(runs) == len(set(runs)), f"{where}: turns of several claims alternate: {owners}"
        assert one.ended_by not in refused, f"{where} was ended by a call that was refused"
        if one.reward is not None:
            call = tried[one.ended_by or ""]
            passed = (_place(call), frozenset(call.detail["discarded"]), call.detail["reward"])
            assert (where, one.discarded, one.reward) == passed, f"{where} is not {passed}"
    _check_claims(entries, tried, done, found)


def _place(entry: Entry) -> Place:
    return entry.detail["group"], entry.detail["position"]


def _check_claims(
    entries: list[Entry],
    tried: Mapping[str, Entry],
    done: Mapping[str, Entry],
    found: Mapping[Place, Trajectory],
) -> None:
    """A claim has all turns before it, and calls after the end of what they act on are refused."""
    turns_at, claims_at = defaultdict(list), defaultdict(list)
    for uid, entry in done.items():
        if entry.call == "turn":
            turns_at[_place(entry)].append(entry)
        elif entry.call != "release":
            assert found[_place(entry)].ended_by == uid, f"an acknowledged {entry.call} is lost"
    for entry in (one for one in entries if one.call == "claim"):
        for at, seen in entry.detail["seen"].items():
            where = (entry.detail["group"], int(at))
            claims_at[where].append(entry)
            assert [*found[where].turns][: len(seen)] == seen, f"{where}: turns have changed"
            before = {one.detail["uid"] for one in turns_at[where] if one.end < entry.begin}
            may_be_over = entry.end >= entry.begin + TTL  # before its turns were read
            assert may_be_over or before <= set(seen), f"{where}: turns are not in a later claim"
    check_exclusive(entries, claims_at)
    over = ends([one for one in entries if one.call == "freeze"], claims_at, done)
    for uid, entry in done.items():
        end = min(over.get(key, inf) for key in (_place(entry), entry.detail["claim"]))
        assert tried[uid].begin <= end, f"a {entry.call} began after its claim or place had ended"


def check_exclusive(entries: list[Entry], claims_at: Mapping[Place, list[Entry]]) -> None:
    """A trajectory is claimed again only after its claim was ended, or could expire."""
    ended: dict[str, float] = {}  # when a process first was about to end it
    for entry in entries:
        if entry.call == "leave" or (entry.call == "try" and entry.detail["call"] == "release"):
            ended.setdefault(entry.detail["claim"], entry.end)
    for where, several in claims_at.items():
        for first, second in permutations(several, 2):
            end = min(first.begin + TTL, ended.get(first.detail["claim"], inf))
            if first.end < second.begin:
                assert end < second.end, f"{where}: two processes have a claim at the same time"


def ends(
    freezes: list[Entry], claims_at: Mapping[Place, list[Entry]], done: Mapping[str, Entry]
) -> dict[Place | str, float]:
    """Return times at which trajectories, by place, and claims, by uid, had certainly ended."""
    found: dict[Place | str, float] = {}

    def end(key: Place | str, entry: Entry) -> None:
        found[key] = min(entry.end, found.get(key, inf))

    for entry in done.values():
        if entry.call != "turn":
            end(entry.detail["claim"] if entry.call == "release" else _place(entry), entry)
    for several in claims_at.values():
        for first in several:
            later = [one for one in several if first.end < one.begin]
            later += [one for one in freezes if one.detail == first.pid and first.end < one.begin]
            for one in later:
                end(first.detail["claim"], one)
    return found


def check_groups(tables: Tables) -> None:
    """Groups are completed or fail with their last trajectory, and claims are not draws."""
    positions, is_open = defaultdict[int, list[int]](list), set[int]()
    for row in tables.episodes:
        positions[row["group_id"]].append(row["position"])
    for row in tables.trajectories:
        positions[row["group_id"]].append(row["position"])
        if row["unusable_reason"] is None:
            is_open.add(row["group_id"])
            assert row["attempts"] < MAX_ATTEMPTS, row
        assert row["attempts"] <= MAX_ATTEMPTS, row
    for row in tables.groups:
        assert sorted(positions[row["id"]]) == [*range(row["expected_episodes"])], row
        assert (row["id"] in is_open) == (row["group_status"] == "pending"), row
        is_enough = row["num_episodes"] >= (row["min_episodes"] or row["expected_episodes"])
        if row["id"] not in is_open:
            assert is_enough == (row["completed_at"] is not None), row
            assert is_enough or row["group_status"] == "failed", row
    never = {row["id"] for row in tables.groups if row["completed_at"] is None}
    assert not never & {row["group_id"] for row in tables.drawn}, "an incomplete group was drawn"
    assert sum(row["num_sampled"] for row in tables.tasks) == len(tables.drawn)
