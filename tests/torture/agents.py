"""Roles of workers that attack trajectories: agents that hold claims, and processes that do not.

Each call on a trajectory is logged as "try" before it begins, and when it has returned by its name:
"turn", "finish", "fail" or "release". A call that was refused, and so stored nothing, is logged as
"refused". "leave" is logged before the block of a claim ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

import replaydb as rdb
from replaydb import Buffer, Claim, Turn
from torture.workers import CallLog, Step, lease, sample

#: Seconds of a claim. Agents are frozen for longer.
TTL: Final = 0.6
#: Errors of calls of a claim that has ended, and of calls without a claim.
ENDED = (rdb.ClaimExpiredError, rdb.DuplicateEpisodeError, rdb.GroupClosedError)
WITHOUT_CLAIM = (*ENDED, rdb.TrajectoryClaimedError, rdb.InvalidInputError)


@dataclass(frozen=True)
class Caller:
    """Makes logged calls on one trajectory, with a claim or without one."""

    buffer: Buffer
    log: CallLog
    chance: random.Random
    group: str
    position: int
    claim: Claim | None = None

    async def append(self, turns: list[Turn]) -> None:
        """Append a turn, in some cases by the uid of its parent, or twice at the same time."""
        turn, own = random_turn(self.chance, turns)
        call = partial(self._method("append_turn"), turn)
        if own is not None and turn.parent is not None:
            call = partial(self._method("append_turn"), own, parent_uid=turn.parent.uid)
        times = 2 if self.chance.random() < 0.2 else 1
        facts = {"uid": turn.uid, "digest": digest(turn)}
        calls = (self.logged("turn", facts, call) for _ in range(times))
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if error is not None:
                raise error
        turns.append(turn)

    async def end(self, turns: Sequence[Turn]) -> None:
        """Finish the trajectory or mark it as unusable. What is stored has the uid of the call."""
        uid, chance = uuid4().hex, self.chance
        if not turns or chance.random() < 0.2:
            await self.logged("fail", {"uid": uid}, partial(self._method("fail_episode"), uid))
            return
        lost = [str(one.uid) for one in turns if chance.random() < 0.1]
        values = {"discarded": lost, "reward": chance.random()}
        call = partial(self._method("finish_episode"), metadata={"by": uid}, **values)
        await self.logged("finish", {"uid": uid, **values}, call)

    def _method(self, name: str) -> Callable[..., Awaitable[Any]]:
        if self.claim is not None:
            return partial(getattr(self.claim, name), position=self.position)
        return partial(getattr(self.buffer, name), self.group, self.position)

    async def logged(
        self, name: str, facts: Mapping[str, Any], call: Callable[[], Awaitable[Any]]
    ) -> None:
        """Log a call before it begins, and when it has returned or was refused."""
        begin, claim = time.monotonic(), self.claim and self.claim.uid
        detail = {"claim": claim, "group": self.group, "position": self.position, **facts}
        self.log.record("try", begin, {"call": name, **detail})
        try:
            await call()
        except rdb.ReplayDBError as error:
            if not isinstance(error, rdb.DatabaseError):  # after which it may have been stored
                self.log.record("refused", begin, detail)
            raise
        self.log.record(name, begin, detail)


def random_turn(chance: random.Random, turns: Sequence[Turn]) -> tuple[Turn, Turn | None]:
    """Return a turn that may follow one of these, and perhaps its own tokens as a turn."""
    parent = chance.choice([*turns, *4 * [turns[-1]], None]) if turns else None
    new = chance.choices(range(1000), k=chance.choice([0, 3, 40]))
    size = chance.choice([1, 5, 900])
    values: dict[str, Any] = {
        "uid": uuid4().hex,
        "response_ids": chance.choices(range(1000), k=size),
        "logprobs": [-chance.random()] * size,
        "policy_version": chance.choice([0, 1, 2]),
        "reward": chance.choice([None, 0.5]),
        "agent": chance.choice(["main", "sub"]),
        "state": chance.choice([None, "snapshot"]),
    }
    if parent is None:
        return Turn(prompt_ids=[1, 2, 3, *new], **values), None
    if values["agent"] == "sub":  # a context of its own, or a part of the other one
        kept = parent.prompt_ids[: chance.choice([0, 2])]
        return Turn(parent=parent, prompt_ids=[*kept, *new], **values), None
    own = Turn(prompt_ids=new, **values) if chance.random() < 0.3 else None
    return Turn(parent=parent, new_ids=new, **values), own


def digest(turn: Turn) -> str:
    """Return a digest of the content of a turn, except whether it was discarded later."""
    arrays = (turn.prompt_ids, turn.response_ids, turn.loss_mask, turn.logprobs)
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(repr(None if array is None else array.tolist()).encode())
    parent = turn.parent and turn.parent.uid
    marks = (turn.uid, parent, turn.reward, turn.policy_version, turn.agent, turn.state)
    found.update(repr(marks).encode())
    return found.hexdigest()


async def agent(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Claim trajectories and continue them. If none is free, open a group."""
    begin = time.monotonic()
    claims = await buffer.claim(
        chance.choice([1, 1, 3]), ttl=TTL, whole_groups=chance.random() < 0.3, timeout=0
    )
    for claim in claims:
        seen = {at: [turn.uid for turn in turns] for at, turns in claim.turns.items()}
        detail = {"claim": claim.uid, "group": claim.group.group_uid, "seen": seen}
        log.record("claim", begin, detail)
    if not claims:
        uid, size = f"group-{os.getpid()}.{number}", chance.randint(1, 4)
        least = chance.choice([None, chance.randint(1, size)])
        deadline = chance.choice([None, None, chance.uniform(0.5, 3)])
        await buffer.open_group(
            chance.choice(["code", "math"]), uid, size, min_episodes=least, deadline=deadline
        )
        log.record("put", begin, [uid])
    for claim in claims:
        with suppress(*ENDED):  # without the block it is not extended
            async with claim if chance.random() < 0.8 else nullcontext():
                try:
                    await _hold(buffer, log, chance, claim)
                finally:
                    log.record("leave", begin, {"claim": claim.uid})


async def _hold(buffer: Buffer, log: CallLog, chance: random.Random, claim: Claim) -> None:
    """Continue the trajectories of a claim, and end some of them, or the claim."""
    uid = claim.group.group_uid
    for position in claim.positions:
        caller = Caller(buffer, log, chance, uid, position, claim)
        turns = list(claim.turns[position])
        for _ in range(chance.randint(0, 4)):
            await caller.append(turns)
            await asyncio.sleep(chance.uniform(0, 0.04))
        match chance.choice(["end", "end", "leave", "release"]):
            case "end":
                calls = [caller.end(list(turns))]
                if chance.random() < 0.3:  # then one of them is refused, or both are in time
                    calls.append(caller.append(turns))
                for error in await asyncio.gather(*calls, return_exceptions=True):
                    if isinstance(error, Exception) and not (
                        len(calls) > 1 and isinstance(error, rdb.InvalidInputError)
                    ):
                        raise error
            case "release":
                reason = chance.choice([None, "tired"])
                facts = {"uid": uuid4().hex}
                await caller.logged("release", facts, partial(claim.release, reason=reason))
                return


async def interfere(buffer: Buffer, log: CallLog, chance: random.Random, number: int) -> None:
    """Act on a trajectory that other processes may have claimed, without a claim."""
    await asyncio.sleep(chance.uniform(0, 0.2))
    found = [one for one in await buffer.trajectories() if one.unusable_reason is None]
    if not found:
        return
    one = chance.choice(found)
    caller = Caller(buffer, log, chance, one.group_uid, one.position)
    with suppress(*WITHOUT_CLAIM):
        if one.claim_uid is not None and chance.random() < 0.2:
            facts = {"uid": uuid4().hex, "claim": one.claim_uid}
            release = partial(buffer.release_claim, one.claim_uid, reason="interfered")
            await caller.logged("release", facts, release)
            return
        turns = await buffer.turns(one.group_uid, one.position)
        if turns and chance.random() < 0.1:
            await caller.end(turns)
        else:
            await caller.append(turns)


ROLES: Mapping[str, Step] = {
    "agent": agent,
    "interfere": interfere,
    "lease": lease,
    "sample": sample,
}
