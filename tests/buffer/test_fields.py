"""`fields`: which extras a call reads."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import delete, update

import replaydb as rdb
from replaydb import Batch, Buffer, Episode, EpisodeGroup, Fifo, Store, Turn, blocking
from replaydb.batch import PaddedBatch
from replaydb.database import migrations
from replaydb.database.tables.schema import payload
from replaydb.operations import verify
from replaydb.training.dataset import ReplayDataset
from replaydb.training.distributed import ShardedBuffer
from support.connections import transaction
from support.damage import damage

LAYOUTS = pytest.mark.parametrize("layout", ["inside", "outside"])
NAMES = ("top", "value", "image", "mask")

Read = Callable[[Buffer, Any], Awaitable[Batch]]


def stored_group(uid: str, *, turns: bool = False) -> EpisodeGroup:
    """Return a group with extras of 160 and 80 KB, and small ones, of tokens and of episodes."""
    rng = np.random.default_rng(len(uid))
    top = rng.standard_normal((100, 200)).astype(np.float32)
    episodes = []
    for i in range(2):
        if turns:
            first = Turn(prompt_ids=range(40), response_ids=range(60), token_extras={"top": top})
            second = Turn(parent=first, new_ids=[7], response_ids=[8, 9])
            episodes.append(Episode(turns=[first, second], reward=i, extras={"image": top}))
            continue
        episodes.append(
            Episode(
                prompt_ids=range(40),
                response_ids=range(60),
                reward=i,
                logprobs=np.full(60, -0.5),
                policy_version=np.arange(60),
                token_extras={"top": top, "value": np.arange(100.0)},
                extras={"image": rng.integers(0, 255, 80_000, np.uint8), "mask": np.ones(3)},
            )
        )
    return EpisodeGroup("t", episodes, group_uid=uid, extras={"mask": np.ones(2), "top": top})


async def _get(buffer: Buffer, fields: Any) -> Batch:
    return Batch(await buffer.get(uids=["a", "b"], fields=fields))


async def _sample(buffer: Buffer, fields: Any) -> Batch:
    return await buffer.sample(2, Fifo(), fields=fields)


async def _peek(buffer: Buffer, fields: Any) -> Batch:
    return await buffer.peek(2, Fifo(), fields=fields)


async def _redraw(buffer: Buffer, fields: Any) -> Batch:
    drawn = await buffer.sample(2, Fifo(), fields="value")
    assert drawn.draw_id is not None
    return await buffer.redraw(drawn.draw_id, fields=fields)


async def _lease(buffer: Buffer, fields: Any) -> Batch:
    lease = await buffer.lease(2, ttl=60, fields=fields)
    await lease.nack()
    return lease.batch


async def _open_lease(buffer: Buffer, fields: Any) -> Batch:
    lease = await buffer.lease(2, ttl=60, load=False)
    opened = await buffer.open_lease(lease.id, ttl=60, fields=fields)
    await opened.nack()
    return opened.batch


async def _read_lease(buffer: Buffer, fields: Any) -> Batch:
    lease = await buffer.lease(2, ttl=60, load=False)
    batch = await buffer.read_lease(lease.id, fields=fields)
    await lease.nack()
    return batch


async def _shard(buffer: Buffer, fields: Any) -> Batch:
    lease = await buffer.lease(2, ttl=60, load=False, fields=fields)
    batch = await lease.shard(0, 1)
    await lease.nack()
    return batch


async def _loader(buffer: Buffer, fields: Any) -> Batch:
    async with buffer.loader(2, Fifo(), fields=fields, num_steps=1) as loader:
        [batch] = [one async for one in loader]
    return batch


CALLS: list[Read] = [
    _get, _sample, _peek, _redraw, _lease, _open_lease, _read_lease, _shard, _loader,
]  # fmt: skip


def assert_same_tensors(one: PaddedBatch, other: PaddedBatch) -> None:
    torch.testing.assert_close(asdict(one), asdict(other), rtol=0, atol=0, equal_nan=True)


def extras_of(batch: Batch) -> set[str]:
    found = {name for group in batch for name in group.extras}
    for group in batch:
        for episode in group.episodes:
            found |= {*episode.extras, *episode.token_extras}
    return found


@LAYOUTS
@pytest.mark.parametrize("call", CALLS)
async def test_calls_return_only_these_extras(store: Store, layout: str, call: Read) -> None:
    buffer = await store.buffer("math")
    await buffer.put([stored_group("a"), stored_group("b")])
    whole = await call(buffer, None)
    assert extras_of(whole) == {*NAMES}
    assert [group.fields for group in whole] == [None, None]
    for fields in ((), "value", ("top", "mask"), ("image", "logprobs", "absent"), NAMES):
        part = await call(buffer, fields)
        named = {fields} if isinstance(fields, str) else {*fields}
        assert extras_of(part) == named & {*NAMES}
        assert [set(group.fields or ()) for group in part] == [named, named]
        assert_same_tensors(
            part.padded(0),
            whole.padded(0, fields=named & {*NAMES} | {"logprobs", "token_versions"}),
        )
        for read, group in zip(part, whole, strict=True):
            for name, values in read.extras.items():
                assert np.array_equal(values, group.extras[name])


@LAYOUTS
async def test_other_extras_are_not_read(store: Store, url: str, layout: str) -> None:
    """What is damaged and is not read harms nothing; what is read names the damage."""
    buffer = await store.buffer("math")
    [group_id] = await buffer.put(stored_group("a"))
    await damage(url, group_id, field="image")
    for fields in ((), "top", ("value", "mask", "top")):
        named = {fields} if isinstance(fields, str) else {*fields}
        assert extras_of(await buffer.sample(1, fields=fields)) == named
    with pytest.raises(rdb.CorruptPayloadError, match="extra 'image': checksum"):
        await buffer.get([group_id])
    with pytest.raises(rdb.CorruptPayloadError, match="extra 'image': checksum"):
        await buffer.get([group_id], fields="image")
    assert [len(await buffer.get([group_id], fields="top"))] == [1]
    await damage(url, group_id)
    with pytest.raises(rdb.CorruptPayloadError, match="checksum"):
        await buffer.get([group_id], fields=())


async def test_groups_that_lack_extras_cannot_be_put(store: Store) -> None:
    buffer = await store.buffer("math")
    await buffer.put(stored_group("a"))
    [part] = await buffer.get(uids=["a"], fields=NAMES)
    expected = "^fields: expected None, so that all extras of the group are read"
    with pytest.raises(rdb.InvalidInputError, match=expected):
        await buffer.put(part, on_duplicate="replace")
    with pytest.raises(rdb.InvalidInputError, match=expected):
        part.without_stale_episodes(0)
    for copied in (part.episodes, pickle.loads(pickle.dumps(part.episodes))):  # noqa: S301
        with pytest.raises(rdb.InvalidInputError, match=expected):
            await buffer.put(EpisodeGroup("t", copied))
    await buffer.open_group("t", "open", 2)
    with pytest.raises(rdb.InvalidInputError, match=r"^episode: expected one of which all extras"):
        await buffer.add_episode("open", part.episodes[0])
    [whole] = await buffer.get(uids=["a"])
    [group_id] = await buffer.put(whole, on_duplicate="replace")
    assert extras_of(Batch(await buffer.get([group_id]))) == {*NAMES}


@pytest.mark.parametrize("version", [1, 2])
async def test_extras_of_turns(own_url: str, version: int) -> None:
    """Extras of turns, and of the merged rows, in both formats."""
    await migrations.write_format(own_url, version)
    group = stored_group("a", turns=True)
    if version == 1:  # which does not know parents
        episodes = []
        for one in group.episodes:
            turns = [Turn(prompt_ids=turn.prompt_ids, response_ids=turn.response_ids,
                          token_extras=turn.token_extras) for turn in one.turns]  # fmt: skip
            episodes.append(Episode(turns=turns, reward=one.reward, extras=one.extras))
        group = EpisodeGroup("t", episodes, group_uid="a", extras=group.extras)
    async with Store.open(own_url) as store:
        buffer = await store.buffer("math")
        await buffer.put(group)
        whole = await buffer.sample(1)
        for fields in ("top", "image", ()):
            part = await buffer.sample(1, fields=fields)
            assert_same_tensors(part.padded(0), whole.padded(0, fields=fields))
            top = fields == "top"
            assert [bool(turn.token_extras) for turn in part[0].episodes[0].turns] == [top, False]


def test_trainers_and_ranks(url: str) -> None:
    common: dict[str, Any] = {"url": url, "buffer": "math", "batch_size": 2, "timeout": 0}
    with blocking.Store.open(url) as store:
        buffer = store.buffer("math")
        buffer.put([stored_group("a"), stored_group("b")])
        for shard in ("batch", "modulo"):
            data = ReplayDataset(**common, fields="image", shard=shard, num_steps=1)
            assert [extras_of(batch) for batch in data] == [{"image"}]
        shared = ShardedBuffer(buffer)
        assert extras_of(shared.sample(2, step=0, fields=["value"], timeout=0)) == {"value"}
        with shared.lease(2, ttl=60, step=0, fields="mask", timeout=0) as lease:
            assert extras_of(lease.batch) == {"mask"}
    with pytest.raises(rdb.InvalidInputError, match=r"^fields: "):
        ReplayDataset(**common, fields=3)  # type: ignore[arg-type]


async def test_a_missing_extra_is_damage(store: Store, url: str) -> None:
    """A row of a large extra that was deleted or renamed is no group without this extra."""
    buffer = await store.buffer("math")
    ids = await buffer.put([stored_group("a"), stored_group("b")])
    mine = payload.c.field == "image"
    async with transaction(url) as connection:
        gone = delete(payload).where(mine, payload.c.group_id == ids[0])
        await connection.execute(gone)
        renamed = update(payload).where(mine).values(field="other")
        await connection.execute(renamed)
    assert extras_of(Batch(await buffer.get(ids, fields="top"))) == {"top"}
    with pytest.raises(rdb.CorruptPayloadError, match="extra 'image' is missing") as caught:
        await buffer.get(ids, fields="image")
    assert list(caught.value.group_ids) == ids
    with pytest.raises(rdb.CorruptPayloadError, match="extra 'image' is missing"):
        await buffer.get(ids[:1])
    found = {(one.kind, one.where.partition(",")[0]) for one in (await verify(store)).problems}
    assert ("payload", f"group {ids[0]}") in found
    await buffer.delete(ids)


async def test_versions_of_tokens_are_always_read(store: Store) -> None:
    """Those of the tokens of an episode with turns, too, which are no extra."""
    turn = Turn(prompt_ids=range(20_000), response_ids=[1])
    one = Episode(turns=[turn], policy_version=np.arange(20_001), reward=1.0)
    buffer = await store.buffer("math")
    await buffer.put(EpisodeGroup("t", [one], group_uid="a"))
    [group] = await buffer.get(uids=["a"], fields=())
    assert group.episodes == (one,)
