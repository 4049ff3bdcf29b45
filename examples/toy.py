"""Shared code of the small examples: a task that is learned in seconds, and a step of GRPO.

The task is to answer a digit by repeating it twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import replaydb as rdb
from replaydb.training import advantages, importance

NUM_DIGITS = 10
LENGTH = 2
COMPLETIONS = 4


class Policy(nn.Module):
    """A table of logits: one distribution for each prompt and position.

    Attributes:
        version: Number of training steps so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(NUM_DIGITS, LENGTH, NUM_DIGITS))
        self.version = 0

    def logprobs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Return the logprobs of response tokens, float32 [N, R], to prompts [N, 1]."""
        table = self.table[prompts[:, -1], : responses.shape[1]].log_softmax(dim=-1)
        return table.gather(2, responses[:, :, None]).squeeze(2)

    @torch.no_grad()
    def complete(self, digit: int, generator: torch.Generator) -> list[rdb.Episode]:
        """Sample completions of one prompt. The reward is the share of right tokens."""
        probabilities = self.table[digit].softmax(dim=-1)
        responses = torch.multinomial(probabilities, COMPLETIONS, True, generator=generator).T
        logprobs = self.logprobs(torch.full((COMPLETIONS, 1), digit), responses)
        return [
            rdb.Episode(
                prompt_ids=[digit],
                response_ids=response,
                logprobs=of_response,
                reward=(response == digit).float().mean().item(),
                policy_version=self.version,
            )
            for response, of_response in zip(responses, logprobs, strict=True)
        ]

    @torch.no_grad()
    def expected_reward(self) -> float:
        """Return the probability that a token is right, as a mean over prompts and positions."""
        right = self.table.softmax(dim=-1).diagonal(dim1=0, dim2=2)
        return right.mean().item()


def grpo_step(policy: Policy, optimizer: torch.optim.Optimizer, batch: rdb.Batch) -> None:
    """Take one step of clipped policy gradient, on new and replayed groups alike."""
    tensors = batch.split(pad_token_id=0)
    assert tensors.logprobs is not None
    gain = tensors.per_token(advantages.grpo(tensors.rewards, tensors.group_index))
    logprobs = policy.logprobs(tensors.prompt_ids, tensors.response_ids)
    ratio = importance.token_ratios(logprobs, tensors.logprobs, tensors.loss_mask)
    surrogate = torch.minimum(ratio * gain, importance.clipped(ratio, 0.2) * gain)
    loss = -surrogate[tensors.loss_mask].sum() / tensors.loss_mask.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    policy.version += 1
