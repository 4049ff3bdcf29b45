"""Unfinished trajectories in operations on whole stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import update

from replaydb import Annotation, Buffer, Store, Turn
from replaydb.database import migrations
from replaydb.database.tables.schema import IS_OF_TURN, payload, trajectory
from replaydb.operations import copy, rewrite_payloads, verify
from support.connections import transaction
from support.groups import episode, group
from support.invariants import check_invariants

FIRST = Turn(uid="first", prompt_ids=list(range(64)), response_ids=[1, 2], logprobs=[-0.5, -0.1])
SECOND = Turn(uid="second", parent=FIRST, new_ids=[3], response_ids=[4], reward=1.0)


async def unfinished(buffer: Buffer) -> None:
    await buffer.open_group("agents", "g", 3, prompt="Find it.", min_episodes=1)
    await buffer.add_episode("g", episode(0.5))
    await buffer.append_turn("g", 1, FIRST)
    await buffer.append_turn("g", 1, SECOND)
    await buffer.fail_episode("g", 2, "timeout")


async def test_a_sound_store(store: Store, buffer: Buffer) -> None:
    await unfinished(buffer)
    assert (await verify(store)).problems == ()


@pytest.mark.parametrize("wrong", ["damage", "missing", "both", "open"])
async def test_damage_is_found(own_url: str, wrong: str) -> None:
    async with Store.open(own_url) as store:
        await unfinished(await store.buffer("math"))
        first = payload.c.part == payload.c.of_part + 3
        async with transaction(own_url) as connection:
            if wrong == "damage":
                await connection.execute(update(payload).where(IS_OF_TURN).values(checksum=1))
            elif wrong == "missing":
                await connection.execute(payload.delete().where(IS_OF_TURN, first))
            elif wrong == "both":
                position = trajectory.c.position == 1
                await connection.execute(update(trajectory).where(position).values(position=0))
            else:
                await connection.execute(trajectory.delete())
        problems = (await verify(store)).problems
        expected = {
            "damage": ["group 1, part 4", "group 1, part 7"],
            "missing": ["group 1, part 7"],
            "both": ["group 1"],
            "open": ["group 1"],
        }
        assert [one.where for one in problems] == expected[wrong]


@pytest.mark.parametrize("outside", [False, True])
async def test_a_copy_can_be_continued(
    own_url: str, empty_url: str, tmp_path: Path, outside: bool
) -> None:
    async with Store.open(own_url) as store:
        buffer = await store.buffer("math")
        await unfinished(buffer)
        [claim] = await buffer.claim(ttl=600)
        await buffer.put(group("scored"))
        drawn = await buffer.sample(1)
        await buffer.annotate(Annotation("scored", 0, reward=7.0))
        await copy(own_url, empty_url, payloads=tmp_path.as_uri() if outside else None)
        async with Store.open(empty_url) as other:
            copied = await other.buffer("math")
            assert await copied.turns("g", 1) == [FIRST, SECOND]
            assert await copied.trajectories() == await buffer.trajectories()
            await copied.release_claim(claim.uid, reason="the process is in the other store")
            await copied.append_turn("g", 1, SECOND)  # again
            assert await copied.finish_episode("g", 1) == "completed"
            # The copy has the value that arrived later, and takes others.
            assert (await copied.get(uids="scored"))[0].rewards[0] == 7.0
            await copied.annotate(Annotation("scored", 0, reward=8.0))
            assert (await copied.get(uids="scored"))[0].rewards[0] == 8.0
            assert drawn.draw_id is not None
            [again] = await copied.redraw(drawn.draw_id)
            assert again.rewards.tolist() == drawn[0].rewards.tolist()
        await check_invariants(empty_url)


async def test_rewriting_leaves_unfinished_trajectories_alone(own_url: str) -> None:
    await migrations.write_format(own_url, 1)
    async with Store.open(own_url) as store:
        buffer = await store.buffer("math")
        await buffer.open_group("agents", "g", 2)
        await buffer.add_episode("g", episode(0.5))
    await migrations.write_format(own_url, 2)
    async with Store.open(own_url) as store:
        buffer = await store.buffer("math")
        await buffer.append_turn("g", 1, FIRST)
        assert (await rewrite_payloads(store)).num_groups == 0
        assert await buffer.turns("g", 1) == [FIRST]
        assert await buffer.finish_episode("g", 1) == "completed"
        assert (await rewrite_payloads(store)).num_groups == 1
        [group] = (await buffer.sample(1)).groups
        assert list(group.episodes[1].turns) == [FIRST]
        assert (await verify(store)).problems == ()
