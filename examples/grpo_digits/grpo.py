"""Group relative policy optimization (Shao et al., 2024, DeepSeekMath) on stored groups."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.grpo_digits.model import Policy
from replaydb.training import PaddedBatch, importance


def token_logprobs(policy: Policy, token_ids: Tensor) -> Tensor:
    """Return the logprobs of tokens given the previous ones, [count, length]; 0 for the first."""
    logits, _ = policy(token_ids[:, :-1])
    following = token_ids[:, 1:].unsqueeze(2)
    logprobs = logits.log_softmax(dim=-1).gather(2, following).squeeze(2)
    return torch.nn.functional.pad(logprobs, (1, 0))


def clipped_loss(
    logprobs: Tensor, batch: PaddedBatch, advantages: Tensor, clip: float = 0.2
) -> Tensor:
    """Compute the clipped surrogate loss of PPO (Schulman et al., 2017), averaged over loss tokens.

    A batch can be the share of one rank, without tokens in the loss: then it is 0.

    The ratio is relative to the policy that generated the tokens, however old it is. This is why
    replay is valid, and why the store keeps behaviour logprobs.

    Args:
        logprobs: Logprobs under the policy being trained, [count, length].
        batch: The completions.
        advantages: One per completion, [count].
        clip: Ratios are clipped to [1 - clip, 1 + clip].
    """
    assert batch.logprobs is not None
    ratio = importance.token_ratios(logprobs, batch.logprobs, batch.loss_mask)
    gain = batch.per_token(advantages)
    surrogate = torch.minimum(ratio * gain, importance.clipped(ratio, clip) * gain)
    return -surrogate[batch.loss_mask].sum() / batch.loss_mask.sum().clamp(min=1)
