"""The tag index: filters find the same groups as a scan, and draws stay exact."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

import replaydb as rdb
from replaydb import Buffer, Store
from replaydb.database.filters.compiling import checked
from replaydb.database.filters.tag_lookups import lookups_in
from replaydb.database.repository import draws
from replaydb.database.repository import tags as index
from replaydb.database.tables import schema
from replaydb.domain.policies import SamplingPolicy
from support.engines import in_turn
from support.groups import group
from support.invariants import number_of
from support.sampling_model import EVERYTHING, GroupSpec, SamplingModel, tagged

level, n = rdb.col.tags["level"], rdb.col.tags["n"]
LONG = "x" * 150
VALUES: list[Any] = [
    "hard", "easy", 3, 3.0, 2**53, 2**53 + 1, 0.5, -1, "3", True, False, None, [1], {"a": 1},
    LONG, f"{LONG}y", "难", "",
]  # fmt: skip
FILTERS: list[Any] = [
    level == "hard",
    level == LONG,
    level > LONG,
    level <= "easy",
    level == 2**53,
    level > 2**53,
    level == 3,
    level == True,  # noqa: E712
    level == 1,
    level.between(0, 3),
    level.in_(["hard", "easy", LONG]),
    level.in_([3, 0.5, True]),
    (level == "hard") & (n < 5) & (rdb.col.task_name == "code"),
    (n >= 3) & (n < 5) & (level != "hard"),
    sa.and_(level.as_string() == "hard", rdb.col.priority > 1),
]
OTHERS: list[Any] = [  # filters that cannot use the index
    level != "hard",
    ~(level == "hard"),
    (level == "hard") | (n == 3),
    level.in_(["hard", 3]),
    level.in_([]),
    level.is_(None),
    level.like("h%"),
    level["a"] == 1,
    rdb.col.tags["x"] == 1,
    level == sa.func.lower(rdb.col.task_name),
]


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets one entry per lookup in the index."""
    found: list[int] = []
    select_tagged = index.select_tagged

    def recorded(*arguments: Any) -> Any:
        found.append(1)
        return select_tagged(*arguments)

    monkeypatch.setattr(index, "select_tagged", recorded)
    return found


def some() -> list[rdb.EpisodeGroup]:
    return [
        group(
            f"{task}-{i}",
            task,
            version=None if i % 5 == 0 else i % 3,
            priority=float(i % 4),
            tags={"level": value, "n": i % 7},
        )
        for i, value in enumerate(VALUES)
        for task in ("code", "math")
    ]


def test_filters_that_use_the_index() -> None:
    for where in FILTERS:
        assert lookups_in(checked(where), {"level", "n"}), str(where)
    for where in OTHERS:
        assert not lookups_in(checked(where), {"level", "n"}), str(where)


@pytest.fixture
async def both(store: Store) -> tuple[Buffer, Buffer]:
    """The same groups without an index, and with one."""
    found = []
    for name, names in (("plain", ()), ("indexed", ("level", "n"))):
        buffer = await store.buffer(name, indexed_tags=names)
        await buffer.put(some())
        found.append(buffer)
    return found[0], found[1]


ORDERS: list[SamplingPolicy] = [
    rdb.Fifo(), rdb.Lifo(), rdb.StalestFirst(), rdb.FreshestFirst(), rdb.TopPriority(),
    rdb.LeastSampled(),
]  # fmt: skip
RANDOM: list[SamplingPolicy] = [rdb.Uniform(), rdb.Prioritized()]


async def test_every_call_finds_the_same_groups(
    both: tuple[Buffer, Buffer], looked_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "_max_lookups_in_order", lambda *_: 100)
    keys = (rdb.col.id, rdb.col.comparable_version, rdb.col.comparable_version.desc())
    for where in FILTERS:
        plain, indexed = [await buffer.count(where=where) for buffer in both]
        assert plain == indexed, str(where)
    assert len(looked_up) == len(FILTERS)
    for number, where in enumerate(FILTERS[::4]):
        found: list[list[Any]] = [[], []]
        before = len(looked_up)
        for buffer, mine in zip(both, found, strict=True):
            mine.append(await buffer.count(where=where, tasks="code", statuses="completed"))
            mine.append(await buffer.wait_until(at_least=3, where=where, timeout=0))
            for key in keys:
                pages: list[list[str]] = []
                after = None
                while page := await buffer.find(where=where, order_by=key, limit=5, after=after):
                    pages.append([one.group_uid for one in page])
                    after = page[-1]
                mine.append(pages)
            batch = await buffer.peek(3, ORDERS[number % 6], where=where, at_least=0)
            mine.append([one.group_uid for one in batch])
            for order in ORDERS[number % 2 :: 2]:
                batch = await buffer.sample(3, order, where=where, at_least=0)
                mine.append([one.group_uid for one in batch])
            for policy in RANDOM:
                batch = await buffer.sample(40, policy, where=where, at_least=0)
                mine.append(sorted(one.group_uid for one in batch))
        assert found[0] == found[1], str(where)
        assert len(looked_up) > before, str(where)
    counts = [await buffer.delete(where=FILTERS[0]) for buffer in both]
    assert counts[0] == counts[1] > 0
    assert (await both[0].count()) == (await both[1].count()) > 0


@pytest.mark.parametrize(
    "policy",
    [pytest.param(rdb.Uniform(), marks=pytest.mark.nightly), rdb.Prioritized()],
    ids=["uniform", "priority"],
)
async def test_draws_by_the_tag_index_are_exact(
    sqlite_url: str,
    policy: rdb.Uniform | rdb.Prioritized,
    looked_up: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other draws stay exact too: groups passed over by an abandoned read get new keys.

    With an estimate from 12 rows, about half of the filtered draws are lookups.
    """
    monkeypatch.setattr(draws, "KEYS_READ_TO_ESTIMATE", 12)
    monkeypatch.setattr(draws, "SCANNED_PER_LOOKUP", 3)
    rng = np.random.default_rng(3)
    async with Store.open(sqlite_url) as store:
        buffer = await store.buffer("math", seed=7, indexed_tags="level", record_draws=False)
        model = SamplingModel(buffer, 50)
        await model.put(
            [
                GroupSpec(f"g{i}", "gsm8k", float(10 ** rng.uniform(-1, 1)), i % 10, i)
                for i in range(50)
            ]
        )
        for _ in range(200):
            await model.draw(1, 2, policy, tagged(4))
            await model.draw(1, 23, policy, EVERYTHING)
        assert 40 < len(looked_up) < 190, len(looked_up)
        model.check()


Change = Callable[[Buffer], Any]
CHANGES: dict[str, Change] = {
    "replace": lambda b: b.put(group("g0", tags={"level": "new"}), on_duplicate="replace"),
    "renew": lambda b: b.put(group("g1", tags={"level": 7}), on_duplicate="renew"),
    "update": lambda b: b.update(uids=["g2", "g3"], tags={"level": "new", "x": 1}),
    "update other": lambda b: b.update(uids=["g2", "g3"], tags={"x": 1}),
    "update to nothing": lambda b: b.update(uids=["g2", "g3"], tags={"level": None}),
    "delete": lambda b: b.delete(uids=["g4"]),
    "archive": lambda b: b.update(uids=["g5"], status="archived"),
    "open": lambda b: b.open_group("gsm8k", "open", 2, tags={"level": "new"}),
}


@pytest.mark.parametrize(
    ("engine_name", "change"),
    in_turn(pytest.param(change, id=name) for name, change in CHANGES.items()),
)
async def test_changes_of_tags_update_the_index(store: Store, change: Change) -> None:
    """The fixture compares tags and index when the store is closed."""
    buffer = await store.buffer("math", indexed_tags=["level"])
    await buffer.put([group(f"g{i}", tags={"level": "old", "x": 0}) for i in range(6)])
    await change(buffer)
    for value in ("old", "new", 7):
        groups = await buffer.find()
        expected = sum(one.tags.get("level") == value for one in groups)
        assert await buffer.count(where=level == value) == expected


async def test_evicted_groups_are_removed_from_the_index(store: Store, url: str) -> None:
    full = {"capacity": rdb.Capacity(groups=3), "on_evict": "delete"}
    buffer = await store.buffer("math", indexed_tags=["level"], **full)  # type: ignore[arg-type]
    for i in range(6):
        await buffer.put(group(tags={"level": i}))
    assert await number_of(url, schema.group_tag) == 3


async def test_an_index_is_filled_while_others_write(
    store: Store, other: Store, url: str, looked_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "CHUNK", 4)
    buffer = await store.buffer("math")
    await (await store.buffer("neighbour")).put([group(tags={"level": "old"}) for _ in range(5)])
    await buffer.put([group(f"g{i}", tags={"level": "old"}) for i in range(30)])
    theirs = await other.buffer("math")
    continue_indexing, steps = index.continue_indexing, []

    def recorded(locked: Any) -> None:
        continue_indexing(locked)
        steps.append(dict(locked.row.pending_tags))

    monkeypatch.setattr(index, "continue_indexing", recorded)
    original = buffer._write

    async def write(*arguments: Any, **more: Any) -> Any:
        done = await original(*arguments, **more)
        if steps:
            await meanwhile(len(steps))
        return done

    async def meanwhile(step: int) -> None:
        await theirs.put(group(f"new-{step}", tags={"level": "old"}))
        await theirs.delete(uids=[f"g{3 * step}"])
        await theirs.update(uids=[f"g{3 * step + 1}", f"new-{step}"], tags={"level": "new"})
        groups = await theirs.find()
        for value in ("old", "new"):
            expected = sum(one.tags["level"] == value for one in groups)
            assert await theirs.count(where=level == value) == expected
        assert bool(looked_up) == (not steps[-1]), "the index was used before it was complete"

    monkeypatch.setattr(buffer, "_write", write)
    await buffer.update_settings(indexed_tags=["level"])
    assert len(steps) > 5
    assert not steps[-1]
    await theirs.count(where=level == "new")
    assert looked_up
    monkeypatch.setattr(buffer, "_write", original)
    await buffer.update_settings(indexed_tags=[])
    assert await number_of(url, schema.group_tag) == 0


async def test_interrupted_indexing_resumes(
    store: Store, url: str, looked_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "CHUNK", 4)
    buffer = await store.buffer("math")
    await buffer.put([group(tags={"level": "old", "n": 1}) for _ in range(10)])

    async def end_after(steps: int, **changes: Any) -> None:
        continue_indexing = index.continue_indexing
        left = iter(range(steps))

        def failing(locked: Any) -> None:
            if next(left, None) is None:
                raise RuntimeError("interrupted")
            continue_indexing(locked)

        with monkeypatch.context() as patch:
            patch.setattr(index, "continue_indexing", failing)
            with pytest.raises(RuntimeError, match="interrupted"):
                await buffer.update_settings(**changes)

    count = partial(buffer.count, where=level == "old")
    await end_after(1, indexed_tags=["level"])
    assert (await count(), looked_up) == (10, [])
    await end_after(1, indexed_tags=["level", "n"])  # the second index starts at the newest group
    assert (await count(), looked_up) == (10, [])
    assert await number_of(url, schema.group_tag) == 8
    await end_after(0, indexed_tags=["n"])  # "level" must be emptied, "n" must be filled
    assert (await count(), looked_up) == (10, [])
    assert (await store.buffer("math"))._row.pending_tags  # opening a buffer does not resume it
    buffer = await store.buffer("math", indexed_tags=["n"])
    assert not buffer._row.pending_tags
    assert await number_of(url, schema.group_tag) == 10
    assert (await count(), looked_up) == (10, [])
    assert (await buffer.count(where=n == 1), len(looked_up)) == (10, 1)


def test_a_range_keeps_its_bounds() -> None:
    """A rounded number, or the prefix of a text, can belong to smaller and to larger values."""
    for compare in (operator.lt, operator.gt):
        (lookup,) = lookups_in(checked(compare(level, 2**53 + 1)), {"level"})
        assert "=" in str(lookup.condition)
