"""Groups for all peers: numpy arrays that are generated deterministically from a number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Group = dict[str, NDArray]

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of groups: episodes, and tokens per episode."""

    episodes: int
    tokens: int

    @property
    def prompt(self) -> int:
        """Number of tokens of the prompt."""
        return self.tokens // 4

    @property
    def fields(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and dtype of the fields of one episode."""
        return {
            "token_ids": ((self.tokens,), np.int32),
            "mask": ((self.tokens,), np.bool_),
            "logprobs": ((self.tokens,), np.float32),
            "reward": ((), np.float32),
            "row": ((), np.int64),
        }


SHAPES = {"72 KB": Shape(8, 1024), "590 KB": Shape(8, 8192), "4.7 MB": Shape(16, 32_768)}


def make_group(number: int, shape: Shape) -> Group:
    """Generate the group of a number; `row` identifies each episode."""
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
    """Return the number that a group was generated from."""
    return int(group["row"][0]) // len(group["row"])


def concatenated(parts: Iterable[Group]) -> Group:
    """Concatenate the arrays of each field to [episodes, ...]."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def touch(parts: Iterable[Group]) -> int:
    """Read a byte of each page, so that mapped pages are loaded."""
    return sum(_touched(array) for part in parts for array in part.values())


def check(columns: Group, num_groups: int, shape: Shape, rng: np.random.Generator) -> None:
    """Check the number of episodes, and compare a random episode with the one that was put."""
    count = len(columns["row"])
    if count != num_groups * shape.episodes:
        raise AssertionError(
            f"expected {num_groups * shape.episodes} episodes of {num_groups} groups, got {count}"
        )
    position = int(rng.integers(count))
    number, episode = divmod(int(columns["row"][position]), shape.episodes)
    expected = make_group(number, shape)
    for name in expected:
        if not np.array_equal(columns[name][position], expected[name][episode]):
            raise AssertionError(f"{name} of group {number} differs from the group that was put")


def _touched(array: NDArray) -> int:
    if array.nbytes <= _PAGE:
        return int(array.item(0))
    return int(np.ascontiguousarray(array).reshape(-1).view(np.uint8)[::_PAGE].sum())
