"""open-instruct's table: behaviour of the original, corrected faults, and extensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replaydb as rdb
from integrations.open_instruct import processes
from integrations.open_instruct.upstream import MinSize, ProcessedResult, Uniform, processed
from replaydb import blocking
from replaydb.integrations.open_instruct import Table
from support.engines import both_engines
from support.workers import Worker, workers

Open = Callable[..., Table[ProcessedResult]]


@pytest.fixture
def table(url: str) -> Iterator[Open]:
    """Opens tables, which are shut down at the end of the test."""
    with ExitStack() as opened:

        def make(
            max_size: int = 100,
            sampler: Any = "fifo",
            remover: Any = "fifo",
            *more: Any,
            **named: Any,
        ) -> Table[ProcessedResult]:
            made = Table(max_size, sampler, remover, *more, url=url, kind=ProcessedResult, **named)
            opened.callback(made.shutdown)
            return made

        yield make


def insert(table: Table[ProcessedResult], *names: str, **fields: Any) -> None:
    for name in names:
        table.insert(name, processed(name), **fields)


def uids(batch: list[ProcessedResult] | None) -> list[str]:
    assert batch is not None
    return [str(one.result.prompt_id) for one in batch]


def test_an_item_is_used_once(table: Open) -> None:
    mine = table()
    insert(mine, "a", "b", "c")
    batch = mine.sample(2)
    assert batch == [processed("a"), processed("b")]
    assert len(mine) == 1
    assert uids(mine.sample(2)) == ["c"]
    assert len(mine) == 0


def test_an_item_is_used_max_times_sampled_times(table: Open) -> None:
    mine = table(100, "fifo", "fifo", 2)
    insert(mine, "a")
    assert uids(mine.sample(1)) == uids(mine.sample(1)) == ["a"]
    assert len(mine) == 0


def test_a_sample_of_zero_items(table: Open) -> None:
    mine = table()
    insert(mine, "a")
    assert mine.sample(0) == []
    assert len(mine) == 1


@pytest.mark.parametrize(
    ("sampler", "expected"), [("fifo", "a"), ("lifo", "c"), ("prioritized", "b")]
)
def test_samplers(table: Open, sampler: str, expected: str) -> None:
    mine = table(100, sampler)
    for name, priority in {"a": 0.0, "b": 1.0, "c": 0.0}.items():
        mine.insert(name, processed(name), priority)
    assert uids(mine.sample(1)) == [expected]


def test_the_uniform_sampler_takes_any(table: Open) -> None:
    mine = table(100, Uniform(), Uniform(), 1000)
    insert(mine, "a", "b", "c")
    assert {uids(mine.sample(1))[0] for _ in range(60)} == {"a", "b", "c"}


@pytest.mark.parametrize(("remover", "left"), [("fifo", "bc"), ("lifo", "ac"), ("uniform", None)])
def test_removers(table: Open, remover: str, left: str | None) -> None:
    mine = table(2, "fifo", remover)
    insert(mine, "a", "b", "c")
    found = uids(mine.sample(3))
    assert len(found) == 2
    assert found == list(left or found)


def test_inserting_a_key_again_renews_it(table: Open) -> None:
    mine = table()
    insert(mine, "a", "b")
    mine.insert("a", processed("a", (0.5, 0.25)))
    assert len(mine) == 2
    assert mine.sample(2) == [processed("b"), processed("a", (0.5, 0.25))]
    insert(mine, "a")  # it was used up
    assert uids(mine.sample(1)) == ["a"]


@pytest.mark.parametrize("limiter", [MinSize(2), rdb.MinSize(2)])
def test_samples_wait_for_the_limiter(table: Open, limiter: Any) -> None:
    mine = table(100, "fifo", "fifo", 1, limiter)
    insert(mine, "a")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(mine.sample, 5)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        insert(mine, "b")
        assert uids(waiting.result(60)) == ["a", "b"]


def test_shutdown_ends_waiting_samples(table: Open) -> None:
    mine = table()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(mine.sample, 1) for _ in range(3)]
        mine.shutdown()
        assert [one.result(60) for one in waiting] == [None, None, None]
    assert mine.is_shutdown
    assert mine.sample(1) is None
    mine.shutdown()
    with pytest.raises(rdb.StoreClosedError):
        insert(mine, "a")
    again = table()
    assert not again.is_shutdown
    assert len(again) == 0


def test_the_prioritized_remover_keeps_the_best(table: Open) -> None:
    mine = table(2, "fifo", "prioritized")
    for name, priority in {"best": 9.0, "worst": 1.0, "good": 5.0, "bad": 2.0}.items():
        mine.insert(name, processed(name), priority)
    assert uids(mine.sample(4)) == ["best", "good"]


def test_items_of_priority_zero_are_sampled_last(table: Open) -> None:
    mine = table(100, "prioritized")
    insert(mine, "a", "b", "c", priority=0.0)
    insert(mine, "d", priority=1.0)
    assert sorted(uids(mine.sample(3)))[-1] == "d"
    assert len(mine) == 1


def test_a_limiter_above_capacity_is_refused(table: Open, url: str) -> None:
    with pytest.raises(rdb.InvalidSettingsError, match="waits for 3 groups, but capacity holds 2"):
        table(2, "fifo", "fifo", 1, MinSize(3))
    with blocking.Store.open(url) as store:
        assert store.buffers() == []


def test_equal_rewards_have_no_variance(table: Open) -> None:
    mine = table()
    equal = (0.1, 0.1, 0.1)
    assert np.std(equal) != 0
    mine.insert("equal", processed("equal", equal))
    insert(mine, "mixed")
    assert uids(mine.sample(2, where=rdb.col.reward_std > 0)) == ["mixed"]


def test_metrics_separate_generated_and_replayed(table: Open) -> None:
    mine = table(100, "fifo", "fifo", 2)
    mine.insert("old", processed("old", (1.0, 0.0)))
    mine.sample(1, step=0)
    mine.insert("new", processed("new", (1.0, 1.0)))
    mine.sample(1, step=1)
    numbers = mine.buffer.metrics(draws=2)
    assert numbers["gen/groups"] == 2
    assert numbers["gen/recent_groups"] == 1
    assert numbers["gen/reward_mean"] == 1.0
    assert numbers["train/reward_mean"] == numbers["replay/reward_mean"] == 0.5


def test_items_older_than_max_age_expire(table: Open) -> None:
    mine = table(max_age=2, run="a")
    for step in (3, 4, 5):
        mine.insert(f"of {step}", processed(f"of {step}", model_step=step))
    mine.insert("of unknown", processed("of unknown"))
    assert mine.buffer.advance_policy(6) == 1  # 6 - 3 > 2
    assert uids(mine.sample(4)) == ["of 4", "of 5", "of unknown"]
    mine.insert("too late", processed("too late", model_step=3))
    assert len(mine) == 0


def test_threads_share_a_table(table: Open) -> None:
    mine = table()
    names = [f"{k}-{i}" for k in range(2) for i in range(20)]

    def take() -> list[str]:
        found: list[str] = []
        while (batch := mine.sample(3)) is not None:
            found += uids(batch)
        return found

    with ThreadPoolExecutor() as pool:
        consumers = [pool.submit(take) for _ in range(2)]
        producers = [pool.submit(insert, mine, *names[k::2]) for k in range(2)]
        for producer in producers:
            producer.result(60)
        assert mine.buffer.wait_until(fewer_than=1, statuses="completed", timeout=60)
        mine.shutdown()
        found = [name for one in consumers for name in one.result(60)]
    assert sorted(found) == sorted(names)


@both_engines
async def test_processes_share_a_table(url: str, tmp_path: Path) -> None:
    names = [f"prompt-{i}" for i in range(30)]
    mine = processes.table(url)
    insert(mine, *names)
    logs = [tmp_path / f"took-{k}" for k in range(2)]
    with workers(*(Worker(processes.consume, url, 5, str(log)) for log in logs)) as crew:
        assert [await one.ended() for one in crew] == [0, 0]
    assert sorted(" ".join(log.read_text() for log in logs).split()) == sorted(names)
    assert len(mine) == 0
    mine.shutdown()


async def test_a_trainer_is_killed(url: str) -> None:
    """Its items are still there, and so is the batch of the step in progress."""
    with workers(Worker(processes.die_training, url, 5)) as [trainer]:
        assert await trainer.ended() == -9
    mine = processes.table(url, run="after")
    [lost] = mine.buffer.draws(step=7)
    batch = [mine.converter.from_group(group) for group in mine.buffer.redraw(lost.id)]
    assert batch == [processed("prompt-0"), processed("prompt-1")]
    assert len(mine) == 3
    assert uids(mine.sample(9)) == ["prompt-2", "prompt-3", "prompt-4"]
    mine.shutdown()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"sampler": "best"}, "sampler: expected one of uniform, prioritized, fifo, lifo"),
        ({"remover": object()}, "remover: expected one of uniform, prioritized, fifo, lifo"),
        ({"rate_limiter": 3}, "rate_limiter: expected an object with a `min_size`, got 3"),
        ({"max_size": 0}, "Capacity.groups"),
        ({"max_times_sampled": 0}, "max_times_sampled"),
        ({"max_age": -1}, "max_staleness"),
    ],
)
def test_invalid_arguments_are_refused(
    table: Open, url: str, how: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected) as refused:
        table(**how)
    assert isinstance(refused.value, rdb.ReplayDBError)
    with blocking.Store.open(url) as store:
        assert store.buffers() == []


def test_a_refused_item_leaves_the_others(table: Open) -> None:
    mine = table()
    insert(mine, "a", "b")
    bad = processed("bad")
    bad.result.finish_reasons = ["stop"]
    with pytest.raises(rdb.InvalidInputError, match="finish_reasons"):
        mine.insert("bad", bad)
    assert uids(mine.sample(3)) == ["a", "b"]


def test_invalid_sample_sizes_are_refused(table: Open) -> None:
    mine = table()
    insert(mine, "a")
    for n in ("3", 1.5, -1, None):
        with pytest.raises(rdb.InvalidInputError, match="n: expected"):
            mine.sample(n)  # type: ignore[arg-type]
    assert len(mine) == 1


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"max_size": 2}, "capacity"),
        ({"remover": "lifo"}, "eviction"),
        ({"max_times_sampled": 2}, "max_times_sampled"),
        ({"rate_limiter": MinSize(3)}, "rate_limit"),
        ({"max_age": 3}, "max_staleness"),
    ],
)
def test_a_second_table_with_other_settings_is_refused(
    table: Open, how: dict[str, Any], field: str
) -> None:
    mine = table(max_age=4)
    insert(mine, "a", "b", "c")
    with pytest.raises(rdb.InvalidSettingsError, match=f"^{field}: the table 'table' has "):
        table(**{"max_age": 4} | how)
    assert len(table(sampler="lifo", max_age=4)) == len(mine) == 3


def test_invalid_priorities_are_refused(table: Open) -> None:
    mine = table()
    with pytest.raises(rdb.InvalidInputError, match="priority"):
        mine.insert("a", processed("a"), -1.0)
    assert len(mine) == 0
