"""Annotation: values of a stored episode or turn that arrive later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replaydb.domain import checks
from replaydb.domain.episodes.turns import set_fields
from replaydb.errors import InvalidInputError

#: Values that are numbers.
NUMBERS = ("reward", "advantage")
#: Prefix of the names of single values of the metadata.
METADATA = "metadata."


def value_name(field: str, value: object) -> str:
    """Check for the name of a value that episodes can lack: a number, or one of the metadata.

    Raises:
        InvalidInputError: It is none.
    """
    known = checks.name(field, value)
    if known in NUMBERS or known.removeprefix(METADATA) not in ("", known):
        return known
    expected = "'reward', 'advantage' or 'metadata.NAME'"
    raise InvalidInputError(field, expected, repr(value))


def has_value(name: str, facts: Mapping[str, Any]) -> bool:
    """Whether an episode, given by columns of its row, has a value."""
    if name in NUMBERS:
        return facts[name] is not None
    return name.removeprefix(METADATA) in facts["metadata"]


@dataclass(frozen=True)
class Annotation:
    """Values to add to an episode, or to one of its turns, after it was stored.

    Values that are not given stay as they are.

    Attributes:
        group_uid: Uid of the group.
        position: Position of the episode in its group, from 0.
        turn: The turn, by its uid or by its number in the episode, from 0. None: the episode
            itself.
        reward: A number in the range of float32. That of a turn replaces its `token_rewards`, and
            the extra of that name of its episode. A turn can have one if its episode has one. The
            reward of an episode does not follow from later rewards of its turns.
        advantage: A number in the range of float32; only of an episode.
        metadata: JSON values by name. Names that the metadata has already get the new values.

    Raises:
        InvalidInputError: A value is invalid, or there is none.
    """

    group_uid: str
    position: int
    turn: str | int | None = None
    reward: float | None = None
    advantage: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check = checks.name if isinstance(self.turn, str) else checks.whole_number
        set_fields(
            self,
            group_uid=checks.name("group_uid", self.group_uid),
            position=checks.whole_number("position", self.position, most=checks.INT32[1]),
            turn=checks.optional(check, "turn", self.turn),
            reward=checks.optional(checks.reward, "reward", self.reward),
            advantage=checks.optional(checks.float32, "advantage", self.advantage),
            metadata=checks.json_object("metadata", self.metadata, checks.text),
        )
        if self.turn is not None and self.advantage is not None:
            raise InvalidInputError("advantage", "None for a turn", self.advantage)
        if not self.numbers and not self.metadata:
            raise InvalidInputError("annotation", "a reward, advantage or metadata", "none of them")

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that are given, by name."""
        given = {name: getattr(self, name) for name in NUMBERS}
        return {name: value for name, value in given.items() if value is not None}
