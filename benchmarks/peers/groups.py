"""The groups that everybody gets: plain numpy, and the same number always makes the same group."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Group = dict[str, NDArray]

EPISODES, TOKENS, PROMPT = 8, 1024, 256
FIELDS = {
    "token_ids": ((TOKENS,), np.int32),
    "mask": ((TOKENS,), np.bool_),
    "logprobs": ((TOKENS,), np.float32),
    "reward": ((), np.float32),
    "row": ((), np.int64),
}
_PAGE = 4096


def make_group(number: int) -> Group:
    """8 episodes of 1,024 tokens, of which 256 are prompt; `row` names each episode."""
    rng = np.random.default_rng(number)
    logprobs = rng.standard_normal((EPISODES, TOKENS), np.float32)
    logprobs[:, :PROMPT] = 0.0
    mask = np.ones((EPISODES, TOKENS), np.bool_)
    mask[:, :PROMPT] = False
    token_ids = rng.integers(0, 150_000, (EPISODES, TOKENS), np.int32)
    token_ids[:, :PROMPT] = token_ids[0, :PROMPT]
    return {
        "token_ids": token_ids,
        "mask": mask,
        "logprobs": logprobs,
        "reward": (np.arange(EPISODES) % 2).astype(np.float32),
        "row": number * EPISODES + np.arange(EPISODES),
    }


def number_of(group: Group) -> int:
    """What it was made from."""
    return int(group["row"][0]) // EPISODES


def concatenated(pieces: Iterable[Group]) -> Group:
    """One array [episodes, ...] for each field."""
    pieces = list(pieces)
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in FIELDS}


def touch(pieces: Iterable[Group]) -> int:
    """Read a byte of each page, so that what is mapped and not loaded is loaded."""
    return sum(_touched(array) for piece in pieces for array in piece.values())


def check(columns: Group, num_groups: int, rng: np.random.Generator) -> None:
    """The right number of episodes, and one of them is what was put."""
    count = len(columns["row"])
    if count != num_groups * EPISODES:
        raise AssertionError(f"{num_groups} groups were asked for, {count} episodes came")
    place = int(rng.integers(count))
    number, episode = divmod(int(columns["row"][place]), EPISODES)
    expected = make_group(number)
    for name in FIELDS:
        if not np.array_equal(columns[name][place], expected[name][episode]):
            raise AssertionError(f"{name} of group {number} is not what was put")


def _touched(array: NDArray) -> int:
    if array.nbytes <= _PAGE:
        return int(array.item(0))
    return int(np.ascontiguousarray(array).reshape(-1).view(np.uint8)[::_PAGE].sum())
