"""Altered tensors of format 2 are refused with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from replaydb import codec
from replaydb.codec import compaction, format2
from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.episodes.context import GroupContext
from replaydb.errors import CorruptPayloadError


def sample() -> list[Episode]:
    one = Turn(
        prompt_ids=range(40),
        response_ids=[3, 4, 5],
        loss_mask=[1, 0, 1],
        logprobs=[-1.0, -2.0, -3.0],
        policy_version=[1, 2, 3],
        token_rewards=[1.0, 0.0, 2.0],
        token_extras={"x": range(1, 43)},
    )
    other = Turn(parent=one, new_ids=[6], response_ids=[7])
    extras: dict[str, Any] = {"token_rewards": [0.0, 0.0, 1.0]}
    alone = Episode(prompt_ids=[1], response_ids=[2, 3], token_extras=extras, extras={"y": [1]})
    return [Episode(turns=[one, other]), alone]


def altered(**changes: Any) -> list[Episode]:
    """Decode the sample with changed tensors: a function of the old one, a new one, or None."""
    parts = format2.parts_of(sample(), GroupContext())
    for name, change in changes.items():
        section = name.replace("__", "/")
        # a section about a column is in the part of this column
        [own] = [
            part for part in parts.values() if section in part or section.partition("/")[2] in part
        ] or [parts[None]]
        value = change(own[section]) if callable(change) else change
        own.pop(section, None)
        if value is not None:
            own[section] = value
    blobs = [bytes(compaction.write(part, 2, None)) for part in parts.values()]
    return codec.decode(blobs).episodes


def but_last(array: NDArray[Any]) -> NDArray[Any]:
    return array[:-1]


def at(*place: int, add: int) -> Any:
    """Return a function that changes a number of an array."""

    def change(array: NDArray[Any]) -> NDArray[Any]:
        array = array.copy()
        array[place] += add
        return array

    return change


def test_the_unchanged_parts_are_valid() -> None:
    assert altered() == sample()


ONE = np.array([1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # all columns but token extras have a value for the last token
        ({"missing__logprobs": ONE, "logprobs": but_last}, "logprobs covers tokens 40 to 42"),
        ({"missing__loss_mask": ONE}, "loss_mask covers tokens 40 to 42"),
        ({"missing__token_versions": ONE, "token_versions": but_last}, "covers tokens 40 to 42"),
        (
            {"missing__turn__token_rewards": ONE, "turn__token_rewards": but_last},
            "covers tokens 40 to 42",
        ),
        (
            {"missing__token__token_rewards": ONE, "token__token_rewards": but_last},
            "token/token_rewards covers tokens . to 2 of segment 2",
        ),
        ({"missing__token__x": np.array([2])}, "token/x covers tokens 0 to 41"),
        ({"missing__token__x": np.array([-1])}, "token/x covers tokens 0 to 44"),
        # a turn has rewards of its own
        (
            {"rows__token__token_rewards": ONE, "token__token_rewards": but_last},
            "token/token_rewards belongs to a turn",
        ),
        ({"begins__logprobs": np.array([40])}, "logprobs covers the context of a turn"),
        ({"begins__token__x": np.array([43])}, "token/x covers tokens 43 to 42"),
        ({"begins__token__x": ONE, "token__x": but_last}, "the parent of a segment does not have"),
        ({"rows__logprobs": np.array([4])}, r"logprobs belongs to \[4\] of 3"),
        ({"turn__token_rewards": but_last}, r"turn/token_rewards is F32 \[2\], not F32 \[3\]"),
        ({"turn__token_rewards": at(0, add=1)}, "the sum of token_rewards"),
        ({"token__x": but_last}, r"token/x is \[41\], not \[42, ...\]"),
        ({"segments": at(1, 0, add=1)}, "segment 1 begins with 43 tokens of segment 1"),
        ({"segments": at(0, 1, add=1)}, "segment 0 begins with 1 tokens of no segment"),
        ({"segments": at(2, 2, add=1)}, "segment 2 has 0, 2 and 2 tokens"),
        ({"segments": at(2, 2, add=-1)}, "47 tokens in segments, 48 stored"),
        ({"token_ids": but_last}, "segment 2 has"),
        ({"turns": at(0, add=1)}, r"\[3, 0\] turns of 3 segments"),
        ({"turns": at(0, add=-3)}, r"\[-1, 0\] turns of 3 segments"),
        ({"turn__parents": at(1, add=1)}, "turn 1 of an episode is the parent of turn 1"),
        (
            {
                "joint__policy_version": np.zeros((1, 3), np.int32),
                "rows__joint__policy_version": ONE,
            },
            "without turns",
        ),
        ({"token__reward": np.zeros(48)}, "reserved name"),
        ({"other": ONE}, "unknown sections"),
    ],
)
def test_the_error_has_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorruptPayloadError, match=reason):
        altered(**changes)
