"""Group relative policy optimisation (Shao et al., 2024, DeepSeekMath) on stored groups."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.grpo_digits.model import Policy
from replaydb.training import PaddedBatch, importance


def token_logprobs(policy: Policy, token_ids: Tensor) -> Tensor:
    """Logprob of every token given those before it, [count, length]; 0 for the first."""
    logits, _ = policy(token_ids[:, :-1])
    following = token_ids[:, 1:].unsqueeze(2)
    logprobs = logits.log_softmax(dim=-1).gather(2, following).squeeze(2)
    return torch.nn.functional.pad(logprobs, (1, 0))


def clipped_loss(
    logprobs: Tensor, batch: PaddedBatch, advantages: Tensor, clip: float = 0.2
) -> Tensor:
    """The clipped surrogate of PPO (Schulman et al., 2017), a mean over the masked tokens.

    The ratio is against the policy that wrote the tokens, however many versions ago that was:
    this is what makes replay sound, and why the store keeps behaviour logprobs.

    Args:
        logprobs: Under the policy being trained, [count, length].
        batch: The completions.
        advantages: One for each completion, [count].
        clip: How far a ratio may pull before it stops to matter.
    """
    assert batch.logprobs is not None
    ratio = importance.token_ratios(logprobs, batch.logprobs, batch.loss_mask)
    gain = batch.per_token(advantages)
    surrogate = torch.minimum(ratio * gain, importance.clipped(ratio, clip) * gain)
    return -surrogate[batch.loss_mask].mean()
