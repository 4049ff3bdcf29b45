"""A policy small enough to learn in seconds: answer a digit by repeating it twice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import replaydb as rdb

NUM_DIGITS = 10
LENGTH = 2
COMPLETIONS = 4


class Policy(nn.Module):
    """One distribution for each prompt and position: a table of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(NUM_DIGITS, LENGTH, NUM_DIGITS))

    def logprobs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Logprobs of response tokens [N, R] to prompts [N, 1]."""
        table = self.table[prompts[:, -1], : responses.shape[1]].log_softmax(dim=-1)
        return table.gather(2, responses[:, :, None]).squeeze(2)

    @torch.no_grad()
    def complete(self, digit: int, version: int, generator: torch.Generator) -> rdb.EpisodeGroup:
        """Sample completions of one prompt, and reward the share of tokens that are right."""
        probabilities = self.table[digit].softmax(dim=-1)
        sampled = torch.multinomial(probabilities, COMPLETIONS, True, generator=generator).T
        prompts = torch.full((COMPLETIONS, 1), digit)
        return rdb.EpisodeGroup(
            "repeat",
            [
                rdb.Episode(
                    prompt_ids=prompt,
                    response_ids=response,
                    logprobs=logprobs,
                    reward=(response == digit).float().mean().item(),
                    policy_version=version,
                )
                for prompt, response, logprobs in zip(
                    prompts, sampled, self.logprobs(prompts, sampled), strict=True
                )
            ],
            prompt_uid=str(digit),
        )

    @torch.no_grad()
    def expected_reward(self) -> float:
        """Chance that a token is right, mean over prompts and positions."""
        right = self.table.softmax(dim=-1).diagonal(dim1=0, dim2=2)
        return right.mean().item()
