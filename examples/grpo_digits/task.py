"""The task: write eight digits in ascending order. Rewards are computed by a rule, not a model."""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "sort-digits"
NUM_DIGITS = 8
SEPARATOR = 10  # the last token of a prompt, and the stop token of a response
VOCABULARY_SIZE = 11
PROMPT_LENGTH = NUM_DIGITS + 1
SEQUENCE_LENGTH = PROMPT_LENGTH + NUM_DIGITS


def training_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Return random prompts that are not held out, int64 [count, PROMPT_LENGTH]."""
    return _prompts(count, generator, held_out=False)


def held_out_prompts(count: int) -> Tensor:
    """Return held-out prompts, the same on every call, int64 [count, PROMPT_LENGTH]."""
    return _prompts(count, torch.Generator().manual_seed(0), held_out=True)


def lengths_of(responses: Tensor) -> Tensor:
    """Return the number of tokens of each response up to its stop token, int64 [count]."""
    ends = responses == SEPARATOR
    return torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, NUM_DIGITS)


def rewards_of(prompts: Tensor, responses: Tensor) -> Tensor:
    """Return the share of the eight positions with the right digit, float32 [count], 0 to 1."""
    answers = prompts[:, :NUM_DIGITS].sort(dim=1).values
    written = torch.arange(NUM_DIGITS) < lengths_of(responses)[:, None]
    return ((responses == answers) & written).float().mean(dim=1)


def to_text(tokens: Tensor) -> str:
    """Return a prompt or a response as text."""
    return "".join(">" if token == SEPARATOR else str(token) for token in tokens.tolist())


def _prompts(count: int, generator: torch.Generator, *, held_out: bool) -> Tensor:
    # Prompts whose digits sum to a multiple of ten are held out, which is one in ten. The last
    # digit of a random prompt is corrected accordingly, so that no prompt has to be rejected.
    digits = torch.randint(10, (count, NUM_DIGITS), generator=generator)
    excess = digits.sum(dim=1) % 10
    if held_out:
        shift = excess
    else:
        other = torch.randint(1, 10, (count,), generator=generator)
        shift = torch.where(excess == 0, other, 0)
    digits[:, -1] = (digits[:, -1] - shift) % 10
    return torch.cat([digits, torch.full((count, 1), SEPARATOR)], dim=1)
