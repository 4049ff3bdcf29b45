"""The checks of the attack on annotations find each violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from torture.attacks.judges import check
from torture.checker import Entry, Tables

Log = list[Entry]


def logged(call: str, begin: float, detail: Any) -> Entry:
    return Entry(call, begin, begin + 0.5, 1, detail)


def annotated(begin: float, call: str, *values: tuple[str, int, float]) -> Log:
    detail = {"call": call, "values": [list(value) for value in values]}
    return [logged("try", begin, detail), logged("annotate", begin, detail)]


def row(group_id: int, number: int, author: str, value: float, previous: float) -> dict[str, Any]:
    names = {"group_id": group_id, "number": number, "position": 0, "name": "reward"}
    return {**names, "author": author, "value": value, "previous": previous}


def sound() -> tuple[Log, Tables]:
    """Two groups get a value; one is drawn, gets another value, and the other one is replaced."""
    log = [
        *[logged("content", 0.0, {"uid": uid, "rewards": [-1.0, -2.0]}) for uid in "ab"],
        *annotated(1.0, "first", ("a", 0, 0.25), ("b", 0, 0.5)),
        logged("sample", 2.0, {"draw": 7, "rewards": {"a": [0.25, -2.0]}}),
        *annotated(3.0, "second", ("a", 0, 0.75)),
        logged("content", 4.0, {"uid": "b", "rewards": [-3.0]}),
        logged("changing", 4.0, {"uid": "b", "call": "third"}),
        logged("changed", 4.0, {"uid": "b", "call": "third"}),
        logged("refused", 5.0, {"call": "fourth"}),
        logged("try", 5.0, {"call": "fourth", "values": [["b", 0, 0.125]]}),
    ]
    empty: dict[str, Any] = {field.name: [] for field in fields(Tables)}
    groups = [
        {"id": 1, "group_uid": "a", "times_annotated": 2, "reward_mean": -0.625}
        | {"reward_min": -2.0, "reward_max": 0.75},
        {"id": 2, "group_uid": "b", "times_annotated": 0, "reward_mean": -3.0}
        | {"reward_min": -3.0, "reward_max": -3.0},
    ]
    episodes = [(1, 0, 0.75), (1, 1, -2.0), (2, 0, -3.0)]
    names = ("group_id", "position", "reward")
    return log, Tables(**empty | {
        "groups": groups,
        "episodes": [dict(zip(names, one, strict=True)) for one in episodes],
        "annotations": [row(1, 1, "first", 0.25, -1.0), row(1, 2, "second", 0.75, 0.25)],
        "history": [{"draw_id": 7, "reward_mean": -0.875}],
    })  # fmt: skip


def test_sound_annotations() -> None:
    check(*sound())


Break = Callable[[Log, Tables], Any]


def repeat(log: Log, tables: Tables) -> None:
    """Store the second value twice."""
    tables.annotations.append(row(1, 3, "second", 0.75, 0.75))
    tables.groups[0].update(times_annotated=3)


def tear(log: Log, tables: Tables) -> None:
    """A process was killed, and one of its two values is stored."""
    log.append(annotated(6.0, "torn", ("a", 0, 0.375), ("b", 0, 0.625))[0])
    tables.annotations.append(row(2, 1, "torn", 0.625, -3.0))
    tables.groups[1].update(times_annotated=1)


VIOLATIONS: dict[str, Break] = {
    "acknowledged values are lost": lambda log, it: it.annotations.pop(),
    "is stored twice": repeat,
    "only some values of torn": tear,
    "refused, or not sent": lambda log, it: it.annotations.append(row(2, 1, "fourth", 0.125, -3)),
    "not sent": lambda log, it: it.annotations.append(row(2, 1, "unknown", 0.125, -3)),
    "second has stored": lambda log, it: it.annotations[1].update(value=0.5),
    "rewards of .* are not the last": lambda log, it: it.episodes[0].update(reward=0.25),
    "a value before .* is lost": lambda log, it: it.annotations[1].update(previous=-1.0),
    r"\[1, 2\]": lambda log, it: it.groups[0].update(times_annotated=3),
    "'group_uid': 'b'": lambda log, it: it.episodes[2].update(reward=-4.0),
    "-0.625, -2.0, 0.75": lambda log, it: it.groups[0].update(reward_max=0.25),
    "'draw': 7": lambda log, it: it.history[0].update(reward_mean=-0.625),
}


@pytest.mark.parametrize("text", VIOLATIONS)
def test_a_violation_is_found(text: str) -> None:
    log, tables = sound()
    VIOLATIONS[text](log, tables)
    with pytest.raises(AssertionError, match=text):
        check(log, tables)
