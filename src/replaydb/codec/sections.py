"""The tensors and the JSON of a payload, taken one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaydb.codec import framing
from replaydb.codec.framing import corrupt
from replaydb.domain import checks
from replaydb.domain.episodes.arrays import TORCH_CODES, Array, from_bits
from replaydb.domain.episodes.context import GroupContext, to_prompt
from replaydb.util import escapes

_T = TypeVar("_T")

#: Prefixes of extras: of episodes, of the tokens of an episode with turns, and of the group.
EPISODE, JOINT, GROUP = "episode/", "joint/", "group/"


class Sections:
    """The tensors and the JSON of a payload. What was taken is removed.

    Attributes:
        tensors: Tensors that were not taken yet.
        json: Values of the JSON object that were not taken yet.
    """

    def __init__(self, tensors: framing.Tensors) -> None:
        self.tensors = tensors
        self.json: dict[str, Any] = {}
        if (text := tensors.pop("json", None)) is not None:
            data = text[1].tobytes()
            self.json = framing.parse_json(data)
            if escapes.JSON_MARK in data:
                self.json = escapes.unescaped(self.json)

    def column(self, name: str, code: str, length: int | None = None) -> NDArray[Any]:
        """Take a tensor [length] of a type."""
        found, array = self.tensors.pop(name, (None, None))
        if array is None:
            corrupt(f"there is no {name}")
        if found != code or array.ndim != 1 or length not in (None, len(array)):
            wanted = "any" if length is None else length
            corrupt(f"{name} is {found} {list(array.shape)}, not {code} [{wanted}]")
        return array

    def optional(self, name: str, code: str, length: int | None) -> NDArray[Any] | None:
        """Take a tensor [length] of a type; None if there is none."""
        return self.column(name, code, length) if name in self.tensors else None

    def array(self, name: str) -> Array:
        """Take a tensor of any type and shape."""
        code, array = self.tensors.pop(name)
        return from_bits(array, TORCH_CODES.get(code, ""))

    def values(
        self, name: str, count: int | None, check: Callable[[Any], _T], absent: Callable[[], _T]
    ) -> tuple[_T, ...]:
        """Take a list of the JSON object, with `count` values; all are absent if there is none.

        `count`: None for any number.
        """
        if name not in self.json:
            return tuple([absent() for _ in range(count or 0)])
        values = self.json.pop(name)
        if not isinstance(values, list) or count not in (None, len(values)):
            corrupt(f"{name} is not a list of {count}")
        return tuple([check(value) for value in values])

    def texts(
        self, name: str, count: int, check: Callable[[str, object], str] = checks.string
    ) -> tuple[str | None, ...]:
        """Take a list of texts or None."""
        return self.values(name, count, lambda one: checks.optional(check, name, one), NoneType)

    def turn_of(self, name: str, known: Mapping[str, _T]) -> _T | None:
        """Take the uid of a turn from the JSON object, and return what is known by it."""
        if name not in self.json:
            return None
        uid = checks.name(name, self.json.pop(name))
        if uid not in known:
            corrupt(f"{name} names turn {uid!r}, which is missing")
        return known[uid]

    def metadata(self, name: str, count: int) -> tuple[dict[str, Any], ...]:
        """Take a list of JSON objects."""
        return self.values(name, count, _metadata, dict)

    def context(self) -> GroupContext:
        """Take the prompt and the extras of the group."""
        extras: dict[str, Array] = {}
        for section in [name for name in self.tensors if name.startswith(GROUP)]:
            name = checks.name(section, section.removeprefix(GROUP))
            extras[name] = self.array(section)
        return GroupContext(
            prompt=checks.optional(to_prompt, "prompt", self.json.pop("prompt", None)),
            prompt_ids=self.optional("prompt_ids", "I32", None),
            extras=extras,
        )

    def check_empty(self) -> None:
        """Check that everything was taken."""
        if self.tensors or self.json:
            corrupt(f"unknown sections {[*self.tensors, *self.json]}")


def is_beyond_float32(numbers: NDArray[np.float64]) -> bool:
    """Whether a number is infinite or beyond float32. NaN is neither."""
    return any([abs(number) > checks.FLOAT32_MAX for number in numbers.tolist()])


def _metadata(value: Any) -> dict[str, Any]:
    return checks.json_object("metadata", value, checks.text)
