"""Leases shared by four processes that `torch.distributed` connects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import replaydb as rdb
from replaydb import blocking
from replaydb.training.dataset import ReplayDataset
from replaydb.training.distributed import ShardedBuffer
from support import ranks as calls
from support.damage import damage
from support.groups import groups, long_group
from support.ranks import Ranks, running_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with running_ranks(4, tmp_path_factory.mktemp("ranks")) as running:
        yield running


@pytest.fixture
def buffer(url: str) -> Iterator[blocking.Buffer]:
    """A buffer of eight groups of 1 to 8 thousand tokens."""
    with blocking.Store.open(url, run="generator") as store:
        made = store.buffer("math")
        made.put([long_group(f"g{n}", 1000 * n) for n in range(1, 9)])
        yield made


def test_every_group_is_trained_on_by_one_rank(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    of_ranks = ranks.call(calls.train, url, [0, 1], 4, {})
    for at, step in enumerate(zip(*of_ranks, strict=True)):
        ids, versions, draws = zip(*step, strict=True)
        assert sorted(chain(*ids)) == [4 * at + n for n in range(1, 5)]
        assert versions == (at,) * 4
        assert len(set(draws)) == 1
    assert buffer.count(statuses="archived") == 8
    assert (buffer.refresh(), buffer.cursor("step")) == (2, 2)
    assert [(one.step, one.outcomes) for one in buffer.draws()] == [
        (1, ("acked",) * 4),
        (0, ("acked",) * 4),
    ]


def test_token_counts_are_balanced(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    found = ranks.call(calls.leave, url, 8)
    assert sorted(found) == [[1, 8], [2, 7], [3, 6], [4, 5]]
    assert buffer.count(statuses="archived") == 8


def test_groups_that_cannot_be_divided(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    for error in ranks.call(calls.train, url, [0], 6, {}):
        assert isinstance(error, rdb.InvalidInputError)
        assert str(error).startswith("num_shards: expected a divisor of 6 (or even=False)")
    assert buffer.count(statuses="completed") == 8
    assert {one.attempts for one in buffer.find()} == {0}
    found = ranks.call(calls.train, url, [0], 6, {"even": False})
    assert sorted(len(ids) for [(ids, _, _)] in found) == [1, 1, 2, 2]


def test_a_number_that_cannot_be_divided_is_refused_at_once(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    """It does not wait for the groups."""
    for error in ranks.call(calls.train, url, [0], 13, {"timeout": None}):
        assert isinstance(error, rdb.InvalidInputError)
        assert str(error).startswith("num_shards: expected a divisor of 13")
    buffer.delete([8])
    for error in ranks.call(calls.train, url, [0], 13, {"at_least": 6}):
        assert str(error).startswith("num_shards: expected a divisor of 7")
    assert buffer.leases() == []
    assert {one.attempts for one in buffer.find()} == {0}


def test_too_few_groups(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    for error in ranks.call(calls.train, url, [0], 12, {"timeout": 0}):
        assert isinstance(error, rdb.NotEnoughGroupsError)
        assert (error.wanted, error.available) == (12, 8)


def test_a_world_of_another_size_resumes_the_lease_of_its_step(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    """The groups of a step that was interrupted are trained on in the repeated step."""
    before = ranks.call(calls.abandon, url, 3)
    assert buffer.count(statuses="leased") == 8
    with blocking.Store.open(url, run="grpo") as store:
        alone = ShardedBuffer(store.buffer("math", create=False))
        with alone.lease(8, ttl=60, step=3, timeout=0) as lease:
            assert sorted(lease.batch.ids) == sorted(chain(*before))
            lease.ack(cursor={"step": 4})
        with pytest.raises(rdb.NotEnoughGroupsError), alone.lease(8, ttl=60, step=4, timeout=0):
            pass
    assert buffer.count(statuses="archived") == 8
    assert len(buffer.draws()) == 1


def test_a_lease_that_cannot_be_divided_is_released(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    before = buffer.lease(6, ttl=60, owner="grpo", step=0)
    of_ranks = ranks.call(calls.train, url, [0], 4, {})
    assert sorted(chain(*(ids for [(ids, _, _)] in of_ranks))) == [1, 2, 3, 4]
    assert {one.attempts for one in buffer.find()} == {0}
    with pytest.raises(rdb.LeaseExpiredError):
        before.extend()


def test_a_step_is_resumed_after_an_outage(
    url: str, buffer: blocking.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = buffer.lease(4, ttl=60, owner="grpo", step=0)

    def fail(self: blocking.Buffer) -> list[rdb.LeaseInfo]:
        raise rdb.DatabaseUnavailableError("the server is restarted")

    with blocking.Store.open(url, run="grpo") as store:
        alone = ShardedBuffer(store.buffer("math", create=False))
        with monkeypatch.context() as patch:
            patch.setattr(blocking.Buffer, "leases", fail)
            with pytest.raises(rdb.DatabaseUnavailableError), alone.lease(4, ttl=60, step=0):
                pass
        with alone.lease(4, ttl=60, step=0) as lease:
            assert lease.id == before.id


def test_other_leases_are_not_resumed(
    url: str, buffer: blocking.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.lease(2, ttl=60, owner="other", step=0)
    buffer.lease(2, ttl=60, owner="grpo", step=1)
    listed = []

    def leases(self: blocking.Buffer) -> list[rdb.LeaseInfo]:
        listed.append(self)
        return list_leases(self)

    list_leases = blocking.Buffer.leases
    monkeypatch.setattr(blocking.Buffer, "leases", leases)
    with blocking.Store.open(url, run="grpo") as store:
        alone = ShardedBuffer(store.buffer("math", create=False))
        for step, ids in ((0, [5, 6]), (2, [7, 8])):
            with alone.lease(2, ttl=60, step=step) as lease:
                assert lease.batch.ids == ids
    assert len(listed) == 1  # only for the first step after a start


def test_the_first_rank_nacks_a_step_that_fails(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    errors = ranks.call(calls.fail, url, 0)
    assert [str(one) for one in errors] == ["out of memory"] + ["another rank has failed"] * 3
    assert {one.status_reason for one in buffer.find([1, 2, 3, 4])} == {
        "RuntimeError: out of memory"
    }
    assert buffer.leases() == []


def test_damaged_groups_fail_on_all_ranks(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    asyncio.run(damage(url, 2))
    batches = []
    for error in ranks.call(calls.train, url, [0], 8, {}):
        assert isinstance(error, rdb.CorruptPayloadError)
        assert error.group_ids == (2,)
        batches.append(error.batch and error.batch.ids)
    assert sorted(batches, key=bool) == [None, None, None, [7]]  # of the rank that read it
    assert [one.id for one in buffer.find(statuses="failed")] == [2]
    assert {one.attempts for one in buffer.find()} == {0}
    assert buffer.leases() == []


def test_all_groups_are_damaged(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    """Nothing is left to release."""
    for one in (1, 2, 3, 4):
        asyncio.run(damage(url, one))
    for error in ranks.call(calls.train, url, [0], 4, {}):
        assert isinstance(error, rdb.CorruptPayloadError)
    assert buffer.leases() == []
    assert buffer.count(statuses="failed") == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [(calls.step_of_each, r"step: expected the same on all ranks, got \[0, 0, 1, 0\]"),
     (calls.ack_of_each, r"advance_policy: expected the same on all ranks, got \[0, 0, 1, 0\]")],
)  # fmt: skip
def test_ranks_that_do_not_agree(
    ranks: Ranks, buffer: blocking.Buffer, url: str, call: Any, message: str
) -> None:
    for error in ranks.call(call, url, [0, 0, 1, 0]):
        with pytest.raises(rdb.InvalidInputError, match=message):
            raise error
    assert (buffer.leases(), buffer.count(statuses="completed")) == ([], 8)
    assert buffer.refresh() == 0


@pytest.mark.parametrize("sampling", [0, 1])
def test_ranks_that_make_different_calls(
    ranks: Ranks, buffer: blocking.Buffer, url: str, sampling: int
) -> None:
    for error in ranks.call(calls.call_of_each, url, sampling):
        with pytest.raises(rdb.InvalidInputError, match="call: expected the same on all ranks"):
            raise error
    assert (buffer.leases(), buffer.draws()) == ([], [])


def test_a_lease_without_groups(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    """Its ack writes the cursor and the policy version."""
    buffer.delete(statuses="completed")
    found = ranks.call(calls.train, url, [0], 4, {"at_least": 0, "timeout": 0})
    assert found == [([([], 0, None)])] * 4
    assert (buffer.cursor("step"), buffer.refresh()) == (1, 1)


def test_damaged_groups_of_a_rank_that_cannot_write(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    asyncio.run(damage(url, 2))
    for error in ranks.call(calls.only_read, url, 8):
        assert isinstance(error, rdb.CorruptPayloadError)
    assert [one.id for one in buffer.find(statuses="failed")] == [2]
    assert buffer.leases() == []


def test_workers_know_the_rank_of_their_trainer(ranks: Ranks, url: str) -> None:
    assert ranks.call(calls.copied, url) == [(rank, 4) for rank in range(4)]


def test_ranks_of_a_mesh(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    """Two data parallel ranks of two tensor parallel ranks each."""
    found = ranks.call(calls.mesh, url, [0, 0, 1, 1], [2] * 4)
    assert found[0] == found[1] != found[2] == found[3]
    assert sorted(found[0] + found[2]) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("shards", "num_shards", "message"),
    [([0, 1, 1, 1], [2] * 4, "shard: expected each of 0 to 1 on equally many ranks, got"),
     ([0, 1, 2, 2], [4] * 4, "shard: expected each of 0 to 3 on equally many ranks, got"),
     ([0, 1, 2, 3], [4, 4, 4, 3], "shard: expected less than num_shards, 3, got 3"),
     ([0, 1, 2, 3], [4, 4, 4, 5], "num_shards: expected the same on all ranks"),
     ([0, 1, 2, -1], [4] * 4, "shard: expected an integer >= 0, got -1")],
)  # fmt: skip
def test_wrong_ranks(
    ranks: Ranks,
    buffer: blocking.Buffer,
    url: str,
    shards: list[int],
    num_shards: list[int],
    message: str,
) -> None:
    for error in ranks.call(calls.mesh, url, shards, num_shards):
        with pytest.raises(rdb.InvalidInputError, match=message):
            raise error
    assert buffer.draws() == []


def test_a_process_group_of_some_ranks(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    found = ranks.call(calls.subgroup, url)
    for error in found[:2]:  # they are not in the group
        assert isinstance(error, rdb.InvalidInputError)
        assert error.field == "group"
    assert sorted(found[2:]) == [[1, 4], [2, 3]]


def test_one_process_without_torch_distributed(url: str) -> None:
    with blocking.Store.open(url, run="grpo") as store:
        buffer = store.buffer("math")
        buffer.put(groups(4))
        alone = ShardedBuffer(buffer)
        assert repr(alone) == "ShardedBuffer('math', shard 0 of 1)"
        with alone.lease(4, ttl=60, step=0) as lease:
            assert repr(lease) == f"ShardedLease(id={lease.id}, step=0, ids=[1, 2, 3, 4])"
            with pytest.raises(rdb.InvalidInputError, match="advance_policy"):
                lease.ack(advance_policy=-1)
        assert lease.has_ended
        with pytest.raises(rdb.InvalidInputError, match="buffer: expected"):
            ShardedBuffer("math")  # type: ignore[arg-type]
        with pytest.raises(rdb.InvalidInputError, match="shard: expected both"):
            ShardedBuffer(buffer, shard=0)


def test_groups_that_others_replace(
    url: str, buffer: blocking.Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    with blocking.Store.open(url, run="grpo") as store:
        alone = ShardedBuffer(store.buffer("math", create=False))
        with alone.lease(4, ttl=60, step=0) as lease:
            buffer.put(long_group("g2", 10), on_duplicate="replace")
            assert lease.ack() == rdb.AckReport(settled=(1, 3, 4), gone=(2,))
        assert not caplog.records
        with alone.lease(2, ttl=60, step=1):
            buffer.put(long_group("g2", 20), on_duplicate="replace")
        assert f"groups 2 of lease {lease.id + 1} were" in caplog.text


def test_ranks_share_a_sample(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    found = ranks.call(calls.sample, url, 8, {"policy": rdb.Prioritized()})
    assert sorted(sorted(ids) for ids, *_ in found) == [[1, 8], [2, 7], [3, 6], [4, 5]]
    (draw,) = buffer.draws()
    assert (draw.step, draw.run_name, len(draw.group_ids)) == (5, "grpo", 8)
    weights = dict(zip(draw.group_ids, draw.weights, strict=True))
    for ids, draw_id, given in found:
        assert (draw_id, given) == (draw.id, [weights[one] for one in ids])
    assert {one.times_sampled for one in buffer.find()} == {1}


def test_samples_that_cannot_be_shared(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    def errors(n: int = 8) -> set[str]:
        found = ranks.call(calls.sample, url, n, {})
        assert {type(one) for one in found} == {rdb.InvalidInputError}
        return {str(one) for one in found}

    assert errors(6) == {"num_shards: expected a divisor of 6 (or even=False), got 4"}
    buffer.update_settings(max_times_sampled=1, archived_payload="drop")
    (error,) = errors()
    assert error.startswith("max_times_sampled: expected None to share a draw among ranks")
    buffer.update_settings(max_times_sampled=None, record_draws=False)
    assert errors() == {"record_draws: expected True to share a draw among ranks, got False"}
    assert buffer.draws() == []
    (error,) = {str(one) for one in ranks.call(calls.train, url, [0], 4, {})}
    assert error == "record_draws: expected True to share a draw among ranks, got False"
    buffer.update_settings(record_draws=True, keep_archived=rdb.Keep(seconds=1))
    buffer.update_settings(max_times_sampled=1, archived_payload="keep")
    (error,) = errors()
    assert error.startswith("max_times_sampled: expected None to share a draw among ranks")
    buffer.update_settings(keep_archived=None)
    found = ranks.call(calls.sample, url, 8, {})  # the draw archives what the ranks then read
    assert sorted(chain(*(ids for ids, _, _ in found))) == list(range(1, 9))
    assert buffer.count(statuses="archived") == 8


def test_a_damaged_group_of_a_sample_is_drawn_once(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    asyncio.run(damage(url, 2))
    for error in ranks.call(calls.sample, url, 4, {"policy": rdb.Fifo()}):
        assert isinstance(error, rdb.CorruptPayloadError)
        assert error.group_ids == (2,)
    assert [one.id for one in buffer.find(statuses="failed")] == [2]
    assert buffer.draws()[0].outcomes.count(rdb.DrawOutcome.LOST) == 1
    found = ranks.call(calls.sample, url, 4, {"policy": rdb.Fifo()})
    assert sorted(chain(*(ids for ids, _, _ in found))) == [1, 3, 4, 5]


@pytest.mark.parametrize("wrapper", ["DDP", pytest.param("FSDP2", marks=pytest.mark.nightly)])
def test_gradients_are_those_of_one_process(ranks: Ranks, sqlite_url: str, wrapper: str) -> None:
    """The code of docs/distributed.md, for groups of unequal sizes, and a rank without a group."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text("utf8")
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.S) if "backward" in one]
    with blocking.Store.open(sqlite_url, run="generator") as store:
        buffer = store.buffer("math")
        buffer.put([long_group(f"g{n}", n) for n in (2, 3, 13)])
        whole = rdb.Batch(buffer.get([1, 2, 3])).padded(pad_token_id=0)
        found = ranks.call(calls.gradients, sqlite_url, 3, wrapper, code)
    assert sorted(number for number, _ in found) == [0, 1, 1, 1]
    model = calls.new_model()
    calls.token_losses(model, whole)[whole.loss_mask].mean().backward()
    for _, of_rank in found:
        for name, parameter in model.named_parameters():
            expected = np.asarray(parameter.grad)
            np.testing.assert_allclose(of_rank[name], expected, rtol=1e-5, err_msg=name)


def test_samples_without_groups(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    assert ranks.call(calls.sample, url, 0, {}) == [([], None, [])] * 4
    sizes = [len(ids) for ids, *_ in ranks.call(calls.sample, url, 3, {"even": False})]
    assert sorted(sizes) == [0, 1, 1, 1]


def test_a_resumed_lease_has_the_current_policy_version(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    with blocking.Store.open(url, run="grpo") as store:
        there = store.buffer("math", create=False)
        there.lease(4, ttl=60, step=0, owner="grpo", load=False)
        alone = ShardedBuffer(there)
        buffer.advance_policy(6)
        with alone.lease(4, ttl=60, step=0) as lease:
            assert lease.policy_version == there.policy_version == 6


def test_values_that_cannot_be_stored_or_sent(
    ranks: Ranks, buffer: blocking.Buffer, url: str
) -> None:
    """No rank waits for another one."""
    for call in (calls.ack_a_function, calls.ack_an_array):
        for error in ranks.call(call, url, 2):
            assert isinstance(error, rdb.InvalidInputError)
            assert error.field == "cursor.a"
    assert buffer.cursor("a") is None


def test_ranks_of_different_buffers(ranks: Ranks, buffer: blocking.Buffer, url: str) -> None:
    with blocking.Store.open(url) as store:
        store.buffer("code")
    for error in ranks.call(calls.open_each, url, ["math", "code", "math", "math"]):
        with pytest.raises(rdb.InvalidInputError, match="buffer: expected the same on all ranks"):
            raise error


def test_ranks_of_different_databases(
    ranks: Ranks, buffer: blocking.Buffer, url: str, tmp_path: Path
) -> None:
    """Their buffers have the same name and id."""
    other = f"sqlite:///{tmp_path}/other.db"
    with blocking.Store.open(other) as store:
        assert store.buffer("math").id == buffer.id
    pattern = (
        r"database: expected the same on all ranks, got \['one whose buffer was created at .*'\] "
        "on ranks 0 to 3"
    )
    for error in ranks.call(calls.open_stores, [url, url, other, url]):
        with pytest.raises(rdb.InvalidInputError, match=pattern):
            raise error


DIFFERENT: list[tuple[str, Any, str]] = [
    ("n", 8, r"\[4, 4, 8, 4\] on ranks 0 to 3"),
    ("n", {"gsm8k": 4, "code": 4}, "tasks: expected None if n has a number per task"),
    ("policy", rdb.Lifo(), r"'Lifo\(\)'"),
    ("tasks", "code", r"\['code'\]"),
    ("max_staleness", 3, r"\[None, None, 3, None\]"),
    ("runs", ["b", "a"], r"\['a', 'b'\]"),
    ("even", False, r"\[True, True, False, True\]"),
    ("timeout", -1, "expected a finite number >= 0"),
    ("where", "reward_std > 0", "expected an expression over replaydb.col"),
]
ONLY_LEASES: list[tuple[str, Any, str]] = [
    ("ttl", 30, r"\[60.0, 60.0, 30.0, 60.0\]"),
    ("ttl", -1, "expected a"),
    ("at_least", 2, r"\[4, 4, 2, 4\]"),
]


@pytest.mark.parametrize("call", ["lease", "sample"])
def test_ranks_with_other_arguments(
    ranks: Ranks, buffer: blocking.Buffer, url: str, call: str
) -> None:
    for name, value, message in DIFFERENT + (ONLY_LEASES if call == "lease" else []):
        options = [{}, {}, {name: value}, {}]
        for error in ranks.call(calls.options_of_each, url, call, options):
            assert isinstance(error, rdb.InvalidInputError), (name, error)
            assert re.search(message, str(error)), str(error)
            assert message.startswith("tasks:") or error.field == name
    assert (buffer.leases(), buffer.draws()) == ([], [])
    # A condition or a timeout may depend on the clock. Those of the first rank count.
    options = [
        {"where": rdb.col.num_tokens > 4500 - rank * 1000, "timeout": 60 - rank}
        for rank in range(4)
    ]
    found = ranks.call(calls.options_of_each, url, call, options)
    assert sorted(chain(*found)) == [5, 6, 7, 8]


def test_a_lease_of_ranks_is_entered_once(url: str) -> None:
    with blocking.Store.open(url, run="grpo") as store:
        buffer = store.buffer("math")
        buffer.put(groups(2))
        block = ShardedBuffer(buffer).lease(2, ttl=60, step=0)
        message = "lease: expected a new ShardedBuffer.lease for each block, got the same"
        with block:
            with pytest.raises(rdb.InvalidInputError, match=message):
                block.__enter__()
            assert buffer.count(statuses="leased") == 2
        with pytest.raises(rdb.InvalidInputError, match=message), block:
            pass
        assert buffer.count(statuses="archived") == 2


@pytest.mark.parametrize("shard", ["batch", "step"])
def test_a_dataset_divides_each_batch(
    ranks: Ranks, buffer: blocking.Buffer, url: str, shard: str
) -> None:
    options = {"batch_size": 4, "shard": shard, "num_steps": 2, "timeout": 5.0}
    found = ranks.call(calls.iterate, url, options)
    for at, parts in enumerate(zip(*found, strict=True)):
        ids = [1, 2, 3, 4] if shard == "batch" or at == 0 else [5, 6, 7, 8]
        assert sorted(chain(*parts)) == ids
    assert [one.step for one in buffer.draws()] == [1, 0]
    assert buffer.count(statuses="archived") == (8 if shard == "step" else 0)


@pytest.mark.parametrize("shard", ["batch", "step"])
def test_a_dataset_of_shared_batches_resumes(buffer: blocking.Buffer, url: str, shard: Any) -> None:
    options: dict[str, Any] = {
        "url": url, "buffer": "math", "batch_size": 2, "shard": shard, "num_steps": 3,
        "collate": calls.ids_of, "run": "grpo",
    }  # fmt: skip
    first = ReplayDataset(**options)
    assert first.state_dict() is None
    iterator = iter(first)
    assert next(iterator) == [1, 2]
    assert first.state_dict() == {"step": 1, "draws": []}
    if shard == "step":
        assert first.lease is not None
        first.lease.ack(cursor={"step": 1}, advance_policy=1)
    state = first.state_dict()
    for wrong in ({}, [1], {"step": "1", "draws": []}):
        first.load_state_dict(wrong)  # type: ignore[arg-type]
        with pytest.raises(rdb.InvalidInputError, match="state"):
            next(iter(first))
    iterator.close()  # type: ignore[attr-defined]
    again = ReplayDataset(**options)
    again.load_state_dict(state)
    assert list(again) == ([[3, 4], [5, 6]] if shard == "step" else [[1, 2], [1, 2]])
    assert [one.step for one in buffer.draws()] == [2, 1, 0]
    assert again.state_dict() is None
    assert again.lease is None


def test_workers_cannot_share_a_batch(buffer: blocking.Buffer, url: str) -> None:
    dataset = ReplayDataset(url=url, buffer="math", batch_size=2, shard="step")
    with pytest.raises(rdb.NotSupportedError, match="num_workers must be 0 with shard='step'"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    with pytest.raises(rdb.InvalidInputError, match="at_least: expected None"):
        ReplayDataset(url=url, buffer="math", batch_size=2, shard="batch", at_least=1)
