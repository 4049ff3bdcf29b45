"""Off-policy training on stored groups of another policy, without an event loop.

A behaviour policy that answers at random fills a buffer once. Another policy is trained on this
buffer alone. Groups are drawn in proportion to their learnability, for which the importance weights
of the batch correct, and tokens are weighted by truncated importance ratios.

    python -m examples.off_policy
"""

from __future__ import annotations

import tempfile

import torch

import replaydb as rdb
from examples.toy import NUM_DIGITS, Policy
from replaydb import blocking
from replaydb.training import advantages, importance, priorities

STEPS = 60
GROUPS = 100


def fill(url: str) -> None:
    """Put the groups of an earlier run."""
    generator = torch.Generator().manual_seed(0)
    behaviour = Policy()
    groups = [
        rdb.EpisodeGroup("repeat", behaviour.complete(i % NUM_DIGITS, generator))
        for i in range(GROUPS)
    ]
    with blocking.Store.open(url, run="behaviour") as store:
        store.buffer("repeat").put(groups, priority=priorities.Learnability(solved=0.5))


def train(url: str, steps: int = STEPS) -> tuple[float, dict[str, float]]:
    """Train. Return the expected reward, and off-policy statistics of the last step."""
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    summary: dict[str, float] = {}
    with blocking.Store.open(url, run="learner") as store:
        buffer = store.buffer("repeat", create=False)
        with buffer.loader(16, rdb.Prioritized(beta=1.0), num_steps=steps) as loader:
            for batch in loader:
                tensors = batch.split(pad_token_id=0)
                assert tensors.logprobs is not None
                logprobs = policy.logprobs(tensors.prompt_ids, tensors.response_ids)
                ratios = importance.token_ratios(logprobs, tensors.logprobs, tensors.loss_mask)
                gain = advantages.rloo(tensors.rewards, tensors.group_index) * tensors.weights
                weights = importance.truncated(ratios, cap=2.0) * tensors.per_token(gain)
                total = -(weights * logprobs)[tensors.loss_mask].sum()
                loss = total / tensors.loss_mask.sum().clamp(min=1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                summary = importance.off_policyness(logprobs, tensors.logprobs, tensors.loss_mask)
    return policy.expected_reward(), summary


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/replay.db"
        fill(url)
        reward, summary = train(url)
    print(f"expected reward: {reward:.2f}, at random: {1 / NUM_DIGITS}")
    print(f"effective sample size: {summary['ratio/ess']:.2f}, KL: {summary['kl/k3']:.2f}")


if __name__ == "__main__":
    main()
