"""Values of stored episodes and turns that arrive later."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal

import numpy as np
import pytest
from sqlalchemy import func, select, update

import replaydb as rdb
from replaydb import Annotation, Buffer, Episode, EpisodeGroup, GroupStatus, Store, Turn
from replaydb.database import migrations
from replaydb.database.tables import schema, views
from replaydb.operations import rewrite_payloads, verify
from support.clock import Clock
from support.connections import transaction
from support.groups import group
from support.invariants import check_invariants, number_of


def unscored(uid: str, number: int = 2) -> EpisodeGroup:
    """A group without rewards; its last episode has two turns."""
    first = Turn(uid=f"{uid}-0", prompt_ids=[1, 2], response_ids=[3], reward=0.25)
    turns = [first, Turn(uid=f"{uid}-1", parent=first, new_ids=[4], response_ids=[5])]
    plain = [
        Episode(prompt_ids=[1, 2], response_ids=[3], metadata={"a": 1, "b": 2})
        for _ in range(number - 1)
    ]
    return EpisodeGroup("gsm8k", [*plain, Episode(turns=turns, reward=None)], group_uid=uid)


async def history(url: str) -> list[Any]:
    async with transaction(url) as connection:
        of = views.annotation_history.table
        order = (of.c.group_id, of.c.number, of.c.name)
        rows = await connection.execute(select(of).order_by(*order))
        return list(rows)


@pytest.mark.parametrize("layout", ["inside", "outside"])
async def test_values_are_in_everything_that_is_read(store: Store, url: str, layout: str) -> None:
    buffer = await store.buffer("math")
    [group_id] = await buffer.put(unscored("g", 3))
    etags = await buffer.annotate(
        [
            Annotation("g", 0, reward=1, advantage=0.5, metadata={"b": "\0\ud800", "c": [None]}),
            Annotation("g", 1, reward=0.0),
            Annotation("g", 2, turn="g-1", reward=2.0, metadata={"tool": "python"}),
            Annotation("g", 2, turn=0, reward=-1.0),
        ],
        author="judge",
        policy_version=7,
    )
    [stored] = await buffer.sample(1)
    assert stored.rewards.tolist()[:2] == [1.0, 0.0]
    assert stored.episodes[0].advantage == 0.5
    assert stored.episodes[0].metadata == {"a": 1, "b": "\0\ud800", "c": [None]}
    assert [one.reward for one in stored.episodes[2].turns] == [-1.0, 2.0]
    assert stored.episodes[2].turns[1].metadata == {"tool": "python"}
    assert stored.episodes[2].reward == 0.25  # of the put: it does not follow from its turns
    assert etags == {"g": stored.etag} == {"g": f"{group_id}.0.1.3"}
    [info] = await buffer.find(uids="g")
    assert (info.etag, info.times_annotated) == (stored.etag, 1)
    assert info.reward_mean == pytest.approx(1.25 / 3)
    assert (info.reward_min, info.reward_max) == (0.0, 1.0)
    [first, *_] = await buffer.episodes(group_id)
    assert (first.reward, first.advantage) == (1.0, 0.5)
    batch = await buffer.sample(1)
    assert batch.padded(0).rewards[0].item() == 1.0
    assert await buffer.count(where=rdb.col.reward_max == 1.0) == 1
    rows = await history(url)
    found = [(row.position, row.turn, row.name, row.value, row.previous) for row in rows]
    assert sorted(found, key=str) == [
        (0, None, "advantage", 0.5, None),
        (0, None, "metadata", None, None),
        (0, None, "reward", 1.0, None),
        (1, None, "reward", 0.0, None),
        (2, 0, "reward", -1.0, 0.25),
        (2, 1, "metadata", None, None),
        (2, 1, "reward", 2.0, None),
    ]
    [changes, _] = [row.changes for row in rows if row.name == "metadata"]
    assert changes == {"b": {"from": 2, "to": "\0\ud800"}, "c": {"to": [None]}}
    assert {(row.author, row.policy_version) for row in rows} == {("judge", 7)}
    await check_invariants(url)
    assert (await verify(store)).problems == ()


async def test_a_repeated_call_changes_nothing(buffer: Buffer, url: str) -> None:
    await buffer.put(unscored("g"))
    one = Annotation("g", 0, reward=1.0, metadata={"x": 1.0})
    etags = await buffer.annotate(one)
    assert await buffer.annotate(one) == etags
    assert await number_of(url, schema.annotation) == 2
    # An integer is another JSON value than a float.
    await buffer.annotate(Annotation("g", 0, metadata={"x": 1}))
    assert await number_of(url, schema.annotation) == 3
    await buffer.annotate(Annotation("g", 0, reward=0.0))
    await buffer.annotate(Annotation("g", 0, reward=-0.0))
    assert await number_of(url, schema.annotation) == 4
    assert await buffer.annotate([]) == {}


async def test_a_later_score_keeps_the_earlier_one(buffer: Buffer, url: str) -> None:
    """Each draw keeps the rewards with which it was made."""
    await buffer.put([unscored("g"), unscored("other")])
    which = rdb.col.group_uid == "g"
    drawn = [await buffer.sample(1, where=which)]
    for reward, author in ((1.0, "first"), (0.5, "second")):
        values = {"by": author}
        await buffer.annotate(Annotation("g", 0, reward=reward, metadata=values), author=author)
        drawn.append(await buffer.sample(1, where=which))
    means = [record.reward_means for record in await buffer.draws()]
    assert means == [(0.375,), (0.625,), (0.25,)]
    for batch, reward in zip(drawn, (math.nan, 1.0, 0.5), strict=True):
        assert batch.draw_id is not None
        again = await buffer.redraw(batch.draw_id)
        np.testing.assert_equal(again[0].rewards, [reward, 0.25])
        assert again[0].episodes == batch[0].episodes
    rows = [row for row in await history(url) if row.name == "reward"]
    assert [(row.author, row.previous, row.value) for row in rows] == [
        ("first", None, 1.0), ("second", 1.0, 0.5),
    ]  # fmt: skip
    # The records stay when the content is replaced.
    await buffer.put(group("g"), on_duplicate="replace")
    assert [record.reward_means for record in await buffer.draws()] == means
    async with transaction(url) as connection:
        of = views.training_history.table.c
        found = await connection.execute(select(of.reward_mean).order_by(of.draw_id))
        assert list(found.scalars()) == [0.25, 0.625, 0.375]
    await check_invariants(url)


async def test_redraws_do_not_depend_on_the_clock(buffer: Buffer, clock: Clock) -> None:
    """Each draw has its own values also if the clock is set back between draws and annotations."""
    await buffer.put(unscored("g"))
    drawn = []
    for reward in (1.0, 2.0, 3.0):
        drawn.append(await buffer.sample(1))
        clock.jump(-60.0)
        await buffer.annotate(Annotation("g", 0, reward=reward))
        clock.jump(61.0)
    for batch, reward in zip(drawn, (math.nan, 1.0, 2.0), strict=True):
        assert batch.draw_id is not None
        [again] = await buffer.redraw(batch.draw_id)
        np.testing.assert_equal(again.rewards, [reward, 0.25])
    assert (await buffer.get(uids="g"))[0].rewards[0] == 3.0


async def test_no_update_is_lost(buffer: Buffer, other: Store) -> None:
    """Workers that add different values do not overwrite each other."""
    await buffer.put([unscored("a", 8), unscored("b", 8)])
    buffers = [buffer, await other.buffer("math")]
    calls = [
        buffers[i % 2].annotate(Annotation(uid, i, **values))
        for i in range(8)
        for uid in ("a", "b")
        for values in ({"reward": float(i)}, {"advantage": -float(i)}, {"metadata": {"i": i}})
    ]
    await asyncio.gather(*calls)
    for stored in await buffer.get(uids=["a", "b"]):
        assert stored.rewards.tolist() == list(range(8))
        assert [one.advantage for one in stored.episodes] == [-float(i) for i in range(8)]
        assert [one.metadata["i"] for one in stored.episodes] == list(range(8))
        assert stored.times_annotated == 24


async def test_only_if_nothing_has_changed(buffer: Buffer) -> None:
    await buffer.put([unscored("a"), unscored("b")])
    read = {one.group_uid: one.etag for one in await buffer.get(uids=["a", "b"])}
    new = [Annotation("a", 0, reward=1.0), Annotation("b", 0, reward=1.0)]
    await buffer.annotate(Annotation("b", 0, reward=0.5))
    with pytest.raises(rdb.ContentChangedError) as caught:
        await buffer.annotate(new, if_match=read)
    assert caught.value.group_uids == ("b",)
    assert [one.reward_mean for one in await buffer.find(uids=["a", "b"])] == [0.25, 0.375]
    read = {one.group_uid: one.etag for one in await buffer.find(uids=["a", "b"])}
    assert (await buffer.annotate(new, if_match=read)).keys() == {"a", "b"}
    hows: tuple[Literal["replace", "renew"], ...] = ("replace", "renew")
    for how in hows:
        [before] = await buffer.find(uids="a")
        await buffer.put(group("a"), on_duplicate=how)
        assert (await buffer.find(uids="a"))[0].etag != before.etag


@pytest.mark.parametrize("status", ["archived", "failed", "leased", "gone"])
async def test_groups_of_every_status(buffer: Buffer, url: str, status: str) -> None:
    await buffer.put(unscored("g"))
    if status == "leased":
        lease = await buffer.lease(1, ttl=60)
    elif status == "gone":
        await buffer.update_settings(archived_payload="drop")
        await buffer.update(uids="g", status="archived")
    else:
        await buffer.update(uids="g", status=status)
    await buffer.annotate(Annotation("g", 0, reward=1.0))
    [info] = await buffer.find(uids="g")
    assert info.reward_mean == 0.625
    if status == "gone":
        assert info.num_bytes == 0
        with pytest.raises(rdb.PayloadGoneError):
            await buffer.get(uids="g")
    else:
        assert (await buffer.get(uids="g"))[0].rewards[0] == 1.0
    if status == "leased":
        assert np.isnan(lease.batch[0].rewards[0])  # as it was drawn
        assert (await buffer.open_lease(lease.id, ttl=60)).batch[0].rewards[0] == 1.0
        await lease.ack()
    await check_invariants(url)


async def test_episodes_of_a_group_that_is_not_complete(buffer: Buffer, url: str) -> None:
    """Its extras get their parts below, and the values stay when it is complete and joined."""
    extras = {"image": np.zeros(20_000)}
    await buffer.open_group("gsm8k", "g", 2)
    await buffer.add_episode("g", Episode(prompt_ids=[1], response_ids=[2], extras=extras))
    await buffer.annotate(Annotation("g", 0, reward=1.0))
    with pytest.raises(rdb.InvalidInputError, match=r"annotations\[0\].position: .* got 1"):
        await buffer.annotate(Annotation("g", 1, reward=1.0))
    await buffer.add_episode("g", Episode(prompt_ids=[1], response_ids=[2], extras=extras))
    await buffer.annotate(Annotation("g", 1, reward=3.0))
    [stored] = await buffer.sample(1)
    assert stored.rewards.tolist() == [1.0, 3.0]
    [stored] = await buffer.get(uids="g", fields=[])
    assert stored.rewards.tolist() == [1.0, 3.0]
    await check_invariants(url)


async def test_rewriting_and_copies_keep_them(store: Store, url: str) -> None:
    await migrations.write_format(url, 1)
    buffer = await store.buffer("math")
    await buffer.put([group("g"), group("other")])
    await buffer.annotate(Annotation("g", 0, reward=9.0))
    await migrations.write_format(url, 2)
    assert (await rewrite_payloads(store)).num_groups == 2
    [stored] = await buffer.get(uids="g")
    assert stored.rewards[0] == 9.0
    await buffer.annotate(Annotation("g", 1, reward=8.0))
    with pytest.raises(rdb.SchemaError, match="rewrite-payloads"):
        await migrations.downgrade(url, "0015")
    copy = await store.buffer("copy")
    await buffer.copy_to(copy)
    [stored] = await copy.get(uids="g")
    assert stored.rewards[:2].tolist() == [9.0, 8.0]
    await check_invariants(url)
    assert (await verify(store)).problems == ()


async def test_a_turn_has_a_reward_only_if_its_episode_has(store: Store, url: str) -> None:
    """As `Episode` requires it: such a group could not be rewritten, imported or put again."""
    buffer = await store.buffer("math")
    turns = [Turn(uid="a", prompt_ids=[1], response_ids=[2])]
    await buffer.put(EpisodeGroup("gsm8k", [Episode(turns=turns)], group_uid="g"))
    of_turn = Annotation("g", 0, turn="a", reward=1.0)
    with pytest.raises(rdb.InvalidInputError, match=r"annotations\[1\].reward: .* got 1.0"):
        await buffer.annotate([Annotation("g", 0, metadata={"x": 1}), of_turn])
    assert (await buffer.find(uids="g"))[0].times_annotated == 0
    await buffer.annotate([of_turn, Annotation("g", 0, reward=0.5)])
    await buffer.annotate(Annotation("g", 0, turn="a", reward=2.0))
    [before] = await buffer.get(uids="g")
    assert (await rewrite_payloads(store)).num_groups == 1
    [stored] = await buffer.get(uids="g")
    assert stored.episodes == before.episodes
    assert (stored.episodes[0].reward, stored.episodes[0].turns[0].reward) == (0.5, 2.0)
    await check_invariants(url)
    assert (await verify(store)).problems == ()


@pytest.mark.parametrize("field", ["extras", "token_extras"])
async def test_a_later_reward_of_a_turn_replaces_those_of_all_tokens(
    store: Store, url: str, field: str
) -> None:
    """An episode cannot have both; otherwise copies and rewritten payloads could not be read."""
    buffer, copy = await store.buffer("math"), await store.buffer("copy")
    turns = [Turn(prompt_ids=[1], response_ids=[2, 3]), Turn(prompt_ids=[4], response_ids=[5])]
    rewards = {"token_rewards": [0.0, 0.25, 0.75, 0.0, 0.5], "other": [1.0] * 5}
    one = Episode(turns=turns, reward=1.0, **{field: rewards})  # type: ignore[arg-type]
    await buffer.put(EpisodeGroup("gsm8k", [one], group_uid="g"))
    batch = await buffer.sample(1)
    for number in (1, 0):
        await buffer.annotate(Annotation("g", 0, turn=number, reward=5.0 + number))
    [stored] = await buffer.get(uids="g")
    assert getattr(stored.episodes[0], field).keys() == {"other"}
    assert batch.draw_id is not None
    assert (await buffer.redraw(batch.draw_id))[0].episodes == batch[0].episodes
    await buffer.copy_to(copy)
    assert (await rewrite_payloads(store)).num_skipped == 0
    for each in (buffer, copy):
        assert (await each.get(uids="g"))[0].episodes == stored.episodes
    assert (await buffer.sample(1)).padded(0).token_extras["token_rewards"].max().item() == 6.0
    await check_invariants(url)
    assert (await verify(store)).problems == ()


async def test_a_capacity_is_exceeded_until_the_next_put(store: Store, url: str) -> None:
    capacity = rdb.Capacity(bytes=10_000)
    buffer = await store.buffer("math", capacity=capacity, on_evict="delete")
    await buffer.put([group("a"), group("b")])
    await buffer.annotate(Annotation("b", 0, metadata={"notes": "x" * 20_000}))
    assert sum(one.num_bytes for one in await buffer.find()) > 20_000
    await check_invariants(url)
    await buffer.put(group("c"))
    assert [one.group_uid for one in await buffer.find()] == ["c"]


async def test_an_added_episode_changes_the_etag(buffer: Buffer) -> None:
    await buffer.open_group("gsm8k", "g", 3)
    await buffer.add_episode("g", Episode(prompt_ids=[1], response_ids=[2]))
    [read] = await buffer.get(uids="g")
    await buffer.add_episode("g", Episode(prompt_ids=[1], response_ids=[2]))
    with pytest.raises(rdb.ContentChangedError):
        await buffer.annotate(Annotation("g", 0, reward=1.0), if_match={"g": read.etag})
    with pytest.raises(rdb.ContentChangedError):
        await buffer.put(group("g"), on_duplicate="replace", if_match={"g": read.etag})
    [info] = await buffer.find(uids="g")
    [read] = await buffer.get(uids="g")
    assert info.etag == read.etag
    await buffer.annotate(Annotation("g", 0, reward=1.0), if_match={"g": read.etag})


async def test_a_redraw_has_metadata_in_the_order_of_the_draw(buffer: Buffer) -> None:
    await buffer.put(unscored("g"))
    batch = await buffer.sample(1)
    await buffer.annotate(Annotation("g", 0, metadata={"c": 0, "a": 2}))
    await buffer.annotate(Annotation("g", 0, metadata={"a": 3}))
    assert batch.draw_id is not None
    [again] = await buffer.redraw(batch.draw_id)
    assert list(again.episodes[0].metadata.items()) == [("a", 1), ("b", 2)]


def test_a_number_of_numpy_is_the_number_of_a_turn() -> None:
    assert Annotation("g", 0, turn=np.int64(1), reward=1.0).turn == 1  # type: ignore[arg-type]


async def test_errors(buffer: Buffer, url: str) -> None:
    """Nothing is changed, also not by the annotations before."""
    [_, bad] = await buffer.put([unscored("g"), unscored("bad")])
    good = Annotation("g", 0, reward=1.0)
    with pytest.raises(rdb.UnknownGroupError):
        await buffer.annotate([good, Annotation("none", 0, reward=1.0)])
    for turn in (2, "none"):
        with pytest.raises(rdb.UnknownTurnError) as caught:
            await buffer.annotate([good, Annotation("g", 1, turn=turn, reward=1.0)])
        assert caught.value.turn_uid == str(turn)
    with pytest.raises(rdb.InvalidInputError, match=r"annotations\[1\].position"):
        await buffer.annotate([good, Annotation("g", 2, reward=1.0)])
    await buffer.annotate(Annotation("bad", 0, reward=1.0))
    late = (schema.payload.c.group_id == bad) & (schema.payload.c.part == schema.LATE_PART)
    async with transaction(url) as connection:
        size = await connection.scalar(select(func.length(schema.payload.c.data)).where(late))
        damaged = update(schema.payload).where(late).values(data=b"?" * (size or 0))
        await connection.execute(damaged)
    with pytest.raises(rdb.CorruptPayloadError, match="late values"):
        await buffer.annotate([good, Annotation("bad", 0, reward=2.0)])
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.get([bad])
    [info] = await buffer.find(uids="g")
    assert (info.times_annotated, info.reward_mean) == (0, 0.25)
    await buffer.delete(uids="g")
    with pytest.raises(rdb.UnknownGroupError):
        await buffer.annotate(good)
    assert info.status is GroupStatus.COMPLETED


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "annotation"),
        ({"reward": math.nan}, "reward"),
        ({"reward": 1e39}, "reward"),
        ({"reward": "1"}, "reward"),
        ({"advantage": math.inf}, "advantage"),
        ({"turn": 0, "advantage": 1.0}, "advantage"),
        ({"turn": -1, "reward": 1.0}, "turn"),
        ({"turn": "", "reward": 1.0}, "turn"),
        ({"turn": True, "reward": 1.0}, "turn"),
        ({"position": -1, "reward": 1.0}, "position"),
        ({"group_uid": "", "reward": 1.0}, "group_uid"),
        ({"metadata": {"x": math.nan}}, "metadata.x"),
        ({"metadata": {1: 2}}, "metadata"),
    ],
)
def test_invalid_annotations(values: dict[str, Any], name: str) -> None:
    with pytest.raises(rdb.InvalidInputError) as caught:
        Annotation(**{"group_uid": "g", "position": 0, **values})
    assert caught.value.field == name


async def test_a_later_reward_of_a_turn_replaces_those_of_its_tokens(
    buffer: Buffer, store: Store, url: str
) -> None:
    turn = Turn(uid="t", prompt_ids=[1], response_ids=[2, 3], token_rewards=[0.25, 0.5])
    await buffer.put(EpisodeGroup("gsm8k", [Episode(turns=[turn])], group_uid="g"))
    first = await buffer.sample(1)
    await buffer.annotate(Annotation("g", 0, turn="t", reward=5.0))
    second = await buffer.sample(1)
    await buffer.annotate(Annotation("g", 0, turn="t", reward=6.0))
    [stored] = await buffer.get(uids="g")
    [after] = stored.episodes[0].turns
    assert (after.reward, after.token_rewards) == (6.0, None)
    rewards = (await buffer.sample(1)).padded(0).token_extras["token_rewards"]
    assert rewards.tolist() == [[0.0, 0.0, 6.0]]
    for drawn, reward, tokens in ((first, 0.75, [0.25, 0.5]), (second, 5.0, None)):
        assert drawn.draw_id is not None
        [again] = (await buffer.redraw(drawn.draw_id))[0].episodes[0].turns
        assert again.reward == reward
        assert (None if again.token_rewards is None else again.token_rewards.tolist()) == tokens
    copy = await store.buffer("copy")
    await buffer.copy_to(copy)
    await rewrite_payloads(store)
    for each in (buffer, copy):
        assert (await each.get(uids="g"))[0].episodes[0].turns[0].reward == 6.0
    await check_invariants(url)
    assert (await verify(store)).problems == ()
