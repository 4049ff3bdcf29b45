"""The groups that everybody gets: plain numpy, and the same number always makes the same group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Group = dict[str, NDArray]

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of so many episodes of so many tokens."""

    episodes: int
    tokens: int

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.tokens // 4

    @property
    def fields(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and dtype of what belongs to one episode."""
        return {
            "token_ids": ((self.tokens,), np.int32),
            "mask": ((self.tokens,), np.bool_),
            "logprobs": ((self.tokens,), np.float32),
            "reward": ((), np.float32),
            "row": ((), np.int64),
        }


SHAPES = {"72 KB": Shape(8, 1024), "590 KB": Shape(8, 8192), "4.7 MB": Shape(16, 32_768)}


def make_group(number: int, shape: Shape) -> Group:
    """The group of that number; `row` names each episode."""
    rng = np.random.default_rng(number)
    size = shape.episodes, shape.tokens
    logprobs = rng.standard_normal(size, np.float32)
    logprobs[:, : shape.prompt] = 0.0
    mask = np.ones(size, np.bool_)
    mask[:, : shape.prompt] = False
    token_ids = rng.integers(0, 150_000, size, np.int32)
    token_ids[:, : shape.prompt] = token_ids[0, : shape.prompt]
    return {
        "token_ids": token_ids,
        "mask": mask,
        "logprobs": logprobs,
        "reward": (np.arange(shape.episodes) % 2).astype(np.float32),
        "row": number * shape.episodes + np.arange(shape.episodes),
    }


def number_of(group: Group) -> int:
    """What it was made from."""
    return int(group["row"][0]) // len(group["row"])


def concatenated(pieces: Iterable[Group]) -> Group:
    """One array [episodes, ...] for each field."""
    pieces = list(pieces)
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def touch(pieces: Iterable[Group]) -> int:
    """Read a byte of each page, so that what is mapped and not loaded is loaded."""
    return sum(_touched(array) for piece in pieces for array in piece.values())


def check(columns: Group, num_groups: int, shape: Shape, rng: np.random.Generator) -> None:
    """The right number of episodes, and one of them is what was put."""
    count = len(columns["row"])
    if count != num_groups * shape.episodes:
        raise AssertionError(f"{num_groups} groups were asked for, {count} episodes came")
    place = int(rng.integers(count))
    number, episode = divmod(int(columns["row"][place]), shape.episodes)
    expected = make_group(number, shape)
    for name in expected:
        if not np.array_equal(columns[name][place], expected[name][episode]):
            raise AssertionError(f"{name} of group {number} is not what was put")


def _touched(array: NDArray) -> int:
    if array.nbytes <= _PAGE:
        return int(array.item(0))
    return int(np.ascontiguousarray(array).reshape(-1).view(np.uint8)[::_PAGE].sum())
