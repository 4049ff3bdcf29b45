"""GAE, compared with values computed by hand and with the textbook recursion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import InvalidInputError
from replaydb.training.critics import gae, terminal_rewards


def test_by_hand() -> None:
    """Deltas of the tokens in the loss: 0 + 0.5 * 2 - 1 = 0, and 4 - 2 = 2."""
    mask = torch.tensor([[False, True, False, True]])
    rewards = torch.tensor([[9.0, 0.0, 9.0, 4.0]])
    values = torch.tensor([[9.0, 1.0, 9.0, 2.0]], requires_grad=True)
    found, returns = gae(rewards, values, mask, discount=0.5, decay=0.5)
    assert found.tolist() == [[0.0, 0.25 * 2, 0.0, 2.0]]
    assert returns.tolist() == [[0.0, 1.5, 0.0, 4.0]]
    assert not returns.requires_grad


def test_outcome_rewards_are_on_the_last_token_of_the_loss() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    rewards = torch.tensor([1.0, 2.0, 3.0, float("nan")])
    assert terminal_rewards(rewards, mask).tolist() == [
        [0, 0, 1, 0],
        [0, 0, 0, 2],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert terminal_rewards(torch.ones(2), torch.zeros(2, 0).bool()).shape == (2, 0)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 9))
def test_gae_matches_the_recursion(seed: int, rows: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.standard_normal((2, rows, width))
    mask = rng.random((rows, width)) < 0.6
    found, returns = gae(
        torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), discount=0.9, decay=0.8
    )
    for row in range(rows):
        advantage = following = 0.0
        for token in reversed(range(width)):
            if not mask[row, token]:
                assert found[row, token] == returns[row, token] == 0.0
                continue
            delta = rewards[row, token] + 0.9 * following - values[row, token]
            advantage = delta + 0.9 * 0.8 * advantage
            following = values[row, token]
            assert float(found[row, token]) == pytest.approx(advantage, abs=1e-9)
            assert float(returns[row, token]) == pytest.approx(advantage + following, abs=1e-9)


def test_shapes_must_agree() -> None:
    with pytest.raises(InvalidInputError, match="one shape"):
        gae(torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2).bool())
