"""The checks of the attack on trajectories find each violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from torture.attacks.trajectories import MAX_ATTEMPTS, Trajectory, check, check_groups
from torture.checker import Entry, Tables

HERE = ("group", 0)
LOST, KEPT = 1, 2  # processes


def call(name: str, begin: float, pid: int, uid: str, claim: str | None, **more: Any) -> Entry:
    detail = {"uid": uid, "claim": claim, "group": "group", "position": 0, "digest": uid, **more}
    return Entry(name, begin, begin + 0.5, pid, detail)


def claimed(begin: float, pid: int, uid: str, seen: list[str]) -> Entry:
    detail = {"claim": uid, "group": "group", "seen": {"0": seen}}
    return Entry("claim", begin, begin + 0.1, pid, detail)


def attempt(one: Entry) -> Entry:
    """Return what is logged before a call."""
    return replace(one, call="try", detail={"call": one.call, **one.detail})


END: dict[str, Any] = {"discarded": ["b"], "reward": 0.5}


def sound() -> tuple[list[Entry], dict[tuple[str, int], Trajectory]]:
    """A process appends "a" and "b", and is frozen; another one appends "d" and finishes."""
    done = [
        *[call("turn", 1.0, LOST, "a", "old"), call("turn", 2.0, LOST, "b", "old")],
        *[call("turn", 5.0, KEPT, "d", "new"), call("finish", 7.0, KEPT, "end", "new", **END)],
    ]
    refused = call("refused", 6.0, LOST, "c", "old")
    tries = [attempt(one) for one in (*done, refused)]
    leave = Entry("leave", 4.0, 7.6, KEPT, {"claim": "new"})  # from the claim on
    freeze = Entry("freeze", 3.0, 4.5, 0, LOST)
    claims = [claimed(0.0, LOST, "old", []), claimed(4.0, KEPT, "new", ["a", "b"])]
    turns = {uid: uid for uid in "abd"}
    return [*claims, *tries, *done, refused, freeze, leave], {
        HERE: Trajectory(turns, frozenset("b"), 0.5, "end")
    }


def late(uid: str, claim: str | None, begin: float, name: str = "turn") -> list[Entry]:
    """A successful call."""
    one = call(name, begin, LOST, uid, claim, **END)
    return [attempt(one), one]


def stores(*uids: str) -> dict[str, Any]:
    return {"turns": {uid: uid for uid in uids}}


VIOLATIONS: dict[str, tuple[list[Entry], dict[str, Any]]] = {
    "acknowledged turns are lost": ([], stores("a", "b")),
    "other content": ([], {"turns": {"a": "a", "b": "x", "d": "d"}}),
    "no process appended": ([], stores("a", "b", "d", "x")),
    "whose append was refused": ([], stores("a", "b", "d", "c")),
    "turns of several claims alternate": (late("e", "old", 2.6)[:1], stores("a", "b", "d", "e")),
    "a turn began after its claim": (late("e", "old", 4.6), stores("a", "b", "e", "d")),
    "a turn began after its claim or place": (late("e", None, 8.0), stores("a", "b", "d", "e")),
    "a release began after": (late("r", "old", 8.0, "release"), {}),
    "a claim at the same time": ([claimed(4.2, LOST, "third", ["a", "b"])], {}),
    "turns are not in a later claim": (late("e", "old", 2.6), stores("a", "b", "e", "d")),
    "turns have changed": ([], stores("b", "a", "d")),
    "an acknowledged finish is lost": ([], {"ended_by": "other", "reward": None}),
    "an acknowledged fail is lost": (late("fail", "new", 7.0, "fail"), {}),
    "ended by a call that was refused": ([], {"ended_by": "c", "reward": None}),
    r"is not .*frozenset\(\{'b'\}\)": ([], {"discarded": frozenset()}),
    "is not .*0.5": ([], {"reward": 0.25}),
}


def test_a_sound_trajectory() -> None:
    check(*sound())


@pytest.mark.parametrize("text", VIOLATIONS)
def test_a_violation_is_found(text: str) -> None:
    entries, found = sound()
    more, changes = VIOLATIONS[text]
    with pytest.raises(AssertionError, match=text):
        check([*entries, *more], {HERE: replace(found[HERE], **changes)})


def test_a_turn_that_is_stored_twice_is_found() -> None:
    entries, found = sound()
    with pytest.raises(AssertionError, match="stored twice"):
        check(entries, {**found, ("group", 1): Trajectory({"a": "a"})})


def tables() -> Tables:
    """A completed group of two positions, one of them unusable, which was drawn once."""
    group = {
        **{"id": 1, "group_status": "completed", "completed_at": 1.0},
        **{"num_episodes": 1, "expected_episodes": 2, "min_episodes": 1},
    }
    empty: dict[str, Any] = {field.name: [] for field in fields(Tables)}
    place = {"group_id": 1, "position": 1, "attempts": MAX_ATTEMPTS, "unusable_reason": "expired"}
    return Tables(**empty | {
        "groups": [group],
        "episodes": [{"group_id": 1, "position": 0}],
        "trajectories": [place],
        "tasks": [{"num_sampled": 1}],
        "drawn": [{"group_id": 1}],
    })  # fmt: skip


Break = Callable[[Tables], Any]
BREAKS: dict[str, Break] = {
    "an open position at the last attempt": lambda it: it.trajectories[0].update(
        unusable_reason=None
    ),
    "more attempts": lambda it: it.trajectories[0].update(attempts=MAX_ATTEMPTS + 1),
    "an open position": lambda it: it.trajectories[0].update(unusable_reason=None, attempts=0),
    "a position without an end": lambda it: it.trajectories.clear(),
    "a position with two ends": lambda it: it.trajectories[0].update(position=0),
    "a group that ends too late": lambda it: it.groups[0].update(group_status="pending"),
    "too few episodes": lambda it: it.groups[0].update(min_episodes=None),
    "a drawn group that was never complete": lambda it: it.groups[0].update(
        completed_at=None, group_status="failed", min_episodes=2
    ),
    "a claim that is counted as a draw": lambda it: it.tasks[0].update(num_sampled=2),
}


@pytest.mark.parametrize("name", [None, *BREAKS])
def test_tables_that_are_wrong_are_found(name: str | None) -> None:
    found = tables()
    if name is None:
        check_groups(found)
        return
    BREAKS[name](found)
    with pytest.raises(AssertionError):
        check_groups(found)
