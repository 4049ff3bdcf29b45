"""`ReplayDataset`: batches of ranks and workers that share a buffer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.utils.data import DataLoader

from replaydb import (
    Batch,
    Fifo,
    GroupStatus,
    InvalidInputError,
    NotEnoughGroupsError,
    UnknownBufferError,
    blocking,
    col,
)
from replaydb.batch import PaddedBatch
from replaydb.training.dataset import ReplayDataset
from support.engines import postgresql_nightly
from support.groups import groups

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def ids(batch: Batch) -> list[int]:
    return batch.ids


def padded(batch: Batch) -> PaddedBatch:
    return batch.padded(0)


@pytest.fixture
def stored(url: str) -> list[int]:
    """Twelve groups."""
    with blocking.Store.open(url) as store:
        return store.buffer("math").put(groups(12))


def dataset(url: str, **options: Any) -> ReplayDataset:
    given: dict[str, Any] = {"batch_size": 2, "collate": ids}
    return ReplayDataset(url=url, buffer="math", **given | options)


@postgresql_nightly
def test_one_process(url: str, stored: list[int]) -> None:
    found = list(dataset(url, num_steps=3, shard="modulo"))
    assert found == [stored[:2]] * 3
    assert list(dataset(url, num_steps=2)) == [stored[:2], stored[2:4]]
    with blocking.Store.open(url) as store:
        assert store.buffer("math").count(statuses=GroupStatus.ARCHIVED) == 4


def test_tensors_come_through_a_data_loader(url: str, stored: list[int]) -> None:
    loader = DataLoader(dataset(url, num_steps=2, collate=padded), batch_size=None)
    (first, second) = list(loader)
    assert first.token_ids.shape == (4, 5)
    assert first.group_ids.tolist() == [stored[0], stored[0], stored[1], stored[1]]
    assert second.group_ids.tolist() == [stored[2], stored[2], stored[3], stored[3]]


@postgresql_nightly
@pytest.mark.parametrize("shard", ["lease", "modulo"])
def test_batches_below_the_full_size(url: str, stored: list[int], shard: str) -> None:
    few = dataset(url, batch_size=99, at_least=5, timeout=0, num_steps=1, shard=shard)
    assert list(few) == [stored]
    with pytest.raises(NotEnoughGroupsError):
        list(dataset(url, batch_size=99, at_least=13, timeout=0, num_steps=1))
    with pytest.raises(InvalidInputError, match="at_least"):
        dataset(url, at_least=3)


@postgresql_nightly
def test_leases_keep_workers_apart(url: str, stored: list[int]) -> None:
    loader = DataLoader(
        dataset(url, num_steps=3), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    found = [one for batch in loader for one in batch]
    assert sorted(found) == stored
    with blocking.Store.open(url) as store:
        assert store.buffer("math").count(statuses=GroupStatus.ARCHIVED) == 12


@postgresql_nightly
@pytest.mark.parametrize(("num_workers", "ahead"), [(0, 0), (2, 4)])
def test_only_workers_ack_batches_ahead_of_the_trainer(
    url: str, stored: list[int], num_workers: int, ahead: int
) -> None:
    """At most as many as a DataLoader prefetches, if the trainer stops early."""
    options: dict[str, Any] = {}
    if num_workers:
        options = {"num_workers": num_workers, "multiprocessing_context": "fork"}
    batches = iter(DataLoader(dataset(url, batch_size=1), batch_size=None, **options))
    seen = {one for _ in range(3) for one in next(batches)}
    del batches
    with blocking.Store.open(url) as store:
        acked = store.buffer("math").find(statuses=GroupStatus.ARCHIVED)
        assert len({one.id for one in acked} - seen) <= ahead
        assert store.buffer("math").leases() == []


def test_workers_of_ranks_have_their_own_shards(url: str, stored: list[int]) -> None:
    found: list[list[int]] = []
    for rank in range(2):
        one = dataset(url, shard="modulo", num_steps=1, batch_size=3, rank=rank, world_size=2)
        found += DataLoader(one, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert [len({i % 4 for i in batch}) for batch in found] == [1, 1, 1, 1]
    assert sorted(i for batch in found for i in batch) == stored


@postgresql_nightly
def test_other_filters_apply_within_a_shard(url: str, stored: list[int]) -> None:
    options = {"shard": "modulo", "num_steps": 1, "where": col.id > stored[5]}
    found = [list(dataset(url, rank=rank, world_size=2, **options)) for rank in range(2)]
    mine = [[i for i in stored[6:] if i % 2 == rank][:2] for rank in range(2)]
    assert found == [[mine[0]], [mine[1]]]


def test_a_filter_goes_to_workers_that_are_spawned(url: str, stored: list[int]) -> None:
    where = (col.id > stored[5]) & (col.tags["level"].is_(None))
    sent = pickle.loads(pickle.dumps(dataset(url, num_steps=1, where=where)))  # noqa: S301
    assert list(sent) == [stored[6:8]]


@postgresql_nightly
def test_closing_the_iterator_releases_unused_groups(url: str, stored: list[int]) -> None:
    iterator = iter(dataset(url))
    next(iterator)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        assert buffer.leases() == []
        assert buffer.count(statuses=GroupStatus.ARCHIVED) == 2
        assert buffer.count(statuses=GroupStatus.COMPLETED) == 10


@postgresql_nightly
def test_iteration_resumes_from_a_state(url: str, stored: list[int]) -> None:
    first = dataset(url, shard="modulo", num_steps=5)
    assert first.state_dict() is None
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    assert state is not None
    assert state["step"] == 1
    iterator.close()  # type: ignore[attr-defined]
    again = dataset(url, shard="modulo", num_steps=5)
    again.load_state_dict(state)
    assert len(list(again)) == 4


def test_wrong_arguments(url: str) -> None:
    with pytest.raises(InvalidInputError, match="shard"):
        dataset(url, shard="rank")
    with pytest.raises(InvalidInputError, match="both rank and world_size"):
        dataset(url, rank=1)
    with pytest.raises(InvalidInputError, match="world_size"):
        dataset(url, rank=2, world_size=2)
    with pytest.raises(UnknownBufferError):
        list(dataset(url))
    assert dataset(url).policy == Fifo()


def test_a_data_loader_yields_batch_objects(url: str, stored: list[int]) -> None:
    """A DataLoader would convert a sequence to a list of its items."""
    loader = DataLoader(dataset(url, num_steps=1, collate=None), batch_size=None, pin_memory=False)
    (batch,) = list(loader)
    assert isinstance(batch, Batch)
    assert (batch.ids, batch.draw_id is None) == (stored[:2], False)
