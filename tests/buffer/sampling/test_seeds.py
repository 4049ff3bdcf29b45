"""A seeded buffer draws the same groups for the same sequence of calls, on both engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

import replaydb as rdb
from replaydb.domain.policies import SamplingPolicy
from support.engines import postgresql_nightly
from support.sampling_model import EVERYTHING, Filter, GroupSpec, level_below, tagged, to_group

POLICIES: list[SamplingPolicy] = [
    rdb.Uniform(),
    rdb.Prioritized(beta=0.6),
    rdb.Fifo(),
    rdb.Lifo(),
    rdb.StalestFirst(),
    rdb.FreshestFirst(),
    rdb.TopPriority(),
    rdb.LeastSampled(),
]
FILTERS: list[Filter] = [EVERYTHING, EVERYTHING, level_below(5), tagged(7)]
TASKS = ["gsm8k", "code", "tools"]

Drawn = tuple[list[str], list[float], list[float]]


class History:
    """Random calls from a generator of their own: the same for every buffer.

    Weights are very different and some draws take all groups, so clocks are shifted back.
    """

    def __init__(self, buffer: rdb.Buffer, rng: np.random.Generator) -> None:
        self._buffer = buffer
        self._rng = rng
        self._uids: dict[str, int] = {}
        self._version = 0
        self._made = 0

    def move_to(self, buffer: rdb.Buffer) -> None:
        """Continue in the same buffer, opened again."""
        self._buffer = buffer

    async def run(self, steps: int) -> list[Drawn]:
        """Return the draws as (uids, probabilities, weights)."""
        changes = [self._put, self._delete, self._prioritize, self._advance]
        drawn: list[Drawn] = []
        for _ in range(steps):
            if not self._uids or self._rng.random() < 0.3:
                await changes[self._rng.choice(4, p=[0.5, 0.1, 0.3, 0.1])]()
            else:
                drawn.append(await self._draw())
        return drawn

    async def _put(self) -> None:
        count = int(self._rng.integers(1, 30))
        several = [
            GroupSpec(
                f"group-{self._made + i}",
                TASKS[int(self._rng.choice(3, p=[0.7, 0.25, 0.05]))],
                float(self._rng.choice([0.0, 1e-12, 0.5, 1.0, 3.0, 1e12])),
                (self._made + i) % 10,
                0,
            )
            for i in range(count)
        ]
        self._made += count
        versions = [None if self._rng.random() < 0.1 else self._version for _ in several]
        batch = [to_group(known, version) for known, version in zip(several, versions, strict=True)]
        ids = await self._buffer.put(batch)
        self._uids |= {known.uid: one for known, one in zip(several, ids, strict=True)}

    async def _delete(self) -> None:
        uids = self._some(0.1)
        await self._buffer.delete([self._uids.pop(uid) for uid in uids])

    async def _prioritize(self) -> None:
        uids = self._some(0.2)
        await self._buffer.update_priorities(
            [self._uids[uid] for uid in uids],
            self._rng.choice([0.0, 1e-9, 0.1, 2.0, 5.0], len(uids)),
        )

    async def _advance(self) -> None:
        self._version += 1
        await self._buffer.advance_policy(self._version)

    async def _draw(self) -> Drawn:
        policy = POLICIES[int(self._rng.integers(len(POLICIES)))]
        condition = FILTERS[int(self._rng.integers(len(FILTERS)))]
        count = int(self._rng.integers(1, 12)) if self._rng.random() < 0.8 else 500
        n: int | dict[str, int] = count
        tasks = None
        match int(self._rng.integers(3)):
            case 0:
                n = {"code": count, "gsm8k": 2 * count}
            case 1:
                tasks = ["gsm8k", "tools"]
        stale = 3 if self._rng.random() < 0.2 else None
        try:
            batch = await self._buffer.sample(
                n,
                policy,
                tasks=tasks,
                where=condition.where,
                max_staleness=stale,
                at_least=1,
            )
        except rdb.NotEnoughGroupsError:
            return ([], [], [])
        return (
            [group.group_uid for group in batch.groups],
            batch.probabilities.tolist(),
            batch.weights.tolist(),
        )

    def _some(self, share: float) -> list[str]:
        uids = sorted(self._uids)
        return sorted(self._rng.choice(uids, max(1, int(share * len(uids))), replace=False))


@asynccontextmanager
async def opened(url: str, name: str, seed: int | None) -> AsyncIterator[rdb.Buffer]:
    async with rdb.Store.open(url) as store:
        yield await store.buffer(name, seed=seed, priority_exponent=0.8)


async def drawn_by(url: str, name: str, seed: int | None, steps: int = 150) -> list[Drawn]:
    async with opened(url, name, seed) as buffer:
        return await History(buffer, np.random.default_rng(12)).run(steps)


@pytest.mark.parametrize("steps", [75, pytest.param(150, marks=pytest.mark.nightly)])
async def test_both_engines_draw_the_same(sqlite_url: str, postgresql_url: str, steps: int) -> None:
    on_sqlite = await drawn_by(sqlite_url, "math", seed=42, steps=steps)
    on_postgresql = await drawn_by(postgresql_url, "math", seed=42, steps=steps)
    assert sum(len(uids) for uids, _, _ in on_sqlite) > 2 * steps
    for here, there in zip(on_sqlite, on_postgresql, strict=True):
        assert here[0] == there[0]
        np.testing.assert_allclose(here[1], there[1], rtol=1e-9)
        np.testing.assert_allclose(here[2], there[2], rtol=1e-9)


@postgresql_nightly
async def test_closing_and_opening_again_changes_nothing(url: str) -> None:
    reference = await drawn_by(url, "reference", seed=42, steps=90)
    history: History | None = None
    drawn: list[Drawn] = []
    for _ in range(3):
        async with opened(url, "reopened", seed=42) as buffer:
            if history is None:
                history = History(buffer, np.random.default_rng(12))
            history.move_to(buffer)
            drawn += await history.run(30)
    assert drawn == reference


@postgresql_nightly
async def test_other_seeds_and_no_seeds_draw_differently(url: str) -> None:
    runs = [
        await drawn_by(url, f"buffer-{i}", seed, steps=60)
        for i, seed in enumerate([42, 43, None, None])
    ]
    uids = [[drawn[0] for drawn in run] for run in runs]
    for i in range(len(runs)):
        assert all(uids[i] != uids[j] for j in range(i))
