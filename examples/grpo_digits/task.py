"""The task: write eight digits in ascending order. The reward is checked, not learned."""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "sort-digits"
NUM_DIGITS = 8
SEPARATOR = 10  # ends a prompt; a response that has it ends there
VOCABULARY_SIZE = 11
PROMPT_LENGTH = NUM_DIGITS + 1
SEQUENCE_LENGTH = PROMPT_LENGTH + NUM_DIGITS


def training_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Random prompts, int64 [count, PROMPT_LENGTH]; never one that is held out."""
    return _prompts(count, generator, held_out=False)


def held_out_prompts(count: int) -> Tensor:
    """Prompts for evaluation, the same on every call, int64 [count, PROMPT_LENGTH]."""
    return _prompts(count, torch.Generator().manual_seed(0), held_out=True)


def lengths_of(responses: Tensor) -> Tensor:
    """Tokens of each response up to its end, int64 [count]."""
    ends = responses == SEPARATOR
    return torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, NUM_DIGITS)


def rewards_of(prompts: Tensor, responses: Tensor) -> Tensor:
    """Share of the eight places that hold the right digit, float32 [count], from 0 to 1."""
    answers = prompts[:, :NUM_DIGITS].sort(dim=1).values
    written = torch.arange(NUM_DIGITS) < lengths_of(responses)[:, None]
    return ((responses == answers) & written).float().mean(dim=1)


def to_text(tokens: Tensor) -> str:
    """A prompt or a response as a person would write it."""
    return "".join(">" if token == SEPARATOR else str(token) for token in tokens.tolist())


def _prompts(count: int, generator: torch.Generator, *, held_out: bool) -> Tensor:
    # One prompt in ten is held out: those whose digits sum to a multiple of ten. The last digit
    # is corrected to put a random prompt on the right side, so no draw is ever thrown away.
    digits = torch.randint(10, (count, NUM_DIGITS), generator=generator)
    excess = digits.sum(dim=1) % 10
    if held_out:
        shift = excess
    else:
        other = torch.randint(1, 10, (count,), generator=generator)
        shift = torch.where(excess == 0, other, 0)
    digits[:, -1] = (digits[:, -1] - shift) % 10
    return torch.cat([digits, torch.full((count, 1), SEPARATOR)], dim=1)
