"""Data of a group besides its episodes: prompt and extras."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import Array, ArrayLike, named_arrays, to_int32
from replaydb.domain.episodes.turns import same_fields
from replaydb.errors import InvalidInputError

Prompt: TypeAlias = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class GroupContext:
    """Input from which the episodes of a group are generated. False if nothing of it is known.

    Attributes:
        prompt: Text, or chat messages as JSON objects.
        prompt_ids: Token ids of the prompt, int32 [P].
        extras: Arrays of any shape by name.
    """

    prompt: Prompt | None = None
    prompt_ids: NDArray[np.int32] | None = None
    extras: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prompt: str | Iterable[Mapping[str, Any]] | None,
        prompt_ids: ArrayLike | None,
        extras: Mapping[str, ArrayLike] | None,
    ) -> Self:
        """Return checked copies of the arguments.

        Raises:
            InvalidInputError: An argument cannot be stored.
        """
        return cls(
            checks.optional(to_prompt, "prompt", prompt),
            checks.optional(to_int32, "prompt_ids", prompt_ids),
            named_arrays("extras", extras),
        )

    def __bool__(self) -> bool:
        return bool(self.extras) or self.prompt is not None or self.prompt_ids is not None

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, GroupContext) else NotImplemented


def to_prompt(name: str, value: Any) -> Prompt:
    """Return text, or a list of JSON objects.

    Raises:
        InvalidInputError: The value is neither.
    """
    if isinstance(value, str):
        return checks.text(name, value)
    expected = "text or a sequence of messages (JSON objects)"
    messages = [] if isinstance(value, Mapping) else list(checks.items(name, expected, value))
    if isinstance(value, Mapping) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidInputError(name, expected, repr(value))
    return [
        checks.json_object(f"{name}[{i}]", message, checks.text)
        for i, message in enumerate(messages)
    ]
