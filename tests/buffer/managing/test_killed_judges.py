"""Judges that are killed at any statement of a call that adds values."""

from __future__ import annotations

import pytest

from replaydb import Annotation, EpisodeGroup, Store
from replaydb.database.tables import schema
from replaydb.operations import verify
from support import child_processes
from support.groups import episode
from support.invariants import check_invariants, number_of
from support.workers import Worker, workers

#: It is killed at each of this many statements; nightly at all.
STEP = 4
OTHERS = [pytest.param(first, marks=pytest.mark.nightly) for first in range(1, STEP)]


@pytest.mark.parametrize("first", [*OTHERS, STEP])
async def test_all_values_are_added_or_none(url: str, first: int) -> None:
    async with Store.open(url) as store:
        buffer = await store.buffer("math", requires={"waiting": "reward"})
        was_killed, at = True, first
        while was_killed:
            uids = [f"a{at}", f"b{at}"]
            several = [EpisodeGroup("t", [episode(None)] * 2, group_uid=uid) for uid in uids]
            waits = EpisodeGroup("waiting", [episode(None)], group_uid=f"c{at}")
            await buffer.put([*several, waits])
            await buffer.sample(2, tasks="t")
            uids.append(waits.group_uid)
            new = [Annotation(uid, 0, reward=float(at), metadata={"at": at}) for uid in uids]
            known = await number_of(url, schema.annotation)
            with workers(Worker(child_processes.die_annotating, url, new, at)) as (worker,):
                was_killed = await worker.ended() != 0
            added = await number_of(url, schema.annotation) - known
            assert added in (0, 2 * len(new))
            rewards = {one.episodes[0].reward for one in await buffer.get(uids=uids)}
            assert rewards == ({float(at)} if added else {None})
            [info] = await buffer.find(uids=waits.group_uid)
            assert info.status == ("completed" if added else "pending")
            await buffer.annotate(new)  # what is there already is not added again
            assert await number_of(url, schema.annotation) - known == 2 * len(new)
            at += STEP
        assert at > 2 * STEP  # it was killed at several statements
        await check_invariants(url)
        assert (await verify(store)).problems == ()
