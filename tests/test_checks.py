"""One rule for each kind of argument, whatever call it is given to and on either engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import replaydb as rdb
from replaydb import Buffer, BufferSettings, Store
from replaydb.training.dataset import ReplayDataset
from support.groups import group


class Boaster(int):
    """An integer that fits everywhere, as it says."""

    def __le__(self, other: object) -> bool:
        return True

    __ge__ = __le__


#: What is no number, no whole number, no name.
NUMBERS: list[Any] = ["1.5", None, True, np.True_, float("nan"), -1.0, 10**400, [1.0], b"1", 1j]
INTEGERS: list[Any] = [
    "1",
    1.0,
    np.float64(1),
    True,
    np.True_,
    -1,
    2**63,
    Boaster(2**70),
    [1],
    b"1",
]
NOTHING: list[Any] = [3, np.array(3), torch.tensor(3), rdb.col.tags["a"] == "b"]  # no several
FLAGS: list[Any] = [None, 0, 1, "no", np.zeros(2), torch.zeros(2), rdb.col.id > 0]
NAMES: list[Any] = ["", "a" * 256, "a\0", "\ud800", 3, b"a"]

GIVEN: list[tuple[str, Callable[[Any], Any], type[Exception], list[Any]]] = [
    ("weight", lambda it: rdb.Share(it), rdb.InvalidInputError, NUMBERS),
    ("shares['a']", lambda it: rdb.Mix({"a": it}), rdb.InvalidInputError, NUMBERS),
    ("minimum", lambda it: rdb.Share(1, minimum=it), rdb.InvalidInputError, INTEGERS),
    ("beta", lambda it: rdb.Prioritized(it), rdb.InvalidInputError, NUMBERS),
    ("priority", lambda it: group(priority=it), rdb.InvalidInputError, NUMBERS),
    ("Capacity.groups", lambda it: rdb.Capacity(groups=it), rdb.InvalidSettingsError, INTEGERS),
    ("MinSize.size", lambda it: rdb.MinSize(it), rdb.InvalidSettingsError, INTEGERS),
    ("Queue.size", lambda it: rdb.Queue(it), rdb.InvalidSettingsError, INTEGERS),
    (
        "SamplesPerInsert.ratio",
        lambda it: rdb.SamplesPerInsert(it, 1, 9.0),
        rdb.InvalidSettingsError,
        NUMBERS,
    ),
    (
        "max_staleness",
        lambda it: BufferSettings(max_staleness=it),
        rdb.InvalidSettingsError,
        INTEGERS,
    ),
    (
        "priority_exponent",
        lambda it: BufferSettings(priority_exponent=it),
        rdb.InvalidSettingsError,
        NUMBERS,
    ),
    (
        "time_to_live",
        lambda it: BufferSettings(time_to_live=it),
        rdb.InvalidSettingsError,
        [it for it in NUMBERS if it is not None],
    ),
]


@pytest.mark.parametrize(
    ("field", "give", "error", "wrong"), GIVEN, ids=[field for field, *_ in GIVEN]
)
def test_what_is_of_another_kind_is_refused(
    field: str, give: Callable[[Any], Any], error: type[Exception], wrong: list[Any]
) -> None:
    for it in wrong:
        with pytest.raises(error) as caught:
            give(it)
        assert str(caught.value).startswith(f"{field}: expected "), it


async def test_what_is_of_another_kind_changes_nothing(
    store: Store, buffer: Buffer, url: str
) -> None:
    [one] = await buffer.put(group())
    other = await store.buffer("other")
    calls: list[tuple[str, Callable[[Any], Any], list[Any]]] = [
        ("priorities[0]", lambda it: buffer.update_priorities([one], [it]), NUMBERS),
        ("ids[0]", lambda it: buffer.update_priorities([it], [1.0]), INTEGERS),
        ("n", lambda it: buffer.sample(it), INTEGERS),
        ("timeout", lambda it: buffer.sample(1, timeout=it), [it for it in NUMBERS if it]),
        ("step", lambda it: buffer.sample(1, step=it), INTEGERS),
        ("cursor", lambda it: buffer.put(group(), cursor={it: 1}), NAMES),
        ("name", lambda it: buffer.cursor(it), NAMES),
        ("tasks", lambda it: buffer.count(tasks=[it]), NAMES),
        ("tasks", lambda it: buffer.count(tasks=it), NOTHING),
        ("statuses", lambda it: buffer.count(statuses=it), NOTHING),
        ("ids", lambda it: buffer.get(it), NOTHING),
        ("groups", lambda it: buffer.put(it), NOTHING),
        ("other", lambda it: buffer.copy_to(it), [buffer, np.array(3), torch.tensor(3), {}]),
        ("progress", lambda it: buffer.copy_to(other, progress=it), NOTHING),
        ("allow_partial", lambda it: buffer.sample(2, allow_partial=it), FLAGS),
        ("allow_partial", lambda it: buffer.peek(2, allow_partial=it), FLAGS),
        ("allow_partial", lambda it: buffer.lease(2, ttl=9, allow_partial=it), FLAGS),
        ("rewind", lambda it: buffer.advance_policy(0, rewind=it), FLAGS),
        ("take_over", lambda it: buffer.advance_policy(0, take_over=it), FLAGS),
        ("create", lambda it: store.buffer("new", create=it), FLAGS),
        ("read_only", lambda it: Store.open(url, read_only=it), FLAGS),
        ("migrate", lambda it: Store.open(url, migrate=it), FLAGS[1:]),
        ("durability", lambda it: Store.open(url, durability=it), [*NOTHING, np.zeros(2)]),
        ("lineage", lambda it: Store.open(url, lineage=it), [*NAMES, np.zeros(2)]),
    ]
    for field, call, wrong in calls:
        for it in wrong:
            with pytest.raises(rdb.InvalidInputError) as caught:
                await call(it)
            assert caught.value.field.startswith(field), it
    [stored] = await buffer.get([one])
    assert (stored.priority, stored.times_sampled) == (1.0, 0)
    assert await buffer.count() == 1
    assert await other.count() == 0
    assert len(await store.buffers()) == 2


async def test_scalars_of_numpy_are_numbers(store: Store, url: str) -> None:
    """They are kept as JSON, and handed to drivers that know none of them."""
    scalar: Any = np
    buffer = await store.buffer(
        "math",
        max_staleness={"gsm8k": scalar.int64(3)},
        priority_exponent=scalar.float32(0.5),
        seed=scalar.uint32(7),
        capacity=rdb.Capacity(groups=scalar.int64(5)),
        time_to_live=scalar.float64(600),
        max_attempts=scalar.int8(3),
        rate_limit=rdb.SamplesPerInsert(scalar.float32(2), scalar.int64(1), scalar.float64(40)),
        record_draws=scalar.True_,
    )
    async with Store.open(url) as other:
        assert (await other.buffer("math")).settings == buffer.settings
    tags = {"n": scalar.int64(3), "x": scalar.float32(0.5), "ok": scalar.True_}
    [one] = await buffer.put(
        group(tags=tags, version=0), priority=scalar.float32(2), cursor={"data": scalar.int64(4)}
    )
    assert await buffer.cursor("data") == 4
    mix = rdb.Mix({"gsm8k": scalar.float32(1)})
    batch = await buffer.sample(
        scalar.int64(1),
        mix,
        timeout=scalar.float32(0),
        step=scalar.int16(3),
        max_staleness=scalar.int64(3),
    )
    assert batch.groups[0].tags == {"n": 3, "x": 0.5, "ok": True}
    assert await buffer.update_priorities(np.array([one]), np.array([4], scalar.float32)) == 1
    async with buffer.lease(1, ttl=scalar.float64(60)) as lease:
        assert lease.batch.groups[0].priority == 4.0


def test_calls_that_wait_have_the_default_of_their_kind() -> None:
    """The table of docs/lifecycle.md: who answers at once, and who holds its caller back."""
    calls: dict[str, Callable[..., Any]] = {
        name: call
        for owner in (Buffer, Store)
        for name, call in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
    }
    calls["ReplayDataset"] = ReplayDataset
    found = {
        name: parameters["timeout"].default
        for name, call in calls.items()
        if "timeout" in (parameters := inspect.signature(call).parameters)
    }
    at_once = dict.fromkeys(["lease", "peek", "sample"], 0)
    backpressure = dict.fromkeys(["add_episode", "admission", "open_group", "put"])
    loops = dict.fromkeys(["ReplayDataset", "loader"])
    assert found == at_once | backpressure | loops | {"close": 60}
