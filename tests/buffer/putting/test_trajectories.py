"""Trajectories: claims, durable turns, and their end as episodes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select, update

import replaydb as rdb
from replaydb import Buffer, GroupStatus, Store, Turn
from replaydb.database import migrations
from replaydb.database.repository import unfinished
from replaydb.database.tables import schema
from support.agents import PROMPT, chain, turn
from support.clock import Clock
from support.connections import transaction
from support.groups import episode, group
from support.invariants import check_invariants, group_row, number_of, statuses


async def opened(buffer: Buffer, uid: str = "g", expected: int = 2, **more: Any) -> int:
    return await buffer.open_group("agents", uid, expected, prompt="Find it.", **more)


async def test_each_turn_is_durable_and_the_episode_has_all(
    buffer: Buffer, other: Store, url: str
) -> None:
    group_id = await opened(buffer, prompt_ids=PROMPT)
    [claim] = await buffer.claim(ttl=60, owner="worker-0")
    assert (claim.group.id, claim.group.prompt, claim.positions) == (group_id, "Find it.", (0,))
    assert claim.group.prompt_ids is not None
    assert claim.group.prompt_ids.tolist() == PROMPT
    turns = chain(3)
    elsewhere = await other.buffer("math")
    for i, one in enumerate(turns):
        await claim.append_turn(one)
        assert await elsewhere.turns("g", 0) == turns[: i + 1]
        await check_invariants(url)
    status = await claim.finish_episode(reward=0.5, finish_reason="stop", metadata={"seed": 1})
    assert status is GroupStatus.PENDING
    await buffer.add_episode("g", episode(1.0))
    [group] = (await buffer.sample(1)).groups
    assert group.episodes[0] == rdb.Episode(
        turns=turns, reward=0.5, finish_reason="stop", metadata={"seed": 1}
    )
    row = await group_row(url, group_id)
    assert (row["num_episodes"], row["reward_mean"]) == (2, 0.75)
    assert await number_of(url, schema.trajectory) == 0


async def test_a_turn_takes_the_bytes_of_its_own_tokens(buffer: Buffer, url: str) -> None:
    await opened(buffer, expected=1)
    first = Turn(uid="first", prompt_ids=list(range(100_000)), response_ids=[1])
    await buffer.append_turn("g", 0, first)
    before = await _payload_bytes(url)
    await buffer.append_turn("g", 0, Turn(uid="next", parent=first, new_ids=[2], response_ids=[3]))
    assert await _payload_bytes(url) - before < 1024
    assert (await buffer.turns("g", 0))[1].prompt_ids[-3:].tolist() == [99_999, 1, 2]


async def test_repeated_appends(buffer: Buffer) -> None:
    await opened(buffer)
    first, second = chain(2)
    await buffer.append_turn("g", 0, first)
    await buffer.append_turn("g", 0, second)
    await buffer.append_turn("g", 0, first)
    await buffer.append_turn("g", 0, turn("t1", first))
    assert await buffer.turns("g", 0) == [first, second]
    await buffer.append_turn("g", 1, turn("t2", metadata={"a": 1, "b": {"c": 2, "d": 3}}))
    await buffer.append_turn("g", 1, turn("t2", metadata={"b": {"d": 3, "c": 2}, "a": 1}))
    for other in ({"a": 1.0, "b": {"c": 2, "d": 3}}, {}):
        with pytest.raises(rdb.DuplicateTurnError):
            await buffer.append_turn("g", 1, turn("t2", metadata=other))
    with pytest.raises(rdb.DuplicateTurnError) as caught:
        await buffer.append_turn("g", 0, turn("t1", first, reward=1.0))
    error = caught.value
    assert (error.group_uid, error.position, error.turn_uid) == ("g", 0, "t1")
    with pytest.raises(rdb.DuplicateTurnError):  # the same tokens after another turn
        await buffer.append_turn("g", 0, turn("t1", second))
    with pytest.raises(rdb.DuplicateTurnError, match="position 0 of group 'g' has another turn"):
        await buffer.append_turn("g", 1, turn("t1"))
    assert await buffer.turns("g", 0) == [first, second]


@pytest.mark.parametrize("end", ["finish", "delete"])
async def test_a_trajectory_that_ends_during_a_repeated_append(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    group_id = await opened(buffer)
    await buffer.append_turn("g", 0, turn("t0"))
    compare = Buffer._check_same

    async def ended(*args: Any) -> None:
        await (buffer.finish_episode("g", 0) if end == "finish" else buffer.delete([group_id]))
        await compare(*args)

    monkeypatch.setattr(Buffer, "_check_same", ended)
    expected = rdb.DuplicateEpisodeError if end == "finish" else rdb.UnknownGroupError
    with pytest.raises(expected):  # as if it had ended before the call
        await buffer.append_turn("g", 0, turn("t0"))


async def test_a_parent_by_its_uid(buffer: Buffer) -> None:
    await opened(buffer)
    first, second = chain(2)
    await buffer.append_turn("g", 0, first)
    own = Turn(
        uid="t1",
        prompt_ids=[8, 9],
        response_ids=[5, 6],
        logprobs=[-0.5, -0.25],
        policy_version=3,
        token_extras={"entropy": np.ones(4, np.float32)},
    )
    await buffer.append_turn("g", 0, own, parent_uid="t0")
    stored = (await buffer.turns("g", 0))[1]
    assert stored.parent is not None
    assert stored.parent.uid == "t0"
    assert stored.prompt_ids.tolist() == second.prompt_ids.tolist()
    entropy = stored.token_extras["entropy"].tolist()
    assert entropy == [0.0] * first.num_tokens + [1.0] * 4
    for position, uid in ((0, "nowhere"), (1, "t0")):
        with pytest.raises(rdb.UnknownTurnError, match=uid) as caught:
            await buffer.append_turn("g", position, turn("t2"), parent_uid=uid)
        assert isinstance(caught.value, LookupError)
    with pytest.raises(rdb.InvalidInputError, match="parent_uid"):
        await buffer.append_turn("g", 0, second, parent_uid="t0")


async def test_a_branch_from_the_middle_and_a_context_of_its_own(buffer: Buffer) -> None:
    await opened(buffer, expected=1)
    first, second, third = chain(3)
    retry = Turn(
        uid="retry",
        parent=second,
        prompt_ids=[*second.prompt_ids[:66], 77],
        response_ids=[4],
        agent="sub",
        state="snapshot-7",
    )
    compacted = Turn(uid="compacted", parent=third, prompt_ids=[3, 3, 3], response_ids=[1])
    turns = [first, second, third, retry, compacted]
    for one in turns:
        await buffer.append_turn("g", 0, one)
    stored = await buffer.turns("g", 0)
    assert stored == turns
    names = [None if one.parent is None else one.parent.uid for one in stored]
    assert names == [None, "t0", "t1", "t1", "t2"]
    await buffer.finish_episode("g", 0, discarded=["retry"])
    [group] = (await buffer.sample(1)).groups
    assert [one.is_discarded for one in group.episodes[0].turns] == [False] * 3 + [True, False]


async def test_errors_of_appends(buffer: Buffer) -> None:
    await opened(buffer, min_episodes=1)
    first, second = chain(2)

    async def append(one: Any, position: int = 0) -> None:
        await buffer.append_turn("g", position, one)

    for wrong, message in (
        (Turn(prompt_ids=[1], response_ids=[2]), r"turn\.uid"),
        ("a turn", "turn: expected"),
        (
            Turn(
                uid="x", parent=Turn(prompt_ids=[1], response_ids=[2]), new_ids=[], response_ids=[1]
            ),
            r"turn\.parent\.uid",
        ),
    ):
        with pytest.raises(rdb.InvalidInputError, match=message):
            await append(wrong)
    with pytest.raises(rdb.UnknownTurnError, match="'t0'"):
        await append(second)
    with pytest.raises(rdb.InvalidInputError, match="below expected_episodes = 2, got 2"):
        await append(first, 2)
    with pytest.raises(rdb.UnknownGroupError):
        await buffer.append_turn("nobody", 0, first)
    await buffer.put(rdb.EpisodeGroup("agents", [episode()], group_uid="whole"))
    with pytest.raises(rdb.DuplicateEpisodeError):
        await buffer.append_turn("whole", 0, first)
    await append(first)
    with pytest.raises(rdb.InvalidInputError, match="the 1 turns that were appended"):
        await buffer.add_episode("g", episode(), position=0)
    await buffer.finish_episode("g", 0)
    with pytest.raises(rdb.DuplicateEpisodeError):
        await append(second)
    with pytest.raises(rdb.DuplicateEpisodeError):
        await buffer.finish_episode("g", 0)
    with pytest.raises(rdb.InvalidInputError, match="one with turns"):
        await buffer.finish_episode("g", 1)
    await buffer.fail_episode("g", 1, "sandbox died")
    with pytest.raises((rdb.GroupClosedError, rdb.DuplicateEpisodeError)):
        await append(turn("late"), 1)
    await opened(buffer, "h")
    await buffer.append_turn("h", 0, first)
    with pytest.raises(rdb.UnknownTurnError, match="'nothing'"):
        await buffer.finish_episode("h", 0, discarded=["nothing"])


async def test_only_the_holder_of_a_claim_adds(buffer: Buffer, clock: Clock) -> None:
    await opened(buffer)
    first, second, third = chain(3)
    [claim] = await buffer.claim(ttl=60, owner="worker-0")
    await claim.append_turn(first)
    for call in (
        buffer.append_turn("g", 0, second),
        buffer.finish_episode("g", 0),
        buffer.add_episode("g", episode(), position=0),
        buffer.fail_episode("g", 0, "no"),
    ):
        with pytest.raises(rdb.TrajectoryClaimedError, match="'worker-0'") as caught:
            await call
        assert (caught.value.group_uid, caught.value.position) == ("g", 0)
    await buffer.add_episode("g", episode())  # the next free position
    assert [one.position for one in await buffer.trajectories()] == [0]
    clock.jump(61)
    for call in (claim.append_turn(second), claim.finish_episode(), claim.fail_episode("no")):
        with pytest.raises(rdb.ClaimExpiredError) as ended:
            await call
        assert ended.value.claim_uid == claim.uid
    [successor] = await buffer.claim(ttl=60)
    assert successor.turns == {0: (first,)}
    for call in (claim.append_turn(second), claim.extend(), claim.release()):
        with pytest.raises(rdb.ClaimExpiredError):
            await call
    await successor.append_turn(turn("t1", successor.turns[0][0]))
    assert await successor.finish_episode() == "completed"
    assert [one.uid for one in (await buffer.sample(1))[0].episodes[0].turns] == ["t0", "t1"]
    assert third not in (await buffer.sample(1))[0].episodes[0].turns


async def test_claims_of_the_oldest_groups_and_of_whole_groups(
    buffer: Buffer, other: Store
) -> None:
    for uid in ("a", "b", "c"):
        await opened(buffer, uid)
    claims = await buffer.claim(3, ttl=60)
    assert [(one.group.group_uid, one.positions) for one in claims] == [
        ("a", (0,)), ("a", (1,)), ("b", (0,)),
    ]  # fmt: skip
    elsewhere = await other.buffer("math")
    [whole] = await elsewhere.claim(5, ttl=60, whole_groups=True, where=rdb.col.priority > 0)
    assert (whole.group.group_uid, whole.positions) == ("c", (0, 1))
    with pytest.raises(rdb.InvalidInputError, match=r"one of \[0, 1\].*got None"):
        await whole.append_turn(turn("t0"))
    with pytest.raises(rdb.InvalidInputError, match=r"one of \[0\].*got 1"):
        await claims[0].append_turn(turn("t0"), position=1)
    await whole.append_turn(turn("t0"), position=1)
    assert await elsewhere.claim(1, ttl=60, tasks="others", timeout=0) == []
    [last] = await elsewhere.claim(9, ttl=60, timeout=0)
    assert (last.group.group_uid, last.positions) == ("b", (1,))
    assert await elsewhere.claim(ttl=60, timeout=0) == []
    waiting = asyncio.ensure_future(elsewhere.claim(ttl=60, timeout=30))
    await asyncio.sleep(0.05)
    await claims[0].release()
    [again] = await waiting
    assert (again.group.group_uid, again.positions) == ("a", (0,))


async def test_claimed_groups_count_as_pending(store: Store) -> None:
    """For the queue limit, for capacity, for admission, and in all counts."""
    buffer = await store.buffer("math", rate_limit=rdb.Queue(2), capacity=rdb.Capacity(groups=2))
    for uid in ("a", "b"):
        await opened(buffer, uid, 1)
    claims = await buffer.claim(2, ttl=60)
    [task] = (await buffer.stats()).tasks
    assert (task.num_pending, task.num_leased, task.num_available) == (2, 0, 0)
    with pytest.raises(rdb.RateLimitedError):
        await buffer.put(group("more"), timeout=0)
    assert await buffer.admission(1, max_staleness=1, timeout=0) == 0
    for claim in claims:
        await claim.add_episode(episode())
    assert len(await buffer.sample(2)) == 2


@pytest.mark.parametrize(
    "limit", [rdb.MinSize(2), rdb.SamplesPerInsert(ratio=1.0, min_size=2, error_buffer=2.0)]
)
async def test_a_limit_on_draws_does_not_block_claims(
    store: Store, limit: rdb.MinSize | rdb.SamplesPerInsert
) -> None:
    buffer = await store.buffer("math", rate_limit=limit)
    for uid in ("a", "b"):
        await opened(buffer, uid, 1)
    for claim in await buffer.claim(2, ttl=60, timeout=0):
        await claim.add_episode(episode())
    assert len(await buffer.sample(2)) == 2


@pytest.mark.parametrize("statuses", ["pending", ["completed", "pending"]])
async def test_pending_groups_are_not_leased(buffer: Buffer, statuses: str | list[str]) -> None:
    with pytest.raises(rdb.InvalidInputError, match=r"statuses: .*pending"):
        buffer.lease(1, ttl=60, statuses=statuses)


async def test_a_claim_is_not_a_draw(buffer: Buffer) -> None:
    await opened(buffer, expected=1)
    async with (await buffer.claim(ttl=60))[0] as claim:
        await claim.append_turn(turn("t0"))
        await claim.finish_episode()
    assert await buffer.draws() == []
    assert (await buffer.stats()).tasks[0].num_sampled == 0
    assert await buffer.leases() == []


async def test_the_end_of_a_block(buffer: Buffer) -> None:
    await opened(buffer)
    async with (await buffer.claim(ttl=60))[0] as claim:
        await claim.append_turn(turn("t0"))
    with pytest.raises(rdb.InvalidInputError, match="not entered before"):
        await claim.__aenter__()
    [info, _] = await buffer.trajectories()
    assert (info.claim_uid, info.attempts, info.num_turns) == (None, 0, 1)
    with pytest.raises(ZeroDivisionError):
        async with (await buffer.claim(ttl=60))[0]:
            raise ZeroDivisionError
    [info, _] = await buffer.trajectories()
    assert (info.claim_uid, info.attempts) == (None, 1)


async def test_the_last_attempt_makes_a_trajectory_unusable(
    store: Store, clock: Clock, url: str
) -> None:
    buffer = await store.buffer("math", max_attempts=2)
    await opened(buffer, min_episodes=1)
    for _ in range(2):
        [claim, _sibling] = await buffer.claim(2, ttl=60)
        assert claim.positions == (0,)
        await _sibling.release()
        clock.jump(61)
    await buffer.add_episode("g", episode(1.0), position=1)
    assert await statuses(url) == {"g": "completed"}
    [info] = await buffer.trajectories(uids="g")
    assert (info.position, info.attempts) == (0, 2)
    assert info.unusable_reason == "claim expired (attempt 2 of 2)"
    [group] = (await buffer.sample(1)).groups
    assert group.positions == (1,)


async def test_a_group_without_enough_usable_episodes_fails(buffer: Buffer, url: str) -> None:
    await opened(buffer, "few", 3, min_episodes=2)
    await opened(buffer, "all", 2)
    await buffer.add_episode("few", episode())
    assert await buffer.fail_episode("few", 2, "timeout") == "pending"
    assert await buffer.fail_episode("few", 1, "timeout") == "failed"
    await buffer.add_episode("all", episode())
    assert await buffer.fail_episode("all", 1, "timeout") == "failed"
    [info] = await buffer.find(uids="few")
    assert info.status_reason == "1 of 3 episodes are usable"
    assert await statuses(url) == {"few": "failed", "all": "failed"}
    [stored] = await buffer.get(uids="few")
    assert stored.num_episodes == 1


async def test_a_deadline_closes_trajectories(buffer: Buffer, clock: Clock, url: str) -> None:
    await opened(buffer, "done", 2, min_episodes=1, deadline=60)
    await opened(buffer, "late", 2, deadline=60)
    await buffer.add_episode("done", episode(), position=1)
    await buffer.append_turn("done", 0, turn("t0"))
    [_, claim, _] = await buffer.claim(3, ttl=600)
    assert claim.group.group_uid == "late"
    clock.jump(61)
    assert await buffer.claim(ttl=60, timeout=0) == []
    assert await statuses(url) == {"done": "completed", "late": "failed"}
    with pytest.raises(rdb.GroupClosedError):
        await buffer.append_turn("done", 0, turn("t1"))
    with pytest.raises((rdb.GroupClosedError, rdb.ClaimExpiredError)):
        await claim.append_turn(turn("t0"))
    reasons = [one.unusable_reason for one in await buffer.trajectories(uids=["done", "late"])]
    assert reasons == ["the group is completed", "the group is failed", "the group is failed"]
    assert (await buffer.sample(1))[0].positions == (1,)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("filtered", rdb.GroupClosedError),
        ("archived", rdb.GroupClosedError),
        ("delete", rdb.UnknownGroupError),
        ("replace", rdb.DuplicateEpisodeError),
        ("reopen", rdb.ClaimExpiredError),
    ],
)
async def test_a_group_that_is_closed_by_others(
    buffer: Buffer, change: str, expected: type[rdb.ReplayDBError]
) -> None:
    await opened(buffer)
    [claim] = await buffer.claim(ttl=60)
    await claim.append_turn(turn("t0"))
    if change == "replace":
        whole = rdb.EpisodeGroup("agents", [episode()], group_uid="g")
        await buffer.put(whole, on_duplicate="replace")
    elif change in {"delete", "reopen"}:
        await buffer.delete([claim.group.id])
    else:
        await buffer.update(uids="g", status=change)
    if change == "reopen":
        await opened(buffer)
    for call in (
        claim.append_turn(turn("t1")),
        claim.append_turn(turn("t1"), parent_uid="t0"),
        claim.finish_episode(),
        claim.finish_episode(discarded=["nothing"]),
        claim.fail_episode("timeout"),
        claim.add_episode(episode()),
    ):
        with pytest.raises(expected):
            await call


async def test_a_store_that_writes_format_1(own_url: str) -> None:
    await migrations.write_format(own_url, 1)
    async with Store.open(own_url) as store:
        buffer = await store.buffer("math")
        await opened(buffer, expected=1)
        with pytest.raises(rdb.InvalidInputError, match="replaydb db write-format 2"):
            await buffer.append_turn("g", 0, turn("t0"))
        [claim] = await buffer.claim(ttl=60)
        assert await claim.add_episode(episode()) == "completed"
    await check_invariants(own_url)


async def test_many_workers_finish_each_trajectory_once(store: Store, other: Store) -> None:
    buffers = [await store.buffer("math"), await other.buffer("math")]
    for i in range(4):
        await opened(buffers[0], f"g{i}", 4)

    async def work(buffer: Buffer) -> None:
        while claims := await buffer.claim(ttl=60, timeout=0):
            async with claims[0] as claim:
                prefix = f"{claim.positions[0]}-"
                for one in chain(3, prefix):
                    await claim.append_turn(one)
                await claim.finish_episode(reward=1.0)

    await asyncio.gather(*(work(buffers[i % 2]) for i in range(8)))
    groups = (await buffers[0].sample(4)).groups
    assert all(one.positions == (0, 1, 2, 3) for one in groups)
    for found in groups:
        for i, one in enumerate(found.episodes):
            assert [each.uid for each in one.turns] == [f"{i}-{j}" for j in range(3)]


async def _payload_bytes(url: str) -> int:
    async with transaction(url) as connection:
        size = func.coalesce(func.sum(func.length(schema.payload.c.data)), 0)
        return int((await connection.execute(select(size))).scalar_one())


@pytest.mark.parametrize("by_uid", [False, True])
async def test_turns_after_one_without_tokens_of_its_own(buffer: Buffer, by_uid: bool) -> None:
    await opened(buffer, expected=1)
    extras = {"x": [0.0] * 64 + [1.0, 2.0]}
    turns = [Turn(uid="empty", prompt_ids=[], response_ids=[])]
    turns.append(Turn(uid="t0", parent=turns[0], new_ids=PROMPT, response_ids=[5, 6]))
    turns.append(Turn(uid="t1", parent=turns[1], new_ids=[], response_ids=[], token_extras=extras))
    turns.append(Turn(uid="t2", parent=turns[2], new_ids=[], response_ids=[7]))
    for one in turns:
        if by_uid and one.parent is not None:
            new = one.prompt_ids[one.parent.num_tokens :]
            own: dict[str, Any] | None = {"x": []} if one.uid == "t1" else None
            after = Turn(
                uid=one.uid, prompt_ids=new, response_ids=one.response_ids, token_extras=own
            )
            await buffer.append_turn("g", 0, after, parent_uid=one.parent.uid)
        else:
            await buffer.append_turn("g", 0, one)
    stored = await buffer.turns("g", 0)
    assert [one.uid for one in stored] == ["empty", "t0", "t1", "t2"]
    assert stored[3].prompt_ids.tolist() == [*PROMPT, 5, 6]
    assert by_uid or stored == turns
    assert await buffer.finish_episode("g", 0) == "completed"
    [group] = (await buffer.sample(1)).groups
    assert list(group.episodes[0].turns) == stored


async def test_an_episode_with_a_uid_that_a_turn_has(buffer: Buffer) -> None:
    await opened(buffer, expected=4)
    await buffer.append_turn("g", 0, turn("t0"))
    anonymous = Turn(prompt_ids=[1], response_ids=[2])
    taken = rdb.Episode(turns=[anonymous, turn("t0")])
    with pytest.raises(rdb.InvalidInputError, match=r"episode\.turns\[1\]\.uid: .*position 0 has"):
        await buffer.add_episode("g", taken)
    same = rdb.Episode(turns=[anonymous, turn("same")])
    outcomes = await asyncio.gather(
        *(buffer.add_episode("g", same) for _ in range(3)),
        buffer.add_episode("g", rdb.Episode(turns=[anonymous])),
        return_exceptions=True,
    )
    assert outcomes[3] == "pending"
    refused = [one for one in outcomes if isinstance(one, rdb.InvalidInputError)]
    assert (len(refused), outcomes.count(GroupStatus.PENDING)) == (2, 2)
    await buffer.finish_episode("g", 0)


async def test_a_claim_that_ended_when_its_trajectory_became_unusable(
    store: Store, clock: Clock
) -> None:
    buffer = await store.buffer("math", max_attempts=1)
    await opened(buffer)
    [claim] = await buffer.claim(ttl=60)
    await claim.append_turn(turn("t0"))
    clock.jump(61)
    [_] = await buffer.claim(ttl=60)
    calls = (
        claim.append_turn(turn("t1")),
        claim.finish_episode(),
        claim.add_episode(episode()),
        claim.fail_episode("no"),
    )
    for call in calls:
        with pytest.raises(rdb.ClaimExpiredError):
            await call
    with pytest.raises(rdb.InvalidInputError, match=r"usable.*attempt 1 of 1"):
        await buffer.append_turn("g", 0, turn("t1"))


async def test_positions_that_no_group_has(buffer: Buffer) -> None:
    await opened(buffer)
    for position in (2, 2**31 - 1, 2**31, 2**63 - 1):
        for call in (
            buffer.append_turn("g", position, turn("t0")),
            buffer.append_turn("g", position, turn("t0"), parent_uid="t"),
            buffer.turns("g", position),
            buffer.finish_episode("g", position),
            buffer.fail_episode("g", position, "no"),
            buffer.add_episode("g", episode(), position=position),
        ):
            with pytest.raises((rdb.InvalidInputError, rdb.UnknownTurnError)):
                await call


async def test_a_trajectory_is_read_without_those_beside_it(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await opened(buffer)
    for position, one in enumerate(chain(2)):
        await buffer.append_turn("g", position, Turn(uid=one.uid, prompt_ids=[1], response_ids=[2]))
    read: list[int] = []
    fetch = unfinished.select_unfinished

    def recorded(ids: Any, positions: Any) -> Any:
        read.extend(positions)
        return fetch(ids, positions)

    monkeypatch.setattr(unfinished, "select_unfinished", recorded)
    await buffer.turns("g", 1)
    assert read == [1]
    await buffer.finish_episode("g", 1)
    assert read == [1, 1]


async def test_claims_that_never_reached_their_caller(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await opened(buffer)
    write = Buffer._write

    async def cancelled(*args: Any, **kwargs: Any) -> Any:
        await write(*args, **kwargs)
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "_first", lambda self, work, *_: cancelled(self, work, None))
        with pytest.raises(asyncio.CancelledError):
            await buffer.claim(2, ttl=36_000)
    infos = await buffer.trajectories()
    assert [(one.claim_uid, one.attempts) for one in infos] == [(None, 0), (None, 0)]


@pytest.mark.parametrize("part", ["turn", "context"])
async def test_damage_does_not_block_other_trajectories(
    buffer: Buffer, url: str, part: str
) -> None:
    await opened(buffer, "damaged", min_episodes=1)
    await opened(buffer, "sound", 1)
    await buffer.append_turn("damaged", 0, turn("t0"))
    here = schema.IS_OF_TURN if part == "turn" else (schema.payload.c.part == -1)
    here &= schema.payload.c.group_id == 1
    async with transaction(url) as connection:
        await connection.execute(update(schema.payload).where(here).values(checksum=1))
    with pytest.raises(rdb.CorruptPayloadError):
        await buffer.turns("damaged", 0)
    claims = await buffer.claim(1, ttl=60)
    assert len(claims) == 1
    claims += await buffer.claim(9, ttl=60, timeout=0)
    found = [(one.group.group_uid, one.positions) for one in claims]
    assert found == [("damaged", (1,)), ("sound", (0,))][part == "context" :]
    unusable = [one for one in await buffer.trajectories(uids="damaged") if one.unusable_reason]
    assert [one.position for one in unusable] == ([0] if part == "turn" else [0, 1])
    assert "are damaged: checksum is" in str(unusable[0].unusable_reason)


async def test_rows_of_turns_say_what_is_trained_on(buffer: Buffer, url: str) -> None:
    turns = chain(3)
    lost = turn("lost", turns[2], is_discarded=True)
    below = turn("below", lost)
    await buffer.put(rdb.EpisodeGroup("agents", [rdb.Episode(turns=[*turns, lost, below])]))
    await opened(buffer, expected=1)
    for one in (*turns, turn("lost", turns[2]), turn("below", turn("lost", turns[2]))):
        await buffer.append_turn("g", 0, one)
    await buffer.finish_episode("g", 0, discarded=["lost"])
    async with transaction(url) as connection:
        rows = (await connection.execute(select(schema.turn))).all()
    for group_id in {row.group_id for row in rows}:
        mine = sorted((row for row in rows if row.group_id == group_id), key=lambda it: it.turn)
        assert [row.is_discarded for row in mine] == [False, False, False, True, True]
        assert [row.parent for row in mine] == [None, 0, 1, 2, 3]


async def test_the_number_of_positions_is_limited(buffer: Buffer) -> None:
    with pytest.raises(rdb.InvalidInputError, match="expected_episodes"):
        await opened(buffer, expected=65_537)


async def test_turns_that_were_dropped_with_the_payload(store: Store) -> None:
    buffer = await store.buffer("dropping", archived_payload="drop")
    await opened(buffer, min_episodes=1)
    await buffer.append_turn("g", 0, turn("t0"))
    await buffer.fail_episode("g", 0, "timeout")
    await buffer.add_episode("g", episode(), position=1)
    assert await buffer.turns("g", 0) == [turn("t0")]
    async with buffer.lease(1, ttl=60):
        pass
    with pytest.raises(rdb.PayloadGoneError):
        await buffer.turns("g", 0)
