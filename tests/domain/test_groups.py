"""Groups of episodes: their attributes, and the error for each mistake."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb.domain.episodes import Episode, EpisodeGroup, GroupStatus
from replaydb.domain.episodes.group import RewardStats, reward_stats
from replaydb.errors import InvalidInputError
from support import samples
from support.examples import examples

A_NUMBER = "a finite number"
MESSAGES = "text or a sequence of messages (JSON objects)"


def completion(**changes: Any) -> Episode:
    return Episode(**{"prompt_ids": [1, 2, 3], "response_ids": [4, 5, 6, 7]} | changes)


def group(**changes: Any) -> EpisodeGroup:
    return EpisodeGroup(**{"task_name": "math", "episodes": [completion()]} | changes)


def test_group_defaults() -> None:
    made = group()
    assert (made.status, made.priority, made.tags) == (GroupStatus.COMPLETED, 1.0, {})
    assert (made.prompt_uid, made.expected_episodes) == (None, None)
    assert len(made.group_uid) == 32
    assert made.group_uid != group().group_uid
    assert made.episodes == (completion(),)
    assert (
        repr(made)
        == f"EpisodeGroup('math', 1 episodes, group_uid='{made.group_uid}', status='completed')"
    )


def test_group_attributes() -> None:
    rewards: list[float | None] = [1.0, None, 0.0, 2.0]
    made = group(
        episodes=[completion(reward=r, policy_version=v) for v, r in enumerate(rewards, 3)]
    )
    assert (made.num_episodes, made.num_tokens, made.num_loss_tokens) == (4, 28, 16)
    np.testing.assert_array_equal(made.rewards, [1, np.nan, 0, 2])
    assert (made.reward_mean, made.reward_min, made.reward_max) == (1.0, 0.0, 2.0)
    assert made.reward_std == pytest.approx(math.sqrt(2 / 3))
    assert (made.min_policy_version, made.max_policy_version) == (3, 6)


def test_group_without_rewards_or_versions() -> None:
    made = group(episodes=[completion(policy_version=3), completion()])
    assert made.reward_mean is made.reward_std is made.reward_min is made.reward_max is None
    assert made.min_policy_version is made.max_policy_version is None
    empty = group(episodes=[], status="pending", expected_episodes=4)
    assert (empty.num_tokens, empty.rewards.shape, empty.min_policy_version) == (0, (0,), None)


def test_group_equality() -> None:
    base = group(group_uid="a", tags={"level": 1})
    assert base == group(group_uid="a", tags={"level": 1})
    for change in (
        {"group_uid": "b"},
        {"task_name": "code"},
        {"prompt_uid": "p"},
        {"priority": 2},
        {"status": "failed"},
        {"tags": {"level": 1.0}},
        {"expected_episodes": 3},
        {"episodes": [completion(reward=1)]},
        {"prompt": "1 + 1 = "},
        {"prompt_ids": [1, 2]},
        {"extras": {"image": np.zeros(2)}},
    ):
        assert base != group(**{"group_uid": "a", "tags": {"level": 1}} | change), change
    assert base != "base"


@pytest.mark.parametrize(
    ("arguments", "field", "expected", "actual"),
    [
        ({"task_name": ""}, "task_name", "1 to 255 characters", "0 characters"),
        ({"task_name": "x" * 256}, "task_name", "1 to 255 characters", "256 characters"),
        ({"task_name": None}, "task_name", "a str", "None"),
        ({"prompt_uid": 17}, "prompt_uid", "a str", "17"),
        ({"group_uid": "a\0"}, "group_uid", "no NUL character", "one at 1"),
        ({"group_uid": ""}, "group_uid", "1 to 255 characters", "0 characters"),
        ({"priority": -1.0}, "priority", f"{A_NUMBER} >= 0", "-1.0"),
        ({"priority": math.nan}, "priority", f"{A_NUMBER} >= 0", "nan"),
        ({"status": "done"}, "status", "one of " + ", ".join(GroupStatus), "'done'"),
        ({"tags": {"a": math.inf}}, "tags.a", A_NUMBER, "inf"),
        ({"episodes": []}, "episodes", "at least one in a completed group", "none"),
        ({"episodes": [completion(), 1]}, "episodes[1]", "Episode", "int"),
        ({"episodes": None}, "episodes", "a sequence of Episode", "None"),
        ({"expected_episodes": 0}, "expected_episodes", "an integer from 1 to 2147483647", "0"),
        ({"prompt": {"role": "user"}}, "prompt", MESSAGES, "{'role': 'user'}"),
        ({"prompt": ["user"]}, "prompt", MESSAGES, "['user']"),
        ({"prompt": 3}, "prompt", MESSAGES, "int"),
        ({"prompt": [{"content": b"png"}]}, "prompt[0].content", "JSON values", "bytes"),
        ({"tags": {"a": "\0"}}, "tags.a", "no NUL character", "one at 0"),
        ({"prompt_ids": [0.5]}, "prompt_ids", "integers", "dtype float64"),
        ({"extras": [1]}, "extras", "a mapping of names to arrays", "list"),
        ({"extras": {"": [1]}}, "extras name", "1 to 255 characters", "0 characters"),
        ({"extras": {"a": "text"}}, "extras['a']", "a bool, integer or float array", "dtype <U4"),
        ({"expected_episodes": 1.0}, "expected_episodes", "an integer", "1.0"),
        (
            {"episodes": [completion()] * 2, "expected_episodes": 1},
            "expected_episodes",
            "an integer from 2 to 2147483647",
            "1",
        ),
    ],
)
def test_invalid_groups(arguments: dict[str, Any], field: str, expected: str, actual: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        group(**arguments)
    assert (caught.value.field, caught.value.expected) == (field, expected)
    assert str(caught.value.actual) == actual


def test_statuses_are_lower_case_names() -> None:
    assert [status.value for status in GroupStatus] == [
        name.lower() for name in GroupStatus.__members__
    ]
    assert group(status=GroupStatus.LEASED).status is group(status="leased").status


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(samples.episode(), max_size=4))
def test_a_group_has_its_episodes(episodes: list[Episode]) -> None:
    made = group(episodes=episodes, status="failed")
    assert made.episodes == tuple(episodes)
    assert made.num_episodes == len(episodes)
    assert made.num_tokens == sum(one.num_tokens for one in episodes)
    assert made.num_loss_tokens == sum(one.num_loss_tokens for one in episodes)
    np.testing.assert_array_equal(made.rewards, np.array([one.reward for one in episodes], float))
    np.testing.assert_array_equal(
        made.advantages, np.array([one.advantage for one in episodes], float)
    )
    oldest = [one.min_policy_version for one in episodes]
    newest = [one.max_policy_version for one in episodes]
    known = bool(episodes) and None not in oldest
    assert made.min_policy_version == (min(filter_none(oldest)) if known else None)
    assert made.max_policy_version == (max(filter_none(newest)) if known else None)


def filter_none(values: list[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def test_texts_stay_with_their_episodes() -> None:
    made = group(episodes=[completion(text="a"), completion(), completion(text="")])
    assert made.texts == [one.text for one in made.episodes] == ["a", None, ""]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], RewardStats()),
        ([math.nan], RewardStats()),
        ([2.0], RewardStats(2.0, 0.0, 2.0, 2.0)),
        ([0.1] * 7, RewardStats(0.1, 0.0, 0.1, 0.1)),
        ([math.nan, 1.0, 3.0], RewardStats(2.0, 1.0, 1.0, 3.0)),
    ],
)
def test_reward_stats(rewards: list[float], expected: RewardStats) -> None:
    assert reward_stats(np.array(rewards)) == expected


def test_a_group_without_episodes_has_its_prompt_and_its_media() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    message = {"role": "user", "content": [{"type": "image"}]}
    made = group(
        episodes=[], status="aborted", prompt=(message,), prompt_ids=(7, 8), extras={"image": image}
    )
    image += 1
    message["role"] = "system"
    assert made.prompt == [{"role": "user", "content": [{"type": "image"}]}]
    assert made.prompt_ids is not None
    assert made.prompt_ids.dtype == np.int32
    assert made.prompt_ids.tolist() == [7, 8]
    assert not made.extras["image"].any()
    assert group(prompt="2 + 2 = ").prompt == "2 + 2 = "
    # datasets return numpy arrays of messages
    assert group(prompt=np.array([{"role": "user"}], object)).prompt == [{"role": "user"}]


def test_prompt_ids_default_to_the_common_prompt() -> None:
    longer = completion(prompt_ids=[1, 2, 3, 4])
    for episodes, expected in (
        ([completion(), completion(response_ids=[9])], [1, 2, 3]),
        ([completion(), longer], None),
        ([completion(), completion(prompt_ids=[1, 2, 4])], None),
        ([completion(prompt_ids=[])] * 2, []),
        ([], None),
    ):
        found = group(episodes=episodes, status="failed").prompt_ids
        assert (None if found is None else found.tolist()) == expected
    given = group(episodes=[completion(), longer], prompt_ids=[1, 2]).prompt_ids
    assert given is not None
    assert given.tolist() == [1, 2]
