"""Priorities of groups, compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replaydb import Episode, EpisodeGroup
from replaydb.training import priorities
from support.batches import stored_group
from support.groups import group


def test_reward_std() -> None:
    assert priorities.reward_std(group(rewards=[1.0, 0.0])) == 0.5
    assert priorities.reward_std(group(rewards=[0.1] * 7)) == 0.0
    assert priorities.reward_std(group(rewards=[None])) == 0.0


def test_stored_advantages_are_used_if_all_episodes_have_one() -> None:
    stored = [
        Episode(token_ids=[1], loss_mask=[1], reward=reward, advantage=advantage)
        for reward, advantage in ((1.0, 3.0), (0.0, -1.0))
    ]
    assert priorities.mean_absolute_advantage(EpisodeGroup("t", stored)) == 2.0
    assert priorities.advantage_times_std(EpisodeGroup("t", stored)) == 2.0


def test_grpo_advantages_are_used_otherwise() -> None:
    fresh = group(rewards=[1.0, 0.0])
    expected = 0.5 / (0.5**0.5 + 1e-4)
    assert priorities.mean_absolute_advantage(fresh) == pytest.approx(expected)
    assert priorities.advantage_times_std(fresh) == pytest.approx(2 * expected * 0.5)
    assert priorities.advantage_times_std(group(rewards=[0.1] * 5)) == 0.0


def test_learnability() -> None:
    assert priorities.Learnability()(group(rewards=[1.0, 0.0, 0.5, 0.0])) == 0.1875
    assert priorities.Learnability(solved=0.5)(group(rewards=[1.0, 0.0, 0.5, 0.0])) == 0.25
    assert priorities.Learnability()(group(rewards=[None, 1.0])) == 0.0
    assert priorities.Learnability()(group(rewards=[None])) == 0.0


def test_linear_decay() -> None:
    one = Episode(token_ids=[1], loss_mask=[1], policy_version=5)
    assert priorities.LinearDecay()(EpisodeGroup("t", [one])) == 5.0
    stored = stored_group([one])
    stored.times_sampled = 2
    assert priorities.LinearDecay()(stored) == 1.0
    assert priorities.LinearDecay(decay=4.0)(stored) == 0.0
    assert priorities.LinearDecay()(group()) == 0.0


def test_td_errors() -> None:
    errors = np.array([[1.0, -3.0, 9.0], [0.5, 9.0, 9.0], [2.0, 2.0, 2.0]])
    mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    index = np.array([0, 0, 1])
    found = priorities.td_errors(errors, mask, index, 3, eta=0.5, eps=0.0)
    np.testing.assert_allclose(found, [0.5 * 3 + 0.5 * 1.5, 0.0, 0.0])
    of_tensors = priorities.td_errors(
        torch.tensor(errors, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(mask),
        torch.tensor(index),
        3,
    )
    np.testing.assert_allclose(of_tensors, [0.9 * 3 + 0.1 * 1.5 + 1e-6, 1e-6, 1e-6])
