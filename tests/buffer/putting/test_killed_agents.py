"""Agents that are killed at any statement of a claim, an append, or the end of a trajectory."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaydb import Store
from replaydb.operations import verify
from support import child_processes
from support.agents import NUM_TURNS, chain
from support.invariants import check_invariants
from support.workers import Worker, workers

UIDS = [f"t{i}" for i in range(NUM_TURNS)]


#: It is killed at each of this many statements; nightly at all.
STEP = 6
OTHERS = [pytest.param(first, marks=pytest.mark.nightly) for first in range(1, STEP)]


@pytest.mark.parametrize("first", [*OTHERS, STEP])
async def test_no_acknowledged_turn_is_lost(url: str, tmp_path: Path, first: int) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer("math")
        was_killed, at = True, first
        while was_killed:
            uid, log = f"g{at}", tmp_path / f"acknowledged-{at}"
            log.touch()
            await buffer.open_group("agents", uid, 1)
            arguments = url, uid, str(log), at
            with workers(Worker(child_processes.die_in_trajectory, *arguments)) as (worker,):
                was_killed = await worker.ended() != 0
            for one in await buffer.trajectories(uids=uid):
                if one.claim_uid is not None:
                    await buffer.release_claim(one.claim_uid, reason="killed")
            acknowledged = log.read_text().split()
            if await buffer.trajectories(uids=uid):
                [claim] = await buffer.claim(ttl=60)
                stored = [turn.uid for turn in claim.turns[0]]
                assert stored in (acknowledged, UIDS[: len(acknowledged) + 1])
                for turn in chain(NUM_TURNS):  # those that are there are not appended again
                    await claim.append_turn(turn)
                assert await claim.finish_episode() == "completed"
            [group] = await buffer.get(uids=uid)
            assert list(group.episodes[0].turns) == chain(NUM_TURNS)
            at += STEP
        assert at > 3 * STEP  # it was killed at several statements
        await check_invariants(url)
        assert (await verify(store)).problems == ()
