"""Groups that wait for values which the setting `requires` names, and claims of these values."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

import replaydb as rdb
from replaydb import Annotation, Buffer, ClaimExpiredError, GroupStatus, InvalidInputError, Store
from replaydb.database.tables import schema
from replaydb.operations import verify
from support.agents import chain, turn
from support.clock import Clock
from support.connections import transaction
from support.groups import episode, group
from support.invariants import check_invariants, number_of


@pytest.fixture
async def judged(store: Store) -> Buffer:
    """A buffer whose groups need rewards."""
    return await store.buffer("judged", requires="reward")


def unscored(uid: str = "g", number: int = 3, **more: Any) -> rdb.EpisodeGroup:
    return group(uid, rewards=[None] * number, **more)


async def state(buffer: Buffer, uid: str = "g") -> tuple[str, str | None]:
    [info] = await buffer.find(uids=uid)
    return info.status.value, info.status_reason


async def test_a_group_is_drawn_when_the_last_value_has_come(
    judged: Buffer, other: Store, url: str
) -> None:
    await judged.put([group("g", rewards=[None, 1.0, None]), group("ready")])
    assert await state(judged) == ("pending", "waits for reward of 2 of 3 episodes")
    assert await state(judged, "ready") == ("completed", None)
    assert (await judged.find(uids="g"))[0].completed_at is None
    trainer = await other.buffer("judged")
    waiting = asyncio.create_task(trainer.sample(2, timeout=30))
    await judged.annotate(Annotation("g", 0, reward=0.5))
    assert await state(judged) == ("pending", "waits for reward of 1 of 3 episodes")
    await judged.annotate(Annotation("g", 2, metadata={"seen": True}))
    assert await state(judged) == ("pending", "waits for reward of 1 of 3 episodes")
    await check_invariants(url)
    await judged.annotate(Annotation("g", 2, reward=0.0))
    batch = await waiting  # it was woken
    assert {one.group_uid for one in batch} == {"g", "ready"}
    [info] = await judged.find(uids="g")
    assert (info.status_reason, info.deadline, info.reward_mean) == (None, None, 0.5)
    assert info.completed_at is not None
    assert info.completed_at >= info.created_at
    assert await number_of(url, schema.trajectory) == 0
    await check_invariants(url)


async def test_an_incremental_group_waits_after_its_last_episode(judged: Buffer, url: str) -> None:
    await judged.open_group("agents", "g", 3)
    assert await judged.add_episode("g", episode(None), position=0) is GroupStatus.PENDING
    assert await state(judged) == ("pending", None)  # it still generates
    await judged.annotate(Annotation("g", 0, reward=1.0))  # one is scored before the others come
    for one in chain(2):
        await judged.append_turn("g", 1, one)
    assert await judged.finish_episode("g", 1) is GroupStatus.PENDING
    assert await judged.add_episode("g", episode(0.0), position=2) is GroupStatus.PENDING
    assert await state(judged) == ("pending", "waits for reward of 1 of 3 episodes")
    await check_invariants(url)
    assert await judged.claim(ttl=60, timeout=0) == []  # nothing is left to generate
    with pytest.raises(rdb.DuplicateEpisodeError):
        await judged.add_episode("g", episode(1.0), position=1)
    with pytest.raises(rdb.DuplicateEpisodeError):
        await judged.append_turn("g", 1, turn("other"))
    with pytest.raises(rdb.DuplicateEpisodeError):
        await judged.turns("g", 1)
    with pytest.raises(rdb.GroupClosedError):
        await judged.add_episode("g", episode(1.0))
    [claim] = await judged.claim(ttl=60, missing="reward", owner="judge", timeout=0)
    assert (claim.positions, claim.missing) == ((1,), "reward")
    assert len(claim.episodes[1].turns) == 2
    await claim.annotate(Annotation("g", 1, reward=0.25), author="judge-v1")
    assert await state(judged) == ("completed", None)
    assert (await judged.sample(1))[0].rewards.tolist() == [1.0, 0.25, 0.0]
    await check_invariants(url)


async def test_judges_claim_different_episodes_and_no_draw_is_recorded(
    judged: Buffer, other: Store, url: str
) -> None:
    await judged.put([unscored("a", 2), unscored("b", 2)])
    elsewhere = await other.buffer("judged")
    mine = await judged.claim(3, ttl=60, missing="reward", owner="one")
    theirs = await elsewhere.claim(3, ttl=60, missing="reward", owner="two", timeout=0)
    places = [(claim.group.group_uid, *claim.positions) for claim in [*mine, *theirs]]
    assert places == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    listed = await judged.trajectories()
    assert [(one.missing, one.claimed_by) for one in listed] == [
        *[("reward", "one")] * 3,
        ("reward", "two"),
    ]
    for claim in [*mine, *theirs]:
        async with claim:
            for position, one in claim.episodes.items():
                reward = float(len(one.response_ids))
                await claim.annotate(Annotation(claim.group.group_uid, position, reward=reward))
    assert await judged.count(statuses="completed") == 2
    assert await judged.draws() == []
    [info] = await judged.find(uids="a")
    assert (info.attempts, info.times_sampled) == (0, 0)
    with pytest.raises(ClaimExpiredError):
        await mine[0].annotate(Annotation("a", 0, reward=9.0))
    with pytest.raises(InvalidInputError, match="positions"):
        await mine[0].annotate(Annotation("a", 1, reward=9.0))


async def test_stages_claim_their_values_at_the_same_time(store: Store, url: str) -> None:
    buffer = await store.buffer("both", requires={"gsm8k": ["reward", "metadata.label"]})
    await buffer.put([unscored("g", 2), group("code", "code", rewards=[None])])
    assert await state(buffer, "code") == ("completed", None)  # only that task requires them
    text = "waits for metadata.label of 2 of 2 episodes, reward of 2 of 2 episodes"
    assert await state(buffer) == ("pending", text)
    [judge] = await buffer.claim(ttl=60, missing="reward", whole_groups=True)
    [person] = await buffer.claim(ttl=60, missing="metadata.label", whole_groups=True)
    assert judge.positions == person.positions == (0, 1)
    await judge.release()
    assert {(one.missing, one.claim_uid) for one in await buffer.trajectories()} == {
        ("reward", None),
        ("metadata.label", person.uid),
    }
    [judge] = await buffer.claim(ttl=60, missing="reward", whole_groups=True)
    labels = [Annotation("g", i, metadata={"label": None}) for i in range(2)]  # None is a value
    await person.annotate(labels, author="somebody")
    assert await state(buffer) == ("pending", "waits for reward of 2 of 2 episodes")
    await judge.annotate([Annotation("g", i, reward=1.0) for i in range(2)])
    assert await state(buffer) == ("completed", None)
    await check_invariants(url)


async def test_a_claim_that_has_ended_adds_nothing(judged: Buffer, clock: Clock, url: str) -> None:
    await judged.put(unscored("g", 1))
    [slow] = await judged.claim(ttl=10, missing="reward")
    clock.jump(11)
    with pytest.raises(ClaimExpiredError):
        await slow.annotate(Annotation("g", 0, reward=1.0))
    [fast] = await judged.claim(ttl=10, missing="reward", timeout=0)
    with pytest.raises(ClaimExpiredError):
        await slow.annotate(Annotation("g", 0, reward=1.0))
    assert await number_of(url, schema.annotation) == 0
    [row] = await judged.trajectories()
    assert (row.attempts, row.claim_uid) == (1, fast.uid)
    await fast.annotate(Annotation("g", 0, reward=2.0))
    assert (await judged.sample(1))[0].rewards.tolist() == [2.0]


@pytest.mark.parametrize("on_missing", ["fail", "complete"])
async def test_after_the_last_attempt_nothing_is_waited_for(
    store: Store, url: str, on_missing: Any
) -> None:
    buffer = await store.buffer("x", requires="reward", max_attempts=2, on_missing=on_missing)
    await buffer.put(unscored("g", 2))
    await buffer.annotate(Annotation("g", 1, reward=1.0))
    for _ in range(2):
        [claim] = await buffer.claim(ttl=60, missing="reward", timeout=0)
        with pytest.raises(ZeroDivisionError):
            async with claim:
                raise ZeroDivisionError("no sandbox")
    assert await buffer.claim(ttl=60, missing="reward", timeout=0) == []
    status, reason = await state(buffer)
    assert status == {"fail": "failed", "complete": "completed"}[on_missing]
    text = "no reward of 1 of 2 episodes: ZeroDivisionError: no sandbox (attempt 2 of 2)"
    assert reason == text
    await check_invariants(url)
    await buffer.annotate(Annotation("g", 0, reward=0.0))  # too late, but it is stored
    assert await number_of(url, schema.trajectory) == 0
    assert (await state(buffer))[0] == status


@pytest.mark.parametrize("on_missing", ["fail", "complete"])
async def test_the_deadline_begins_when_all_episodes_are_there(
    store: Store, clock: Clock, url: str, on_missing: Any
) -> None:
    buffer = await store.buffer(
        "x", requires="reward", requires_timeout=100.0, on_missing=on_missing
    )
    await buffer.put(unscored("put", 2))
    await buffer.open_group("gsm8k", "g", 2, deadline=1000.0)
    await buffer.add_episode("g", episode(None))
    clock.jump(90)
    await buffer.add_episode("g", episode(1.0))
    [info] = await buffer.find(uids="g")
    assert info.deadline is not None
    before = info.deadline
    await buffer.annotate(Annotation("g", 0, metadata={"a": 1}))
    [first] = await buffer.find(uids="put")
    await buffer.annotate([Annotation("put", 0, reward=1.0)])
    assert (await buffer.find(uids="g"))[0].deadline == before
    assert (await buffer.find(uids="put"))[0].deadline == first.deadline is not None
    clock.jump(20)
    await buffer.put(group("other"))  # maintenance
    expected = {"fail": "failed", "complete": "completed"}[on_missing]
    text = "no reward of 1 of 2 episodes: the deadline has passed"
    assert await state(buffer, "put") == (expected, text)
    assert (await state(buffer))[0] == "pending"
    clock.jump(100)
    await buffer.put(group("another"))
    text = "no reward of 1 of 2 episodes: the deadline has passed"
    assert await state(buffer) == (expected, text)
    assert before - info.created_at == timedelta(seconds=190)
    await check_invariants(url)


async def test_a_group_with_too_few_episodes_waits_for_nothing(store: Store, url: str) -> None:
    buffer = await store.buffer("x", requires="reward")
    await buffer.open_group("agents", "g", 3, min_episodes=2)
    await buffer.add_episode("g", episode(None), position=0)
    await buffer.fail_episode("g", 1, "no sandbox")
    assert await buffer.fail_episode("g", 2, "no sandbox") is GroupStatus.FAILED
    assert await state(buffer) == ("failed", "1 of 3 episodes are usable")
    assert await buffer.claim(ttl=60, missing="reward", timeout=0) == []
    await check_invariants(url)


async def test_an_unusable_trajectory_can_let_a_group_wait(
    store: Store, clock: Clock, url: str
) -> None:
    """The last open trajectory ends by its claims, so that only the reward is missing."""
    buffer = await store.buffer("x", requires="reward", requires_timeout=50.0, max_attempts=1)
    await buffer.open_group("agents", "g", 2, min_episodes=1)
    await buffer.add_episode("g", episode(None), position=0)
    [claim] = await buffer.claim(ttl=60)
    await claim.release(reason="no sandbox")
    assert await state(buffer) == ("pending", "waits for reward of 1 of 1 episodes")
    assert (await buffer.find(uids="g"))[0].deadline is not None
    await buffer.annotate(Annotation("g", 0, reward=1.0))
    assert await state(buffer) == ("completed", None)
    await check_invariants(url)


async def test_a_group_that_became_too_stale_meanwhile_expires(store: Store, url: str) -> None:
    buffer = await store.buffer("x", requires="reward", max_staleness=1)
    await buffer.put([unscored("old", 1, version=0), unscored("new", 1, version=0)])
    await buffer.annotate(Annotation("new", 0, reward=1.0))
    await buffer.advance_policy(5)
    await buffer.annotate(Annotation("old", 0, reward=1.0))
    assert [(await state(buffer, uid))[0] for uid in ("old", "new")] == ["expired", "expired"]
    await check_invariants(url)


async def test_replacing_and_deleting_groups_that_wait(judged: Buffer, url: str) -> None:
    await judged.put([unscored("a"), unscored("b"), unscored("c")])
    [claim] = await judged.claim(ttl=60, missing="reward")
    await judged.put(unscored("a", 2), on_duplicate="replace")
    assert await state(judged, "a") == ("pending", "waits for reward of 2 of 2 episodes")
    with pytest.raises(ClaimExpiredError):
        await claim.annotate(Annotation("a", 0, reward=1.0))
    await judged.put(group("b"), on_duplicate="renew")
    assert await state(judged, "b") == ("completed", None)
    [gone] = await judged.find(uids="c")
    await judged.delete([gone.id])
    assert {one.group_uid for one in await judged.trajectories()} == {"a"}
    await judged.update(uids="a", status="completed")  # a status that is set needs no values
    assert await state(judged, "a") == ("completed", None)
    await check_invariants(url)


async def test_a_setting_applies_to_later_groups(store: Store) -> None:
    buffer = await store.buffer("x")
    await buffer.put(unscored("before"))
    await store.buffer("x", requires=["reward", "advantage", "reward"])
    assert (await store.buffer("x")).settings.requires == ("advantage", "reward")
    await buffer.put(unscored("after"))
    assert (await state(buffer, "before"))[0] == "completed"
    assert (await state(buffer, "after"))[0] == "pending"
    with pytest.raises(rdb.InvalidSettingsError, match=r"requires.*metadata\.NAME"):
        await store.buffer("x", requires="label")
    with pytest.raises(InvalidInputError, match=r"missing.*metadata\.NAME"):
        await buffer.claim(ttl=60, missing="metadata.")


async def test_values_of_a_damaged_group_are_not_waited_for(judged: Buffer, url: str) -> None:
    await judged.put([unscored("bad", 2), unscored("good", 1)])
    async with transaction(url) as connection:
        of = schema.payload
        first = select(schema.group.id).where(schema.group.group_uid == "bad").scalar_subquery()
        await connection.execute(update(of).where(of.c.group_id == first).values(checksum=1))
    [claim] = await judged.claim(3, ttl=60, missing="reward", timeout=0)
    assert claim.group.group_uid == "good"
    status, reason = await state(judged, "bad")
    assert status == "failed"
    assert reason == "no reward of 2 of 2 episodes: the group is damaged"


async def test_verify_finds_wrong_rows(judged: Buffer, store: Store, url: str) -> None:
    await judged.put([unscored("a", 1), unscored("b", 1), unscored("c", 1)])
    assert (await verify(store)).problems == ()
    of = schema.trajectory.c
    async with transaction(url) as connection:
        [a, b, _] = [row.group_id for row in await connection.execute(select(of.group_id))]
        await connection.execute(schema.trajectory.delete().where(of.group_id == a))
        await connection.execute(
            update(schema.trajectory).where(of.group_id == b).values(position=7)
        )
    found = {(problem.kind, problem.where) for problem in (await verify(store)).problems}
    assert found == {("group", f"group {a}"), ("group", f"group {b}")}
    for uid in ("a", "b"):  # leave nothing wrong behind
        await judged.put(unscored(uid, 1), on_duplicate="replace")


async def test_a_group_waits_only_for_values_that_can_still_come(store: Store, url: str) -> None:
    buffer = await store.buffer("x", requires=["reward", "metadata.label"], max_attempts=1)
    await buffer.put(unscored("g", 2))
    [claim] = await buffer.claim(ttl=60, missing="reward", timeout=0)
    await claim.release(reason="no judge")
    text = "waits for metadata.label of 2 of 2 episodes, reward of 1 of 2 episodes"
    assert await state(buffer) == ("pending", text)
    labels = [Annotation("g", position, metadata={"label": "good"}) for position in (0, 1)]
    await buffer.annotate([*labels, Annotation("g", 1, reward=1.0)])
    text = "no reward of 1 of 2 episodes: no judge (attempt 1 of 1)"
    assert await state(buffer) == ("failed", text)
    await check_invariants(url)


async def test_the_deadline_of_open_trajectories_does_not_end_the_wait(
    store: Store, clock: Clock, url: str
) -> None:
    buffer = await store.buffer("x", requires="reward", requires_timeout=100.0)
    for uid in ("scored", "unscored", "few"):
        await buffer.open_group("gsm8k", uid, 3, min_episodes=1 + (uid == "few"), deadline=50.0)
        await buffer.add_episode(uid, episode(None), position=1)
    [claim, *_] = await buffer.claim(ttl=1000)
    clock.jump(60)
    await buffer.put(group("other"))  # maintenance
    text = "2 of 3 episodes missing at the deadline"
    assert await state(buffer, "few") == ("failed", text)
    for uid in ("scored", "unscored"):
        text = "waits for reward of 1 of 1 episodes"
        assert await state(buffer, uid) == ("pending", text)
    with pytest.raises(ClaimExpiredError):
        await claim.finish_episode(reward=1.0)
    rows = await buffer.trajectories(uids="scored")
    late = "the deadline has passed"
    assert [(row.position, row.missing, row.unusable_reason) for row in rows] == [
        (0, "episode", late), (1, "reward", None), (2, "episode", late),
    ]  # fmt: skip
    await check_invariants(url)
    await buffer.annotate(Annotation("scored", 1, reward=1.0))
    assert await state(buffer, "scored") == ("completed", None)
    clock.jump(90)
    await buffer.put(group("another"))
    assert (await state(buffer, "unscored"))[0] == "pending"
    clock.jump(20)
    await buffer.put(group("third"))
    text = "no reward of 1 of 1 episodes: the deadline has passed"
    assert await state(buffer, "unscored") == ("failed", text)
    await check_invariants(url)
