"""`eviction="uniform"`: all groups are equally likely to be evicted, and draws stay exact."""

from __future__ import annotations

from collections import Counter

import numpy as np
from sqlalchemy import select

import replaydb as rdb
from replaydb import Capacity, Store
from replaydb.database.tables.schema import episode_group
from support.connections import transaction
from support.draw_frequencies import DrawFrequencies
from support.engines import postgresql_nightly
from support.groups import group

ROUNDS = 250
#: Task and status of the groups that are put together.
ARRIVALS = [("a", "completed")] * 2 + [("b", "completed")] * 3 + [("a", "aborted")]
#: Groups are classified by kind and by the number of rounds since their put, up to this.
OLD = 3


@postgresql_nightly
async def test_all_groups_are_equally_likely_to_be_evicted(store: Store, url: str) -> None:
    buffer = await store.buffer(
        "math",
        seed=20_260_115,
        capacity=Capacity(groups=24),
        eviction="uniform",
        on_evict="delete",
        record_draws=False,
    )
    kinds = sorted(set(ARRIVALS))
    classes = len(kinds) * (OLD + 1)
    evicted, drawn = DrawFrequencies(classes), DrawFrequencies(classes)
    shuffled = np.random.default_rng(1)
    born: dict[int, tuple[int, tuple[str, str]]] = {}

    def labels(now: int) -> dict[int, int]:
        return {
            one: kinds.index(kind) * (OLD + 1) + min(OLD, now - since)
            for one, (since, kind) in born.items()
        }

    for now in range(ROUNDS):
        several = [group(task=task, status=status, rewards=[1.0]) for task, status in ARRIVALS]
        ids = await buffer.put(several)
        async with transaction(url) as connection:
            left = set(await connection.scalars(select(episode_group.c.id)))
        gone = [one for one in born if one not in left]
        assert len(gone) == max(0, len(born) + len(ids) - 24)
        evicted.add(shuffled.permutation(gone).tolist(), dict.fromkeys(born, 1.0), labels(now))
        for one in gone:
            del born[one]
        born |= {one: (now + 1, kind) for one, kind in zip(ids, ARRIVALS, strict=True)}
        batch = await buffer.sample(4, rdb.Uniform())
        completed = [one for one, (_, kind) in born.items() if kind[1] == "completed"]
        drawn.add(batch.ids, dict.fromkeys(completed, 1.0), labels(now + 1))
    assert evicted.num_draws == (ROUNDS - 4) * len(ARRIVALS)
    assert min(evicted.p_value(), drawn.p_value()) > 0.001, (evicted.p_value(), drawn.p_value())


async def test_as_many_groups_are_evicted_as_necessary(store: Store) -> None:
    """Of all tasks alike, and by tokens too."""
    buffer = await store.buffer("math", seed=7, capacity=Capacity(tokens=500), eviction="uniform")
    for round_ in range(20):
        await buffer.put([group(task=task, rewards=[1.0] * 5) for task in ("a", "b")])
        stats = (await buffer.stats()).totals
        stored = Counter[str]()
        for one in stats:
            if one.status != "archived":
                stored[one.task_name] += one.num_tokens
        assert stored.total() == min(500, 50 * (round_ + 1))
    assert min(stored.values()) > 50
