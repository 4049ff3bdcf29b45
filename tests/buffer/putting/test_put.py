"""Groups are read back unchanged, under the rules for uids and statuses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import replaydb as rdb
from replaydb import Buffer, Episode, EpisodeGroup, GroupStatus, Prioritized, Store, Turn
from replaydb.domain.settings import Compression
from support.engines import postgresql_nightly
from support.groups import conversation, episode, group, groups, long_group
from support.invariants import check_invariants
from support.samples import DTYPES, array_of, sample_episodes
from support.tables import group_facts, table_sizes, wrong_numbers

NOTHING = {"episode_group": 0, "payload": 0, "episode": 0, "transcript": 0}


def everything() -> EpisodeGroup:
    """An episode with all fields."""
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000], np.uint32).view(np.float32)
    rich = Episode(
        prompt_ids=[1, 2],
        response_ids=[2**31 - 1, -(2**31), 5],
        loss_mask=[True, False, True],
        logprobs=odd,
        reward=-1e-300,
        advantage=2.5,
        policy_version=[7, 7, 9],
        finish_reason="length",
        token_extras={f"token {dtype}": array_of(dtype, (5, 2), 1) for dtype in DTYPES},
        extras={dtype: array_of(dtype, (3,), 2) for dtype in DTYPES}
        | {"scalar": np.float16(1.5), "empty": np.zeros((0, 4), np.int64)},
        metadata={"seed": 2**63, "nested": {"list": [1, 2.5, None, True, "数学"]}},
        text="line\n' \" % : ; -- 數學 🙂",
    )
    return EpisodeGroup(
        "gsm8k ' \" % 数学",
        [
            rich,
            conversation(),
            Episode(prompt_ids=[1, 2, 3], response_ids=[], text=""),
            Episode(token_ids=[], loss_mask=[]),
            Episode(
                prompt_ids=[1],
                response_ids=[2],
                policy_version=3,
                extras={"state": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)},
            ),
            *sample_episodes(),
        ],
        prompt_uid="gsm8k/17",
        group_uid="a uid: 100% 'quoted'",
        priority=1e-5,
        tags={"level": "hard", "n": 3, "x": 0.1, "deep": {"list": [1, None, False]}, "ключ": "ø"},
        expected_episodes=64,
        prompt=[{"role": "user", "content": ["数学 '", 2**63, None, 0.1]}],
        prompt_ids=[2**31 - 1, -(2**31)],
        extras={dtype: array_of(dtype, (2, 3), 3) for dtype in DTYPES}
        | {"reward": np.float16(1.5), "empty": np.zeros((0, 4), np.int64)},
    )


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_everything_comes_back_bit_for_bit(
    store: Store, url: str, compression: Compression | None
) -> None:
    buffer = await store.buffer("math", compression=compression)
    given = everything()
    [group_id] = await buffer.put(given)
    async with Store.open(url) as second:
        batch = await (await second.buffer("math")).sample(1)
    [drawn], [read] = batch.groups, await buffer.get([group_id])
    assert drawn == given
    assert read == given
    assert drawn.episodes == given.episodes
    assert [one.text for one in drawn.episodes] == [one.text for one in given.episodes]
    assert isinstance(drawn.episodes[4].extras["state"], torch.Tensor)
    assert drawn.episodes[0].extras["float16"].dtype == np.float16


async def test_metadata_of_a_group(store: Store) -> None:
    buffer = await store.buffer("math")
    await buffer.advance_policy(10)
    before = datetime.now(UTC)
    [group_id] = await buffer.put(group(version=7, prompt_uid="p"))
    [stored] = await buffer.get([group_id])
    assert (stored.id, stored.staleness, stored.times_sampled, stored.attempts) == (1, 3, 0, 0)
    assert stored.run_id == (await store.runs())[0].id
    assert timedelta(0) <= stored.created_at - before < timedelta(minutes=1)
    assert stored.completed_at == stored.created_at
    assert (stored.first_sampled_at, stored.last_sampled_at, stored.archived_at) == (None,) * 3
    assert stored.status_reason is None


async def test_columns_for_analysis(buffer: Buffer, url: str) -> None:
    rows = [episode(1.0, 3, text="yes"), episode(0.0, 5), episode(None, 4)]
    [group_id] = await buffer.put(EpisodeGroup("gsm8k", rows, prompt_uid="p", tags={"a": [1]}))
    facts = await group_facts(url, group_id)
    expected = {
        "prompt_uid": "p", "num_episodes": 3, "num_tokens": 15, "has_transcript": True,
        "min_policy_version": 3, "max_policy_version": 5, "staleness": -3, "reward_mean": 0.5,
        "reward_std": 0.5, "reward_min": 0.0, "reward_max": 1.0, "tags": {"a": [1]},
        "priority": 1.0, "weight": 1.0, "lease_id": None, "expected_episodes": None,
    }  # fmt: skip
    assert {name: facts[name] for name in expected} == expected
    assert facts["num_bytes"] > 0


async def test_ids_come_in_the_order_of_the_groups(buffer: Buffer) -> None:
    given = [group(f"{i}", task) for i, task in enumerate(["b", "a", "b", "c", "a"])]
    ids = await buffer.put(given)
    assert ids == sorted(ids)
    assert [one.group_uid for one in await buffer.get(ids)] == ["0", "1", "2", "3", "4"]
    [single] = await buffer.put(group())
    assert single > ids[-1]
    assert await buffer.put(one for one in groups(2)) == [single + 1, single + 2]


async def test_an_empty_put_is_a_no_op(buffer: Buffer, url: str) -> None:
    assert await buffer.put([]) == []
    assert await table_sizes(url) == NOTHING
    assert (await buffer.stats()).tasks == ()


async def test_a_large_put_is_stored_completely(buffer: Buffer) -> None:
    given = [long_group(f"{i}", 20_000) for i in range(6)]
    assert await buffer.get(await buffer.put(given)) == given


async def test_a_uid_is_stored_once(buffer: Buffer, url: str) -> None:
    await buffer.put(group("a"))
    before = await table_sizes(url)
    with pytest.raises(rdb.DuplicateGroupError, match="already in the buffer: a ") as caught:
        await buffer.put([group("b", "code"), group("a"), long_group("c", 5)])
    assert caught.value.group_uids == ("a",)
    assert await table_sizes(url) == before
    assert await _counts(buffer) == {"gsm8k": 1}


async def test_on_duplicate_ignore_keeps_the_stored_group(buffer: Buffer) -> None:
    first = group("a", priority=2.0)
    [kept] = await buffer.put(first)
    ids = await buffer.put([group("b"), group("a", "code", priority=9.0)], on_duplicate="ignore")
    assert ids == [kept + 1, kept]
    assert await buffer.get([kept]) == [first]
    assert await buffer.put(first, on_duplicate="ignore") == [kept]
    assert await _counts(buffer) == {"gsm8k": 2}


async def test_a_group_is_replaced_under_its_id(buffer: Buffer, url: str) -> None:
    ids = await buffer.put([long_group("a", 9), group("b"), group("c", "code")])
    await buffer.sample(3, rdb.Fifo())
    new = group("a", priority=5.0, version=2, rewards=[1, 2, 3], tags={"new": True})
    assert await buffer.put([group("d"), new], on_duplicate="replace") == [4, ids[0]]
    [stored] = await buffer.get([ids[0]])
    assert stored == new
    assert (stored.times_sampled, stored.first_sampled_at, stored.staleness) == (0, None, -2)
    sizes = {"episode_group": 4, "payload": 4, "episode": 9, "transcript": 0}
    assert await table_sizes(url) == sizes
    assert await _counts(buffer) == {"gsm8k": 3, "code": 1}


@postgresql_nightly
async def test_replacing_a_group_updates_task_counters(buffer: Buffer, url: str) -> None:
    await buffer.put([group("b"), group("c", "code")])
    statuses = ("completed", "failed")
    for task, before, after in product(("gsm8k", "code", "new"), statuses, statuses):
        uid = f"{task} {before} {after}"
        await buffer.put(group(uid, status=before, priority=3.0))
        await buffer.put(group(uid, task, status=after, priority=7.0), on_duplicate="replace")
        await check_invariants(url)
        assert await buffer.count(tasks=task, where=rdb.col.group_uid == uid) == 1
        counts = await _counts(buffer)
        batch = await buffer.sample(sum(counts.values()), rdb.Prioritized())
        assert sum(batch.probabilities) == pytest.approx(1.0)


async def test_groups_that_cannot_be_put(buffer: Buffer, url: str) -> None:
    """Groups with invalid values; `test_checks.py` covers objects that are not groups."""
    cases = [
        ([group("a"), group("b"), group("a")], "groups[2].group_uid"),
        ([group(status="leased")], "status"),
        ([group(), group(status="pending")], "status"),
    ]
    for wrong, field in cases:
        with pytest.raises(rdb.InvalidInputError) as caught:
            await buffer.put(wrong)
        assert caught.value.field == field
    assert await table_sizes(url) == NOTHING


async def test_statuses_that_are_not_sampled(buffer: Buffer) -> None:
    given = [group(status=status) for status in ("completed", "aborted", "failed", "filtered")]
    ids = await buffer.put([*given, EpisodeGroup("gsm8k", [], status="failed")])
    assert [one.status for one in await buffer.get(ids)] == [
        GroupStatus.COMPLETED,
        GroupStatus.ABORTED,
        GroupStatus.FAILED,
        GroupStatus.FILTERED,
        GroupStatus.FAILED,
    ]
    assert (await buffer.get(ids))[1].completed_at is None
    assert (await buffer.sample(5, at_least=1)).ids == ids[:1]


async def test_a_group_too_stale_when_it_is_put(store: Store) -> None:
    buffer = await store.buffer("math", max_staleness={"gsm8k": 1})
    await buffer.advance_policy(5)
    given = [
        group(version=4),
        group(version=3),
        group(version=3, task="code"),
        group(version=3, status="failed"),
        group(version=3, status="aborted"),
        group(),
    ]
    found = await buffer.get(await buffer.put(given))
    assert [one.status.value for one in found] == [
        "completed", "expired", "completed", "failed", "expired", "completed",
    ]  # fmt: skip
    assert found[1].status_reason
    assert [one.staleness for one in found] == [1, 2, 2, 2, 2, None]
    assert await _counts(buffer) == {"gsm8k": 2, "code": 1}


async def _counts(buffer: Buffer) -> dict[str, int]:
    """Drawable groups of every task that has any; the counter must agree with the table."""
    accounts = {one.task_name: one.num_available for one in (await buffer.stats()).tasks}
    for task_name, number in accounts.items():
        assert await buffer.count(tasks=task_name, statuses="completed") == number
    return {task_name: number for task_name, number in accounts.items() if number}


async def test_numbers_are_stored_as_numbers(store: Store, url: str) -> None:
    """Drivers get no scalars of numpy, which SQLite would store as bytes."""
    scalar: Any = np
    buffer = await store.buffer("numbers", max_staleness=scalar.int64(4))
    tokens = np.arange(4)
    turn = Turn(prompt_ids=tokens, response_ids=tokens, policy_version=tokens)
    turns = EpisodeGroup("turns", [Episode(turns=[turn, turn], reward=scalar.float32(0.5))])
    await buffer.put([turns, group(priority=scalar.float32(2), version=3)])
    await buffer.open_group("gsm8k", "open", 1)
    await buffer.add_episode("open", episode(), position=scalar.int64(0))
    async with buffer.lease(2, ttl=scalar.float32(60), step=scalar.int32(3)):
        await buffer.sample(1, Prioritized())
        assert await wrong_numbers(url) == {}
    assert await wrong_numbers(url) == {}


@postgresql_nightly
async def test_turns_without_their_context_are_stored_and_logged_once(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [Turn(prompt_ids=[1], response_ids=[2]), Turn(prompt_ids=[1, 2, 3], response_ids=[4])]
    await buffer.put(EpisodeGroup("t", [Episode(turns=whole), episode()]))
    await buffer.open_group("t", "open", 3)
    await buffer.add_episode("open", Episode(turns=whole))
    assert "turn" not in caplog.text
    cut = Episode(turns=[*whole, Turn(prompt_ids=[5], response_ids=[6])])
    for uid in ("first", "second"):
        [id_] = await buffer.put(EpisodeGroup("t", [episode(), cut], group_uid=uid))
        await buffer.add_episode("open", cut)
    assert (await buffer.get([id_]))[0].episodes[1] == cut
    [message] = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "the prompt of turn 2 (from 0) of episode 1 of group 'first' does not begin" in message
    assert "a token of these episodes is stored 1.0 times" in message


async def test_extras_of_shared_tokens_that_are_stored_again_are_logged_once(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = list(range(1000, 4000))
    experts = np.zeros((3000, 32), np.uint8)

    def agent(noise: int) -> Episode:
        """Return an episode whose extra differs in the first token of each turn."""
        turns = []
        for i in range(4):
            experts[0] = i * noise + 1
            end = 600 * (i + 1)
            extras = {"experts": experts[: end + 50]}
            turns.append(
                Turn(prompt_ids=tokens[:end], response_ids=tokens[end:][:50], token_extras=extras)
            )
        return Episode(turns=turns)

    [equal, *different] = [
        (await buffer.put(EpisodeGroup("t", [agent(noise)], group_uid=f"g{i}")))[0]
        for i, noise in enumerate((0, 1, 1))
    ]
    await buffer.open_group("t", "open", 3)
    await buffer.add_episode("open", agent(1))
    repeated = 32 * (650 + 1250 + 1850)
    groups = await buffer.get([equal, *different])
    assert [one.repeated_bytes for one in groups] == [{}] + 2 * [{"experts": repeated}]
    assert (await buffer.get(different, fields=()))[0].repeated_bytes == {}
    [message] = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "extras of group 'g1' are stored again for tokens that its turns" in message
    assert f"which takes {repeated} of its " in message
    assert "most of them in 'experts'" in message


@postgresql_nightly
async def test_few_bytes_of_extras_that_are_stored_again_are_not_logged(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    """100 tokens of 1,000 differ in 1 KB of extras each."""
    experts = np.arange(1000 * 256, dtype=np.float32).reshape(1000, 256)
    other = experts.copy()
    other[800] += 1
    several = [
        Episode(prompt_ids=range(900), response_ids=[i] * 100, token_extras={"experts": values})
        for i, values in enumerate((experts, other))
    ]
    [id_] = await buffer.put(EpisodeGroup("t", several))
    assert (await buffer.get([id_]))[0].repeated_bytes == {"experts": 100 * 1024}
    assert caplog.text == ""


async def test_the_log_has_how_often_repeated_contexts_are_stored(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    """A date in front of all other tokens differs in each turn."""
    tokens = list(range(1000, 2500))
    turns = [
        Turn(
            prompt_ids=[day, *tokens[: 100 * day]], response_ids=tokens[100 * day : 100 * day + 50]
        )
        for day in range(1, 15)
    ]
    await buffer.put(EpisodeGroup("t", [Episode(turns=turns)]))
    assert "a token of these episodes is stored 7.6 times" in caplog.text


async def test_an_added_episode_without_its_context_is_logged(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    await buffer.open_group("t", "open", 2)
    await buffer.add_episode("open", conversation())
    assert "turn 1 (from 0) of episode 0 of group 'open'" in caplog.text
