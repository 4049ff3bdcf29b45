"""Values that integrations keep as they are, beside what is in columns."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest

import replaydb as rdb
from integrations.identical import identical
from replaydb.integrations.values import dataclasses_of, decode, encode


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


def kept(value: Any, classes: Any = None) -> Any:
    """The value, after JSON in a file and arrays in an episode."""
    arrays: dict[str, Any] = {}
    text = json.dumps(encode("value", value, arrays, classes), allow_nan=False)
    episode = rdb.Episode(prompt_ids=[], response_ids=[1], extras=arrays)
    return decode(json.loads(text), episode.extras, classes)


OBJECTS = np.array([[None, "a"], [(1,), b"x"]], object)


@pytest.mark.parametrize(
    "value",
    [
        [["42"], ["007"], [True], [1], [1.0], None, "", "\0\ud800é"],
        [2**31, 2**63, -(2**63) - 1, 10**5000, -0.0, float("nan"), float("-inf"), 5e-324],
        [list(range(20)), [0.1, float("nan")] * 20, [2**64] * 20, [2**63] * 20, [1, True] * 20],
        {"a": {1: "x", None: 2, (3, "b"): [4], 1.5: 5}, "$dict": {"$tuple": [1]}, "\0": 0},
        (1, (2,), [()], {3, "a"}, frozenset({(1, 2)}), set(), b"\0\xff", b""),
        [np.float32(0.1), np.int8(3), np.bool_(True), np.str_("a"), np.float16("nan")],
        [np.datetime64("2026-01-02T03:04:05.678"), np.timedelta64(3, "D"), np.datetime64("NaT")],
        np.array(["2026-01-02", "NaT"], "datetime64[D]"),
        np.array([["a", "bc"]]),
        np.array([1 + 2j]),
        np.array([1, 2], ">i4"),
        np.zeros((2, 0, 3), "datetime64[s]"),
        np.array(5),
        [np.arange(6, dtype=np.uint64).reshape(2, 3), OBJECTS, np.array([], object)],
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert identical(kept(value), value)


def test_tensors_come_back() -> None:
    torch = pytest.importorskip("torch")
    given = {"x": [torch.randn(2, 3).bfloat16()], "y": torch.tensor(3)}
    found = kept(given)
    assert found["x"][0].dtype == torch.bfloat16
    assert found["x"][0].equal(given["x"][0])
    assert found["y"].equal(given["y"])


def test_dataclasses_come_back_without_being_initialised_again() -> None:
    given = Outer([Inner({"a": Inner((1,))}), None], words=["b"])
    assert given.number == 4
    found = kept(given, dataclasses_of("kind", Outer))
    assert identical(found, given)
    arrays: dict[str, Any] = {}
    stored = encode("value", given, arrays, dataclasses_of("kind", Outer))
    del stored["$class"][1]["words"]  # by an earlier version, which did not have it
    assert decode(stored, arrays, dataclasses_of("kind", Outer)).words == []
    del stored["$class"][1]["inner"]
    with pytest.raises(rdb.InvalidInputError, match=r"Outer.inner: expected a stored value"):
        decode(stored, arrays, dataclasses_of("kind", Outer))
    with pytest.raises(rdb.InvalidInputError, match="kind: expected a dataclass with the fields"):
        decode(stored, arrays)


def test_subclasses_come_back_as_their_base() -> None:
    given = [Level.LOW, OrderedDict(a=1), defaultdict(list, b=[2])]
    assert identical(kept(given), [1, {"a": 1}, {"b": [2]}])


class Colour(Enum):
    RED = 1


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


def test_values_in_themselves_are_refused() -> None:
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

    with pytest.raises(rdb.InvalidInputError, match="annotations that can be resolved"):
        dataclasses_of("kind", Unresolved)

    namesake = type("Inner", (), {"__annotations__": {"outer": Outer}, "__module__": __name__})
    with pytest.raises(rdb.InvalidInputError, match="dataclasses of different names, got Inner"):
        dataclasses_of("kind", dataclass(namesake))
