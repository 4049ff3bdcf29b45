"""Altered tensors of format 2 are refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from replaydb.domain.episodes import Episode, Ragged, Turn
from replaydb.errors import CorruptPayloadError
from support.payloads import altered, at, decode, encode, tensors_of

NO_VERSION = -(2**63)


def sample() -> list[Episode]:
    """Return an episode of two turns, and one without turns: segments 0, 1 and 2."""
    one = Turn(
        prompt_ids=range(40),
        response_ids=[3, 4, 5],
        loss_mask=[1, 0, 1],
        logprobs=[-1.0, -2.0, -3.0],
        policy_version=[1, 2, 3],
        token_rewards=[1.0, 0.0, 2.0],
        token_extras={"x": range(1, 43)},
    )
    other = Turn(
        parent=one, new_ids=[6], response_ids=[7], token_extras={"x": [*range(1, 43), 0, 0]}
    )
    extras: dict[str, Any] = {"token_rewards": [0.0, 0.0, 1.0]}
    alone = Episode(prompt_ids=[1], response_ids=[2, 3], token_extras=extras, extras={"y": [1]})
    return [Episode(turns=[one, other], token_extras={"z": range(88)}), alone]


DATA = encode(sample(), version=2)


def but_last(array: NDArray[Any]) -> NDArray[Any]:
    return array[:-1]


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def as_json(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def segments(*rows: Any) -> dict[str, Any]:
    """Return changes to segments with 40 tokens of their own in total, and no other column."""
    own = {"segments": np.array(rows, np.int64).reshape(-1, 4), "token_ids": np.zeros(40, np.int32)}
    return dict.fromkeys(tensors_of(DATA)) | own


def second(name: str, row: int, values: Any, begin: int | None = None, missing: int = 0) -> Any:
    """Return a second variant of a column, of one segment."""
    added = {f"~1/{name}": np.array(values), f"rows/~1/{name}": ints(row)}
    added |= {} if begin is None else {f"begins/~1/{name}": ints(begin)}
    return added | ({f"missing/~1/{name}": ints(missing)} if missing else {})


def x_of_the_first(values: Any, **options: Any) -> dict[str, Any]:
    """Return changes that give turn 1 a token extra x of another kind than turn 0."""
    of_first = {"token/x": lambda array: array[:42], "rows/token/x": ints(0)}
    of_first |= {"begins/token/x": ints(0), "missing/token/x": ints(1)}
    return of_first | dict(second("token/x", 1, values, **options))


#: Without rewards, so that extras may have their name.
UNREWARDED = dict.fromkeys(("turn/rewards", "turn/token_rewards", "rows/turn/token_rewards"))
UNVERSIONED = dict.fromkeys(("token_versions", "rows/token_versions"))


def test_the_unchanged_tensors_are_valid() -> None:
    assert decode(altered(DATA, {})).episodes == sample()
    assert [
        len(one.segments) for one in decode(altered(DATA, segments([-1, 0, 30, 10]))).episodes
    ] == [1]


STRUCTURE: list[tuple[dict[str, Any], str]] = [
    # parents
    ({"segments": at(1, 0, add=1)}, "segment 1 begins with 43 tokens of segment 1"),
    ({"segments": at(1, 0, add=2)}, "segment 1 begins with 43 tokens of segment 2"),
    ({"segments": at(1, 0, add=2**62)}, "segment 1 begins with 43 tokens of segment 4611"),
    ({"segments": at(1, 0, add=-1)}, "segment 1 begins with 43 tokens of no segment"),
    ({"segments": at(1, 0, add=-2)}, "segment 1 begins with 43 tokens of segment -2"),
    ({"segments": at(0, 1, add=1)}, "segment 0 begins with 1 tokens of no segment"),
    ({"segments": at(1, 1, add=1)}, "segment 1 begins with 44 tokens of segment 0"),
    ({"segments": at(1, 1, add=2**62)}, "segment 1 begins with 46116860184273879.. tokens of"),
    ({"segments": at(1, 1, add=-43)}, "segment 1 begins with 0 tokens, none of segment 0"),
    (segments([1, 9, 0, 20], [0, 9, 0, 20]), "segment 0 begins with 9 tokens of segment 1"),
    (
        segments([-1, 0, 20, 10], [0, 20, 1, 0], [1, 20, 8, 1]),
        "segment 2 begins with 20 tokens, none of segment 1 itself",
    ),
    # numbers of tokens
    ({"segments": at(0, 1, add=-1)}, "segment 0 has -1, 40 and 3 tokens"),
    ({"segments": at(0, 2, add=-41)}, "segment 0 has 0, -1 and 3 tokens"),
    ({"segments": at(0, 3, add=-4)}, "segment 0 has 0, 40 and -1 tokens"),
    ({"segments": at(2, 2, add=1)}, "segment 2 has 0, 2 and 2 tokens"),
    ({"segments": at(2, 2, add=-1)}, "47 tokens in segments, 48 stored"),
    ({"segments": at(0, 2, add=2**62)}, "segment 0 has 0, 4611686018427387944 and 3 tokens"),
    (segments([-1, 0, 2**63 - 1, 2**63 - 1]), "segment 0 has 0, 9223372036854775807 and 922"),
    (segments([-1, 0, 2**62, 0], [-1, 0, 2**63 - 1, 2**62 + 41]), "segment 0 has 0, 46116860"),
    (segments(), "0 tokens in segments, 40 stored"),
    ({"token_ids": but_last}, "segment 2 has 0, 1 and 2 tokens"),
    ({"token_ids": np.zeros(49, np.int32)}, "48 tokens in segments, 49 stored"),
    ({"token_ids": np.zeros(48, np.int64)}, r"token_ids is I64 \[48\], not I32"),
    ({"token_ids": np.zeros((48, 1), np.int32)}, r"token_ids is I32 \[48, 1\], not I32"),
    ({"token_ids": None}, "there is no token_ids"),
    ({"segments": np.zeros((3, 4), np.int32)}, r"segments is I32 \[3, 4\], not I64"),
    ({"segments": np.zeros((3, 4))}, r"segments is F64 \[3, 4\], not I64"),
    ({"segments": lambda array: array[:, :3]}, r"segments is I64 \[3, 3\], not I64"),
    ({"segments": lambda array: array[0]}, r"segments is I64 \[4\], not I64"),
    ({"segments": None}, "segments is"),
    # turns
    ({"turns": at(0, add=1)}, r"\[3, 0\] turns of 3 segments"),
    ({"turns": at(0, add=-3)}, r"\[-1, 0\] turns of 3 segments"),
    ({"turns": at(0, add=2**62)}, r"\[4611686018427387906, 0\] turns of 3 segments"),
    ({"turns": ints(2**63 - 1, 2**63 - 1, 5)}, r"\[9223372036854775807, .* turns of 3 segments"),
    ({"turns": ints(0, 0)}, r"\[0, 0\] turns of 3 segments"),
    ({"turns": ints(1, 2)}, "a turn"),  # the one without turns has what a turn may not have
    ({"turns": None}, "belongs to no turn"),
    ({"turns": np.array([2.0, 0.0])}, r"turns is F64 \[2\], not I64"),
    ({"turn/parents": at(1, add=1)}, "turn 1 of an episode is the parent of turn 1"),
    ({"turn/parents": at(0, add=2)}, "turn 1 of an episode is the parent of turn 0"),
    ({"turn/parents": at(1, add=-2)}, "turn -2 of an episode is the parent of turn 1"),
    ({"turn/parents": at(1, add=2**62)}, "turn 4611686018427387904 of an episode is the parent"),
    ({"turn/parents": but_last}, r"turn/parents is I64 \[1\], not I64 \[2\]"),
]

COLUMNS: list[tuple[dict[str, Any], str]] = [
    # which segments
    ({"rows/token/x": ints(1, 0)}, r"token/x belongs to \[1, 0\] of 3"),
    ({"rows/token/x": ints(0, 0)}, r"token/x belongs to \[0, 0\] of 3"),
    ({"rows/token/x": ints(-1, 0)}, r"token/x belongs to \[-1, 0\] of 3"),
    ({"rows/token/x": ints(0, 3)}, r"token/x belongs to \[0, 3\] of 3"),
    ({"rows/token/x": ints(0, 2**62)}, r"token/x belongs to \[0, 46116860184"),
    ({"rows/token/x": ints(0)}, r"begins/token/x is I64 \[2\], not I64 \[1\]"),
    ({"rows/token/x": None}, r"begins/token/x is I64 \[2\], not I64 \[3\]"),
    ({"rows/token/x": np.array([0, 1], np.int32)}, r"rows/token/x is I32 \[2\], not I64"),
    ({"rows/logprobs": ints(1)}, r"logprobs is F32 \[3\], not F32 \[1\]"),
    ({"rows/turn/token_rewards": ints(2), "turn/token_rewards": but_last}, "belongs to no turn"),
    (
        {"rows/token/token_rewards": ints(1), "token/token_rewards": but_last},
        "token/token_rewards belongs to a turn",
    ),
    # which tokens
    ({"begins/token/x": ints(43, 42)}, "token/x covers tokens 43 to 42 of segment 0"),
    ({"begins/token/x": ints(-1, 42)}, "token/x covers tokens -1 to 42 of segment 0"),
    ({"begins/token/x": ints(2**62, 42)}, "token/x covers tokens 4611686018427387904 to 42"),
    ({"begins/token/x": ints(-(2**63), 42)}, "token/x covers tokens -9223372036854775808 to 42"),
    ({"begins/token/x": ints(0)}, r"begins/token/x is I64 \[1\], not I64 \[2\]"),
    ({"begins/token/x": None}, r"token/x is \[44\], not \[4, \.\.\.\]"),
    ({"missing/token/x": ints(2, 1)}, "token/x covers tokens 0 to 41 of segment 0"),
    ({"missing/token/x": ints(-1, 1)}, "token/x covers tokens 0 to 44 of segment 0"),
    ({"missing/token/x": ints(1, 2**62)}, "token/x covers tokens 42 to -46116860184"),
    ({"missing/token/x": ints(1)}, r"missing/token/x is I64 \[1\], not I64 \[2\]"),
    ({"missing/token/x": None}, r"token/x is \[44\], not \[46, \.\.\.\]"),
    # all columns but token extras have a value for the last token
    (second("logprobs", 2, np.zeros(2, "f4"), 0, 1), "logprobs covers tokens 0 to 2 of segment 2"),
    (second("loss_mask", 2, np.zeros(1, "u1"), 0, 1), "mask covers tokens 0 to 2 of segment 2"),
    (second("token_versions", 2, np.zeros(2, "i4"), 0, 1), "covers tokens 0 to 2 of segment 2"),
    (
        {
            "begins/token/token_rewards": ints(0),
            "missing/token/token_rewards": ints(1),
        },
        "token/token_rewards covers tokens 0 to 2 of segment 2",
    ),
    ({"missing/token/token_rewards": ints(0)}, r"unknown sections \['missing/token/token_rewards'"),
    ({"missing/logprobs": ints(0)}, r"unknown sections \['missing/logprobs'\]"),
    # columns of turns that are no extras
    (
        {"begins/logprobs": ints(0), "logprobs": np.zeros(43, np.float32)},
        "logprobs covers the context of a turn",
    ),
    (
        {"begins/loss_mask": ints(0), "loss_mask": np.zeros(6, np.uint8)},
        "loss_mask covers the context of a turn",
    ),
    (
        {"begins/token_versions": ints(40)},
        "token_versions covers the context of a turn",
    ),
    (
        {"begins/turn/token_rewards": ints(0), "turn/token_rewards": np.zeros(43, np.float32)},
        "turn/token_rewards covers the context of a turn",
    ),
    # values of the parent
    (
        {"begins/token/x": ints(0, 43), "token/x": but_last},
        "token/x continues values that the parent of a segment does not have",
    ),
    (
        {"begins/token/x": ints(1, 42), "token/x": but_last},
        "token/x continues values that the parent of a segment does not have",
    ),
    (
        {
            "rows/token/x": ints(1),
            "begins/token/x": ints(42),
            "missing/token/x": ints(1),
            "token/x": lambda array: array[42:],
        },
        "token/x continues values that the parent of a segment does not have",
    ),
    (x_of_the_first([0.5, 0.5], begin=42, missing=1), "token/x continues values that the parent"),
    (x_of_the_first([[1], [2]], begin=42, missing=1), "token/x continues values that the parent"),
    (x_of_the_first(np.zeros(44), begin=0, missing=1), "one dtype and shape in all turns"),
    (second("loss_mask", 2, np.zeros(1, "u1"), 1), "loss_mask continues values of a parent"),
    (second("token_versions", 2, np.ones(2, "i4"), 1), "token_versions continues values of a"),
    (second("logprobs", 2, np.zeros(2, "f4"), 1), "logprobs continues values that the parent"),
    # values
    ({"token/x": but_last}, r"token/x is \[43\], not \[44, ...\]"),
    ({"token/x": np.zeros(())}, r"token/x is \[\], not \[44, ...\]"),
    ({"loss_mask": np.zeros(2, np.uint8)}, r"loss_mask is U8 \[2\], not U8 \[1\]"),
    ({"loss_mask": np.zeros(3, np.bool_)}, r"loss_mask is BOOL \[3\], not U8 \[1\]"),
    ({"logprobs": np.zeros(3)}, r"logprobs is F64 \[3\], not F32 \[3\]"),
    ({"logprobs": at(0, add=np.inf)}, "a logprob is infinite"),
    ({"logprobs": at(0, add=-np.inf)}, "a logprob is infinite"),
    ({"token_versions": ints(1, 2, 3)}, r"token_versions is I64 \[3\], not I32 \[3\]"),
    ({"turn/token_rewards": but_last}, r"turn/token_rewards is F32 \[2\], not F32 \[3\]"),
    ({"turn/token_rewards": at(0, add=1)}, "the sum of token_rewards"),
    ({"turn/token_rewards": at(0, add=np.nan)}, "a reward of a token is not finite"),
    ({"token/token_rewards": np.array([1e39, 0])}, "numbers in the range of float32"),
    (
        segments([-1, 0, 40, 0]) | {"token_versions": np.zeros(0, np.int32)},
        "versions per token of no token",
    ),
    # variants and names
    (second("token/x", 0, np.zeros(43), 0), "~1/token/x is the second one of a segment"),
    (second("loss_mask", 0, np.zeros(1, "u1")), "~1/loss_mask is the second one of a segment"),
    ({"~0/token/x": np.zeros(5)}, r"unknown sections \['~0/token/x'\]"),
    ({"~01/token/x": np.zeros(5)}, r"unknown sections \['~01/token/x'\]"),
    ({"~1000000000/token/x": np.zeros(5)}, r"unknown sections \['~1000000000/token/x'\]"),
    ({"~1/~2/token/x": np.zeros(5)}, r"unknown sections \['~1/~2/token/x'\]"),
    ({"~1/token_ids": np.zeros(48, np.int32)}, r"unknown sections \['~1/token_ids'\]"),
    ({"~1/rewards": np.zeros(2)}, r"unknown sections \['~1/rewards'\]"),
    ({"other": ints(1)}, r"unknown sections \['other'\]"),
    ({"rows/other": ints(1)}, r"unknown sections \['rows/other'\]"),
    ({"rows/token_ids": ints(0)}, r"unknown sections \['rows/token_ids'\]"),
    ({"begins/token_ids": ints(0, 0, 0)}, r"unknown sections \['begins/token_ids'\]"),
    ({"begins/episode/y": ints(0)}, r"unknown sections \['begins/episode/y'\]"),
    ({"lengths": ints(43, 45, 3)}, r"unknown sections \['lengths'\]"),
    ({"each/1/token/x": ints(1, 2, 3)}, r"unknown sections \['each/1/token/x'\]"),
    ({"token/": np.zeros(5)}, r"unknown sections \['token/'\]"),
    ({"token/reward": np.zeros(5)}, "an extra has the reserved name reward"),
    ({"token/policy_version": np.zeros(5)}, "an extra has the reserved name policy_version"),
    ({"token/" + "x" * 256: np.zeros(5)}, "expected 1 to 255 characters, got 256"),
    ({"token/a\0": np.zeros(5)}, "expected no NUL character"),
]

EPISODES: list[tuple[dict[str, Any], str]] = [
    # arrays of the tokens of all turns
    ({"rows/joint/z": ints(1)}, "of one episode .*, or belong to turns"),
    ({"joint/z": np.zeros((1, 87))}, "arrays of the turns of an episode do not have 88 values"),
    ({"joint/z": np.zeros(1)}, "arrays of the turns of an episode do not have 88 values"),
    ({"joint/z": np.zeros((2, 88))}, r"joint/z is \[2, 88\], not \[1, ...\]"),
    ({"joint/z": np.zeros(())}, r"joint/z is \[\], not \[1, ...\]"),
    ({"rows/joint/z": None}, r"joint/z is \[1, 88\], not \[2, ...\]"),
    ({"~1/joint/z": np.zeros((1, 88)), "rows/~1/joint/z": ints(0)}, "has a second value"),
    ({"joint/x": np.zeros((1, 88)), "rows/joint/x": ints(0)}, "have duplicate names"),
    ({"joint/token_rewards": np.zeros((1, 88)), "rows/joint/token_rewards": ints(0)}, "duplicate"),
    (
        UNREWARDED
        | {"joint/token_rewards": np.full((1, 88), 1e39), "rows/joint/token_rewards": ints(0)},
        "numbers in the range of float32",
    ),
    ({"joint/reward": np.zeros((1, 88)), "rows/joint/reward": ints(0)}, "reserved name reward"),
    ({"joint/": np.zeros((1, 88))}, r"unknown sections \['joint/'\]"),
    # policy versions
    *[
        (UNVERSIONED | {"joint/policy_version": array, "rows/joint/policy_version": ints(row)}, why)
        for array, row, why in (
            (np.zeros((1, 88), np.int64), 0, "versions per token are not I32"),
            (np.zeros((1, 88, 1), np.int32), 0, "versions per token are not I32"),
            (np.zeros((1, 0), np.int32), 0, "those of no token"),
            (np.zeros((1, 87), np.int32), 0, "do not have 88 values"),
            (np.zeros((1, 3), np.int32), 1, "or without turns"),
        )
    ],
    (
        {"joint/policy_version": np.zeros((1, 88), "i4"), "rows/joint/policy_version": ints(0)},
        "versions of turns, and of their episode",
    ),
    (
        segments([-1, 0, 0, 0], [-1, 0, 40, 0])
        | {"turns": ints(1, 1), "joint/policy_version": np.zeros((2, 0), np.int32)},
        "those of no token",
    ),
    ({"versions": ints(1, NO_VERSION)}, "versions of turns, and of their episode"),
    ({"versions": ints(NO_VERSION, 2**31)}, "are not 32-bit"),
    ({"versions": ints(1)}, r"versions is I64 \[1\], not I64 \[2\]"),
    ({"turn/versions": ints(1, NO_VERSION)}, "versions per token .* beside another version"),
    ({"turn/versions": ints(NO_VERSION, -(2**31) - 1)}, "are not 32-bit"),
    (
        second("token_versions", 2, np.ones(2, "i4")) | {"versions": ints(NO_VERSION, 1)},
        "beside another version",
    ),
    # rewards
    ({"rewards": np.array([3.0])}, r"rewards is F64 \[1\], not F64 \[2\]"),
    ({"rewards": np.array([3.0, np.inf])}, "one of rewards is beyond float32"),
    ({"rewards": np.array([np.nan, 1.0])}, "turns have rewards, and their episode has none"),
    ({"rewards": None}, "turns have rewards, and their episode has none"),
    ({"advantages": np.array([0, -1e39])}, "one of advantages is beyond float32"),
    ({"turn/rewards": np.array([3.0])}, r"turn/rewards is F64 \[1\], not F64 \[2\]"),
    ({"turn/rewards": np.array([3.0, 1e39])}, "one of turn/rewards is beyond float32"),
    ({"turn/rewards": np.array([np.nan, 3.0])}, "a turn has token rewards but no reward"),
    # extras
    ({"episode/y": np.zeros((2, 1))}, r"episode/y is \[2, 1\], not \[1, ...\]"),
    ({"episode/y": np.zeros(())}, r"episode/y is \[\], not \[1, ...\]"),
    ({"rows/episode/y": ints(2)}, r"episode/y belongs to \[2\] of 2"),
    ({"rows/episode/y": ints(-1)}, r"episode/y belongs to \[-1\] of 2"),
    ({"~1/episode/y": np.zeros(2)}, "~1/episode/y has a second value of episode 1"),
    ({"episode/x": np.zeros(2)}, "of one episode have duplicate names"),
    ({"episode/z": np.zeros(2)}, "of one episode have duplicate names"),
    ({"episode/token_rewards": np.zeros(2)}, "of one episode have duplicate names"),
    ({"episode/policy_version": np.zeros(2)}, "reserved name policy_version"),
    ({"episode/" + "x" * 256: np.zeros(2)}, "expected 1 to 255 characters, got 256"),
    # turns
    ({"turn/discarded": np.zeros(1, bool)}, r"turn/discarded is BOOL \[1\], not BOOL \[2\]"),
    ({"turn/discarded": ints(0, 1)}, r"turn/discarded is I64 \[2\], not BOOL \[2\]"),
    ({"json": as_json({"turn_uids": ["a"]})}, "turn_uids is not a list of 2"),
    ({"json": as_json({"turn_uids": ["a", "a"]})}, "expected a uid that no other turn of the grou"),
    ({"json": as_json({"turn_uids": ["", None]})}, "turn_uids: expected 1 to 255 characters"),
    ({"json": as_json({"turn_agents": ["", None]})}, "turn_agents: expected 1 to 255 characters"),
    ({"json": as_json({"turn_states": [3, None]})}, "turn_states: expected a str, got 3"),
    # the group, and JSON
    ({"prompt_ids": ints(1)}, r"prompt_ids is I64 \[1\], not I32"),
    ({"group/": np.zeros(2)}, "group/: expected 1 to 255 characters"),
    ({"json": np.zeros(2, np.uint8)}, "foreign or altered"),
    ({"json": as_json({"finish_reasons": ["a"]})}, "finish_reasons is not a list of 2"),
    ({"json": as_json({"turn_finish_reasons": [None, 1]})}, "finish_reasons: expected a str"),
    ({"json": as_json({"turn_metadata": [{}]})}, "turn_metadata is not a list of 2"),
    ({"json": as_json({"turn_token_extras": [[], []]})}, "unknown sections"),
    ({"json": as_json({"prompt": 1})}, "prompt: expected text or a sequence"),
    (segments([-1, 0, 40, 0]) | {"json": as_json({"turn_metadata": []})}, "unknown sections"),
    (segments([-1, 0, 40, 0]) | {"turn/rewards": np.zeros(0)}, "unknown sections"),
]


def ragged_sample() -> list[Episode]:
    """Return an episode of two turns with 4 values of 43 tokens, and one without turns."""
    values = Ragged([1, 2, 3], [2, *[0] * 41, 1])
    one = Turn(prompt_ids=range(40), response_ids=[3, 4, 5], token_extras={"x": values})
    longer = Ragged([1, 2, 3, 4], [2, *[0] * 41, 1, 1])
    other = Turn(parent=one, new_ids=[6], response_ids=[], token_extras={"x": longer})
    joint = Ragged(range(87), [1] * 87)
    alone = Episode(prompt_ids=[1], response_ids=[2], extras={"y": [1]})
    return [Episode(turns=[one, other], token_extras={"z": joint}), alone]


RAGGED_DATA = encode(ragged_sample(), version=2)
DENSE = {"token/x": np.zeros(44), "counts/token/x": None}

RAGGED: list[tuple[dict[str, Any], str]] = [
    ({"counts/token/x": at(0, add=-3)}, "counts/token/x: expected integers from 0 to 4, got -1"),
    ({"counts/token/x": at(0, add=1)}, "counts/token/x: expected integers whose sum is 4, .* 5"),
    ({"counts/token/x": at(0, add=-1)}, "counts/token/x: expected integers whose sum is 4, .* 3"),
    ({"counts/token/x": at(0, add=2**62)}, "counts/token/x: expected integers from 0 to 4, got 46"),
    ({"counts/token/x": at(0, add=-(2**62))}, "expected integers from 0 to 4, got -46"),
    ({"counts/token/x": np.full(44, 2**63 - 1)}, "expected integers from 0 to 4, got 9223"),
    ({"counts/token/x": but_last}, r"counts/token/x is \[43\], not those of 44"),
    ({"counts/token/x": np.zeros(44, np.int32)}, r"counts/token/x is I32 \[44\], not I64"),
    ({"counts/token/x": np.zeros((44, 1), np.int64)}, r"counts/token/x is I64 \[44, 1\], not I64"),
    ({"counts/token/x": None}, r"token/x is \[4\], not \[44, ...\]"),
    ({"token/x": but_last}, "counts/token/x: expected integers .* got"),
    ({"token/x": np.array(4)}, r"token/x is \[\], not \[44, ...\]"),
    ({"token/x": None}, r"unknown sections \["),
    # values of a parent of another kind
    (
        {
            "token/x": np.array([1, 2, 3]),
            "counts/token/x": but_last,
            "rows/token/x": ints(0),
            "begins/token/x": ints(0),
        }
        | dict(second("token/x", 1, [4], begin=43)),
        "token/x continues values that the parent of a segment does not have",
    ),
    (
        {
            "token/x": np.array([1, 2, 3]),
            "counts/token/x": but_last,
            "rows/token/x": ints(0),
            "begins/token/x": ints(0),
        }
        | dict(second("token/x", 1, np.zeros(44), begin=0)),
        "one dtype and shape in all turns",
    ),
    # what has no such values
    ({"counts/episode/y": ints(1)}, r"unknown sections \['counts/episode/y'\]"),
    ({"counts/token_ids": ints(1)}, r"unknown sections \['counts/token_ids'\]"),
    ({"counts/other": ints(1)}, r"unknown sections \['counts/other'\]"),
    (
        {"logprobs": np.zeros(1, np.float32), "rows/logprobs": ints(2), "counts/logprobs": ints(1)},
        r"unknown sections \['counts/logprobs'\]",
    ),
    (
        {
            "token/token_rewards": np.zeros(1),
            "rows/token/token_rewards": ints(2),
            "counts/token/token_rewards": ints(1),
        },
        r"unknown sections \['counts/token/token_rewards'\]",
    ),
    (DENSE | {"~1/counts/token/x": ints(1)}, r"unknown sections \['~1/counts/token/x'\]"),
    # arrays of the tokens of all turns
    ({"counts/joint/z": but_last}, "counts/joint/z: expected integers whose sum is 87, .* got 86"),
    (
        {"counts/joint/z": but_last, "joint/z": but_last},
        "arrays of the turns of an episode do not have 87 values",
    ),
    ({"counts/joint/z": at(0, add=-2)}, "counts/joint/z: expected integers from 0 to 87, got -1"),
    ({"counts/joint/z": None}, r"joint/z is \[87\], not \[1, ...\]"),
    ({"rows/joint/z": None}, r"counts/joint/z is \[87\], not those of 2"),
    ({"rows/joint/z": ints(1)}, "of one episode .*, or belong to turns"),
    ({"rows/joint/z": ints()}, r"counts/joint/z is \[87\], not those of 0"),
    (
        {
            "joint/policy_version": np.zeros(87, np.int32),
            "rows/joint/policy_version": ints(0),
            "counts/joint/policy_version": np.ones(87, np.int64),
        },
        "versions per token are not I32",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), RAGGED)
def test_altered_numbers_of_values(changes: dict[str, Any], reason: str) -> None:
    assert decode(altered(RAGGED_DATA, {})).episodes == ragged_sample()
    with pytest.raises(CorruptPayloadError, match=reason):
        decode(altered(RAGGED_DATA, changes))


@pytest.mark.parametrize(("changes", "reason"), [*STRUCTURE, *COLUMNS, *EPISODES])
def test_the_error_has_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorruptPayloadError, match=reason):
        decode(altered(DATA, changes))
