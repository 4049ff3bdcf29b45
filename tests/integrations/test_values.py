"""Values that integrations store unchanged, beside the columns."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from enum import Enum, IntEnum, IntFlag, StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

import replaydb as rdb
from integrations.identical import identical
from replaydb.integrations.values import (
    completed,
    dataclasses_of,
    decode,
    encode,
    from_extras,
    to_extras,
    to_reward,
    uniform,
    without,
)


@dataclass(frozen=True)
class Inner:
    value: Any


@dataclass(slots=True)
class Outer:
    inner: list[Inner | None]
    number: int = 3
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.number += 1


class Level(IntEnum):
    LOW = 1


class Colour(Enum):
    RED = (1, 2)


class Word(StrEnum):
    YES = "yes"


class Flags(IntFlag):
    A = 1
    B = 2


class Model(BaseModel):
    number: int = 3
    inner: Any = None

    def model_post_init(self, context: Any, /) -> None:
        self.number += 1


CLASSES: dict[str, type] = {
    one.__name__: one for one in (Inner, Outer, Level, Colour, Word, Flags, Model)
}


def kept(value: Any, classes: Any = None) -> Any:
    """Return the value after storing it in the extras of an episode."""
    extras = to_extras("value", value, "json", classes)
    episode = rdb.Episode(prompt_ids=[], response_ids=[1], extras=extras)
    return from_extras(episode.extras, "json", classes)


OBJECTS = np.array([[None, "a"], [(1,), b"x"], [[1, 2], {"a": np.float32(0.5)}]], object)


@pytest.mark.parametrize(
    "value",
    [
        [["42"], ["007"], [True], [1], [1.0], None, "", "\0\ud800é", "\ud83d\ude00", "␛0000"],
        [2**31, 2**63, -(2**63) - 1, 10**5000, -0.0, float("nan"), float("-inf"), 5e-324],
        [
            struct.unpack(">d", bytes.fromhex(f"{bits}000001"))[0]
            for bits in ("7ff8000000", "fff8000000")
        ],
        [
            list(range(20)),
            [True, False] * 20,
            [0.1, float("nan")] * 20,
            [2**64] * 20,
            [2**63] * 20,
            [1, True] * 20,
        ],
        [[2**63, -1] * 20, [2**60 + 1, 0.5] * 20],
        {"a": {1: "x", None: 2, (3, "b"): [4], 1.5: 5}, "b": {True: 6}},
        {"$pairs": {"$tuple": [1]}, "\0": 0, "\ud800": 1, "": 2},
        (1, (2,), [()], {3, "a"}, frozenset({(1, 2)}), set(), b"\0\xff", b"", bytearray(b"a")),
        [np.float32(0.1), np.float64(0.1), np.int8(3), np.bool_(True), np.float16("nan")],
        [np.str_("a"), np.str_(""), np.complex64(1j), np.void(b"abc")],
        [np.datetime64("2026-01-02T03:04:05.678"), np.timedelta64(3, "D"), np.datetime64("NaT")],
        np.array(["2026-01-02", "NaT"], "datetime64[D]"),
        np.array([["a", "bc"]]),
        np.array([1 + 2j]),
        np.array([1, 2], ">i4"),
        [np.zeros((2, 0, 3), "datetime64[s]"), np.zeros((0, 2)), np.zeros(2, bool)],
        np.array(5),
        [np.arange(6, dtype=np.uint64).reshape(2, 3), OBJECTS, np.array([], object)],
        {"x": [torch.ones(2, 3).bfloat16()], "y": torch.tensor(3)},
        [Colour.RED, Level.LOW, Word.YES, Flags.A | Flags.B, {Colour.RED: Word.YES}],
        [Model(inner=(Model(), Inner({1: 2}))), Model.model_construct(number=2.5)],
    ],
)
def test_values_round_trip(value: Any) -> None:
    assert identical(kept(value, CLASSES), value)


async def test_values_round_trip_in_metadata(buffer: rdb.Buffer) -> None:
    value = ["\0\ud800", "\ud83d\ude00", "␛0000", {"\0": {"\ud800": 2**63}}, float("nan")]
    metadata = {"value": encode("value", value, {})}
    [uid] = await buffer.put(
        rdb.EpisodeGroup("a", [rdb.Episode(prompt_ids=[], response_ids=[1], metadata=metadata)])
    )
    [group] = await buffer.get([uid])
    assert identical(decode(group.episodes[0].metadata["value"], {}), value)


def test_fields_that_columns_have_are_left_out() -> None:
    usual = {"a": [1, 2], "b": -0.0, "c": np.arange(3), "d": None, "e": torch.ones(2), "f": 1}
    fields = {"a": [1, 2], "b": 0.0, "c": torch.arange(3), "d": None, "e": torch.ones(2), "g": (1,)}
    arrays: dict[str, Any] = {}
    stored = without("fields", fields, usual, arrays)
    assert stored["usual"] == ["a", "d", "e"]
    assert stored["fields"] == {"b": 0.0, "c": {"$tensor": "array-0"}, "g": {"$tuple": [[1]]}}
    found = completed(stored, usual, arrays)
    assert {name: found[name] for name in fields}.keys() == found.keys()
    assert identical({name: found[name] for name in fields}, fields)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ([1.0] * 20, [1.0] * 19 + [0.0]),
        ([0.0] * 20, [0.0] * 19 + [-0.0]),
        ([1] * 20, [1.0] * 20),
        ([], None),
        ([], ()),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros((2, 1))),
        (torch.zeros(2), torch.zeros(2).bfloat16()),
        (b"a", b"b"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_other_values_are_not_left_out(one: Any, other: Any) -> None:
    assert without("fields", {"a": one}, {"a": one}, {})["usual"] == ["a"]
    assert without("fields", {"a": one}, {"a": other}, {})["usual"] == []


def test_unknown_values_are_named() -> None:
    with pytest.raises(rdb.InvalidInputError, match=r"^fields\.a\[0\]: expected numbers"):
        without("fields", {"a": [object()]}, {"a": None}, {})


def test_token_extras_of_other_kinds_are_left_out() -> None:
    kinds: dict[str, Any] = {}
    ragged = rdb.Ragged.of([[1], []])
    first = {"a": np.zeros((2, 3)), "b": ragged}
    assert uniform(first, kinds) == first
    other = {"a": np.zeros((5, 4)), "b": ragged, "c": np.zeros(1)}
    assert uniform(other, kinds).keys() == {"b", "c"}
    assert uniform({"a": np.zeros((1, 3), np.float32)}, kinds) == {}


def test_dataclasses_are_restored_without_init() -> None:
    given = Outer([Inner({"a": Inner((1,))}), None], words=["b"])
    assert given.number == 4
    found = kept(given, dataclasses_of("kind", Outer))
    assert identical(found, given)
    arrays: dict[str, Any] = {}
    stored = encode("value", given, arrays, dataclasses_of("kind", Outer))
    del stored["$class"][0]["words"]  # as stored by an earlier version without this field
    assert decode(stored, arrays, dataclasses_of("kind", Outer)).words == []
    del stored["$class"][0]["inner"]
    with pytest.raises(rdb.InvalidInputError, match=r"Outer.inner: expected a stored value"):
        decode(stored, arrays, dataclasses_of("kind", Outer))
    with pytest.raises(rdb.InvalidInputError, match="Outer: expected one of the classes that may"):
        decode(stored, arrays)


def test_removed_fields_of_a_model_are_dropped() -> None:
    stored = encode("value", Model(inner=1), {}, CLASSES)
    stored["$class"][0]["older"] = 1
    assert identical(decode(stored, {}, CLASSES), Model(inner=1))


def test_removed_values_of_an_enumeration_are_refused() -> None:
    stored = encode("value", Word.YES, {}, CLASSES)
    stored["$class"][0] = "no"
    with pytest.raises(rdb.InvalidInputError, match="Word: expected one of its values, got 'no'"):
        decode(stored, {}, CLASSES)


def test_bytes_are_not_decoded_as_objects() -> None:
    """Stored data must not choose the memory addresses that objects are read from."""
    arrays: dict[str, Any] = {}
    stored = encode("value", np.zeros(1, "M8[s]"), arrays)
    for dtype in ("|O", "i4,O"):
        stored["$raw"][1] = dtype
        with pytest.raises(rdb.InvalidInputError, match="dtype: expected a dtype without objects"):
            decode(stored, arrays)


def test_values_needs_no_trainer_package() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'ray', 'pydantic'])  # not importable\n"
        "from replaydb.integrations.values import decode, encode\n"
        "assert decode(encode('value', (1, b'a'), found := {}), found) == (1, b'a')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_subclasses_become_their_base_class() -> None:
    given = [Level.LOW, OrderedDict(a=1), defaultdict(list, b=[2])]
    assert identical(kept(given), [1, {"a": 1}, {"b": [2]}])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, r"value.a\[1\]: expected .* got object"),
        (Colour.RED, "value: expected .* got Colour"),
        ([Inner(1)], r"value\[0\]: expected .* got Inner"),
        (Inner, "value: expected .* got type"),
        (np.ma.masked_array([1, 2], [True, False]), "got MaskedArray"),
        (np.array([(1, 2.0)], "i4,f8"), "got ndarray"),
    ],
)
def test_other_values_are_refused(value: Any, path: str) -> None:
    with pytest.raises(rdb.InvalidInputError, match=path):
        encode("value", value, {})


def test_cyclic_values_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(rdb.InvalidInputError, match="at most 100 levels"):
        encode("value", value, {})


def test_only_dataclasses_are_created() -> None:
    assert dataclasses_of("kind", Outer) == {"Outer": Outer, "Inner": Inner}
    for kind in (dict, Outer([])):
        with pytest.raises(rdb.InvalidInputError, match="kind: expected a dataclass"):
            dataclasses_of("kind", kind)  # type: ignore[arg-type]

    @dataclass
    class Unresolved:
        value: Nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(rdb.InvalidInputError, match="resolvable annotations"):
        dataclasses_of("kind", Unresolved)

    namesake = type("Inner", (), {"__annotations__": {"outer": Outer}, "__module__": __name__})
    with pytest.raises(rdb.InvalidInputError, match="dataclasses of different names, got Inner"):
        dataclasses_of("kind", dataclass(namesake))


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (np.float16(1.5), 1.5),
        (np.float16("inf"), None),
        (np.float64(1e39), None),
        (float("nan"), None),
        (10**400, None),
        ("1", None),
    ],
)
def test_only_numbers_of_32_bits_are_rewards(value: object, reward: float | None) -> None:
    assert to_reward(value) == reward
