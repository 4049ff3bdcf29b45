"""The checks of the attack on annotations find each violation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from torture.attacks.judges import SETTINGS, check, check_claims, check_waiting
from torture.checker import Entry, Tables

Log = list[Entry]


def logged(call: str, begin: float, detail: Any) -> Entry:
    return Entry(call, begin, begin + 0.5, 1, detail)


def annotated(begin: float, call: str, *values: tuple[str, int, float], **more: Any) -> Log:
    named = [[uid, position, "reward", value] for uid, position, value in values]
    detail = {"call": call, "values": named, **more}
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
        logged("try", 5.0, {"call": "fourth", "values": [["b", 0, "reward", 0.125]]}),
    ]
    empty: dict[str, Any] = {field.name: [] for field in fields(Tables)}
    groups = [
        {"id": 1, "group_uid": "a", "times_annotated": 2, "reward_mean": -0.625}
        | {"expected_episodes": None}
        | {"reward_min": -2.0, "reward_max": 0.75},
        {"id": 2, "group_uid": "b", "times_annotated": 0, "reward_mean": -3.0}
        | {"expected_episodes": None}
        | {"reward_min": -3.0, "reward_max": -3.0},
    ]
    episodes = [(1, 0, 0.75), (1, 1, -2.0), (2, 0, -3.0)]
    names = ("group_id", "position", "reward", "metadata")
    return log, Tables(**empty | {
        "groups": groups,
        "episodes": [dict(zip(names, (*one, "{}"), strict=True)) for one in episodes],
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


def label(log: Log, tables: Tables) -> None:
    """Store a label in the history, but not in the row of its episode."""
    log.append(logged("try", 6.0, {"call": "l", "values": [["b", 0, "metadata.label", 0.5]]}))
    new = {"name": "metadata", "changes": json.dumps({"label": {"to": 0.5}})}
    tables.annotations.append(row(2, 1, "l", 0.0, 0.0) | new)
    tables.groups[1].update(times_annotated=1)


VIOLATIONS: dict[str, Break] = {
    "acknowledged values are lost": lambda log, it: it.annotations.pop(),
    "is stored twice": repeat,
    "only some values of torn": tear,
    "refused, or not sent": lambda log, it: it.annotations.append(row(2, 1, "fourth", 0.125, -3)),
    "not sent": lambda log, it: it.annotations.append(row(2, 1, "unknown", 0.125, -3)),
    "second has stored": lambda log, it: it.annotations[1].update(value=0.5),
    "values of .* are not the last": lambda log, it: it.episodes[0].update(reward=0.25),
    "last ones, .*'metadata.label'.: 0.5": label,
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


def claimed(begin: float, claim: str) -> Entry:
    detail = {"claim": claim, "uid": "a", "positions": [0], "name": "reward"}
    return Entry("claim", begin, begin + 0.1, 1, detail)


def given(begin: float, claim: str) -> Log:
    return annotated(begin, claim, ("a", 0, 0.5), claim=claim, name="reward")


CLAIMS = {
    "began after its claim had ended": given(2.5, "old"),
    "began when the episode had its reward": given(4.0, "new"),
    "a claim at the same time": [claimed(2.7, "third")],
}


@pytest.mark.parametrize("text", [None, *CLAIMS])
def test_a_wrong_claim_is_found(text: str | None) -> None:
    """A claim expires while its process is frozen; another one gives the value."""
    frozen = Entry("freeze", 1.0, 2.0, 0, 1)
    log = [claimed(0.0, "old"), frozen, claimed(2.5, "new"), *given(2.9, "new")]
    check_claims(log)
    if text is not None:
        with pytest.raises(AssertionError, match=text):
            check_claims([*log, *CLAIMS[text]])


def waiting() -> tuple[Log, Tables]:
    """A group that waits for a reward and two labels, and one that has all values."""
    empty: dict[str, Any] = {field.name: [] for field in fields(Tables)}
    state = {"task_name": "waiting", "attempts": 0, "status_reason": "waits for reward"}
    row = {"group_id": 1, "unusable_reason": None}
    missing = [(0, "reward"), (0, "metadata.label"), (1, "metadata.label")]
    labelled = {"group_id": 2, "position": 0, "reward": 0.5, "metadata": '{"label": 1}'}
    return [], Tables(**empty | {
        "groups": [
            {"id": 1, "group_uid": "a", "group_status": "pending", **state},
            {"id": 2, "group_uid": "b", "group_status": "completed", **state},
        ],
        "episodes": [
            {"group_id": 1, "position": 0, "reward": None, "metadata": "{}"},
            {"group_id": 1, "position": 1, "reward": 0.5, "metadata": "{}"},
            labelled,
        ],
        "trajectories": [{**row, "position": at, "missing": name} for at, name in missing],
        "drawn": [{"group_id": 2}],
    })  # fmt: skip


def close(**values: Any) -> Break:
    """Close the group that waits."""
    return lambda _, it: it.groups[0].update(values)


def give_up(log: Log, tables: Tables) -> None:
    """Close all that a group waits for, but leave it pending."""
    for one in tables.trajectories:
        one["unusable_reason"] = "attempts"


WAITS: list[tuple[str, int, Break]] = [
    ("which it has", 0, lambda _, it: it.episodes[0].update(reward=0.5)),
    ("which it has", 0, lambda _, it: it.groups[0].update(task_name="code")),
    ("does not wait for .*reward", 0, lambda _, it: it.episodes[1].update(reward=None)),
    ("has nothing open", 1, give_up),
    ("'attempts'", 0, lambda _, it: it.trajectories[0].update(unusable_reason="attempts")),
    ("is closed without", 0, close(group_status="failed")),
    ("is not failed", 1, close(group_status="completed")),
    ("without a reason", 1, close(group_status="failed", status_reason=None)),
    ("is completed without", 2, close(group_status="completed")),
    ("was drawn without", 1, lambda _, it: it.drawn.append({"group_id": 1})),
    ("drawn without", 1, lambda log, _: log.append(logged("hold", 1.0, {"lacking": ["a"]}))),
]


@pytest.mark.parametrize(("text", "settings", "wrong"), WAITS)
def test_a_group_that_waits_wrongly_is_found(text: str, settings: int, wrong: Break) -> None:
    log, tables = waiting()
    check_waiting(log, tables, SETTINGS[settings])
    wrong(log, tables)
    with pytest.raises(AssertionError, match=text):
        check_waiting(log, tables, SETTINGS[settings])
