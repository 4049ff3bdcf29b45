"""Token extras with a variable number of values for each token."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replaydb import Episode, EpisodeGroup, InvalidInputError, Ragged, Turn, codec
from replaydb.domain.decoding import token_columns
from replaydb.domain.episodes.arrays import same
from replaydb.domain.episodes.ragged import joined
from replaydb.domain.episodes.segments import common_prefix
from replaydb.domain.episodes.unrepeated import Unrepeated
from support.samples import ragged

ROWS = [[1, 2], [], [3]]


def test_values_and_slices() -> None:
    one = Ragged.of(ROWS, np.int16)
    assert (len(one), one.shape, one.ndim, one.dtype) == (3, (3, None), 2, np.int16)
    assert one.values.tolist() == [1, 2, 3]
    assert one.offsets.tolist() == [0, 2, 2, 3]
    assert one.counts.tolist() == [2, 0, 1]
    assert [found.tolist() for found in one] == one.tolist() == ROWS
    assert (one[0].tolist(), one[-1].tolist()) == ([1, 2], [3])
    for begin in range(-4, 5):
        for end in range(-4, 5):
            assert one[begin:end].tolist() == ROWS[begin:end]
    assert one[1:][1:].offsets.tolist() == [0, 1]
    assert repr(one) == "Ragged(3 tokens, 3 values of int16)"
    assert one.nbytes == 6 + 32
    with pytest.raises(IndexError):
        one[3]
    with pytest.raises(InvalidInputError, match="index: expected a slice with a step of 1, got 2"):
        one[::2]


def test_values_can_have_any_shape_and_dtype() -> None:
    values = torch.arange(6.0).reshape(3, 2).bfloat16()
    one = Ragged(values, [0, 3])
    assert one.shape == (2, None, 2)
    assert torch.equal(one[1], values)
    assert one == Ragged(values.clone(), np.array([0, 3], np.uint8))
    assert one != Ragged(values.float(), [0, 3])
    assert Ragged.of([[[1, 2]], []]).tolist() == [[[1, 2]], []]
    assert Ragged.of([torch.tensor([1, 2]), np.array([3])]).tolist() == [[1, 2], [3]]


def test_equality_is_of_bits() -> None:
    one = Ragged([1.0, np.nan], [1, 1])
    assert one == Ragged([1.0, np.nan], [1, 1])
    assert one != Ragged([1.0, np.nan], [2, 0])
    assert one != Ragged([1.0, -np.nan], [1, 1])
    assert Ragged([0.0], [1]) != Ragged([-0.0], [1])
    assert one != one.values
    assert not same(one, one.tolist())


def test_arrays_are_read_only_copies() -> None:
    values, counts = np.arange(3), np.array([2, 1])
    one = Ragged(values, counts)
    values[:] = counts[:] = 9
    assert one.tolist() == [[0, 1], [2]]
    for array in (one.values, one.offsets, one[1:].values, one[1:].offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    assert np.shares_memory(one[1:].values, one.values)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Ragged(["a"], [1]), "values: expected a bool, integer or float array"),
        (lambda: Ragged(5, [1]), r"values: expected shape \[V, ...\], got shape \[\]"),
        (lambda: Ragged(Ragged.of(ROWS), [1]), "values: expected a rectangular array"),
        (lambda: Ragged([1], [2]), "counts: expected integers from 0 to 1, got 2"),
        (lambda: Ragged([1], [2, -1]), "counts: expected integers from 0 to 1, got 2"),
        (lambda: Ragged([1], [1, -1]), "counts: expected integers from 0 to 1, got -1"),
        (lambda: Ragged([1, 2], [1]), "counts: expected integers whose sum is 2, .*, got 1"),
        (lambda: Ragged([1], [[1]]), r"counts: expected one dimension, got shape \[1, 1\]"),
        (lambda: Ragged([1], [1.0]), "counts: expected integers, got dtype float64"),
        (lambda: Ragged([1], [True]), "counts: expected integers, got dtype bool"),
        (lambda: Ragged([1], [2**40]), "counts: expected 32-bit integers, got 1099511627776"),
        (lambda: Ragged.of(3), "rows: expected sequences of numbers, got int"),  # type: ignore[arg-type]
        (lambda: Ragged.of([1]), "rows: expected sequences of numbers, got int"),  # type: ignore[list-item]
        (lambda: Ragged.of([["a"]]), "rows: expected a bool, integer or float array"),
        (lambda: Ragged.of([[1], [[2]]]), "rows: expected a rectangular array of numbers"),
        (lambda: Ragged.of([[], []]), "dtype: expected a dtype, because there are no numbers"),
        (lambda: Ragged.of([[300]], np.uint8), "rows: expected numbers in uint8, got 300"),
        (lambda: Ragged.of([[0.5]], np.int64), "rows: expected numbers in int64, got 0.5"),
        (lambda: Ragged.of([[1]], "other"), "dtype: expected a dtype of numpy, got other"),
        (lambda: Ragged.of([[1]], "U5"), "values: expected a bool, integer or float array"),
    ],
)
def test_invalid_arguments(make: Callable[[], Ragged], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{reason}"):
        make()


def of_prompt_and_response(**fields: Any) -> list[Episode | Turn]:
    given: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], **fields}
    return [Episode(**given), Turn(**given)]


def test_extras_of_tokens_of_responses_and_of_all_but_the_last_token() -> None:
    whole, shorter = [[7], [], *ROWS], [[7], [], *ROWS[:2]]
    for rows, expected in ((whole, whole), (ROWS, [[], [], *ROWS]), (shorter, shorter)):
        for one in of_prompt_and_response(token_extras={"x": Ragged.of(rows)}):
            assert one.token_extras["x"].tolist() == expected
    flat = {"token_ids": [1, 2, 3, 4, 5], "lengths": [2, 3], "prompt_lengths": [1, 1]}
    for rows, expected in ((whole, whole), (ROWS, [[], [1, 2], [], [], [3]])):
        made = EpisodeGroup.from_arrays("t", **flat, token_extras={"x": Ragged.of(rows)})  # type: ignore[arg-type]
        several = [row for one in made.episodes for row in one.token_extras["x"].tolist()]
        assert several == expected


def test_turns_are_concatenated_and_merged() -> None:
    first = Turn(prompt_ids=[1], response_ids=[2], token_extras={"x": Ragged.of([[1], [2, 3]])})
    second = Turn(parent=first, new_ids=[3], response_ids=[4])
    third = Turn(parent=second, new_ids=[], response_ids=[5], token_extras={"x": Ragged.of([[4]])})
    joint = Ragged.of([[i] * (i % 2) for i in range(11)])
    episode = Episode(turns=[first, second, third], token_extras={"y": joint})
    assert episode.token_extras["x"].tolist() == [[1], [2, 3], [], [], [], [], [], [], [], [], [4]]
    assert episode.token_extras["y"] == joint


def test_it_is_a_token_extra_and_nothing_else() -> None:
    one = Ragged.of(ROWS)
    for fields in (
        {"logprobs": one},
        {"token_extras": {"token_rewards": one}},
        {"token_extras": {"x": Ragged.of([*ROWS, *ROWS])}},
    ):
        field = "logprobs" if "logprobs" in fields else "token_extras"
        for made in (Episode, Turn):
            with pytest.raises(InvalidInputError, match=f"^{field}"):
                made(prompt_ids=[1, 2], response_ids=[3, 4, 5], **fields)
    with pytest.raises(InvalidInputError, match=r"^extras\['x'\]: expected a rectangular array"):
        Episode(prompt_ids=[1], response_ids=[2], extras={"x": one})
    with pytest.raises(InvalidInputError, match=r"^extras\['x'\]: expected a rectangular array"):
        EpisodeGroup("t", [], status="aborted", extras={"x": one})
    padded = {"token_ids": [[1, 2], [3, 0]], "lengths": [2, 1], "prompt_lengths": [1, 0]}
    with pytest.raises(InvalidInputError, match=r"token_extras\['x'\]: expected shape \[2, 2\]"):
        EpisodeGroup.from_arrays("t", **padded, token_extras={"x": one})  # type: ignore[arg-type]


def test_one_kind_in_all_turns() -> None:
    for other in (np.zeros(2, np.int64), Ragged.of([[1.0], []]), Ragged.of([[[1]], []])):
        turns = [
            Turn(prompt_ids=[1], response_ids=[2], token_extras={"x": values})
            for values in (Ragged.of([[1], [2, 3]]), other)
        ]
        with pytest.raises(InvalidInputError, match="one dtype and shape in all turns"):
            Episode(turns=turns)


def test_format_1_refuses_it() -> None:
    one = Ragged.of(ROWS)
    made = Turn(prompt_ids=[1, 2], response_ids=[3], token_extras={"x": one})
    plain = Turn(prompt_ids=[1], response_ids=[2, 3])
    for episode, field in (
        (Episode(prompt_ids=[], response_ids=[1] * 3, token_extras={"x": one}), "token_extras"),
        (Episode(turns=[made]), r"turns\[0\].token_extras"),
        (Episode(turns=[plain], token_extras={"x": one}), "token_extras"),
    ):
        refused = rf"^episodes\[0\].{field}\['x'\]: expected an array, .*`replaydb db write-format"
        with pytest.raises(InvalidInputError, match=refused):
            codec.encode([episode], version=1)


def pickled(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))  # noqa: S301 - our own bytes


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_it_is_pickled_and_copied(copied: Callable[[Any], Any]) -> None:
    one = Ragged(np.arange(1000), [10] * 100)
    assert copied(one) == one
    assert copied(one[5:7]) == one[5:7]
    assert len(pickle.dumps(one[5:7])) < 1000
    [episode, _] = of_prompt_and_response(token_extras={"x": Ragged.of(ROWS)})
    assert copied(episode) == episode


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([[1, 2], [], [3], []], 4),
        ([[1, 2], [], [4], []], 2),
        ([[1, 3], [], [3], []], 0),
        ([[1, 2], [], [3], [3]], 3),
        ([[1], [2], [3], []], 0),
    ],
)
def test_values_of_a_token_are_alike_if_all_are(other: list[list[int]], expected: int) -> None:
    assert common_prefix(Ragged.of([*ROWS, []]), Ragged.of(other), 4) == expected


def test_arrays_of_the_tokens_of_several_episodes_are_stored_together() -> None:
    turn = Turn(prompt_ids=[1], response_ids=[2])
    several = [
        Episode(turns=[turn], token_extras={"y": Ragged.of(rows)})
        for rows in ([[1], [2, 3]], [[], [4]])
    ]
    assert codec.decode([codec.encode(several)[0].data]).episodes == several


@given(st.integers(0, 5).flatmap(lambda size: st.tuples(ragged(size), ragged(size))), st.data())
def test_the_first_tokens_that_are_alike(two: tuple[Ragged, Ragged], data: st.DataObject) -> None:
    one, other = two
    if data.draw(st.booleans()):  # the beginning of the other one
        kept = data.draw(st.integers(0, len(one)))
        rest = Ragged(one.values[:0], [0] * (len(one) - kept))
        other = joined([one[:kept], rest])  # type: ignore[assignment]
    if (one.dtype, *one.shape[2:]) != (other.dtype, *other.shape[2:]):
        return
    most = data.draw(st.integers(0, len(one)))
    expected = next((i for i in range(most) if one[i : i + 1] != other[i : i + 1]), most)
    assert common_prefix(one, other, most) == expected


def test_columns_of_tokens_have_lists() -> None:
    """Those of `replaydb episodes --tokens`."""
    [one, _] = of_prompt_and_response(token_extras={"x": Ragged.of([[7], [], *ROWS[:2]])})
    columns = token_columns(Unrepeated(one), None)  # type: ignore[arg-type]
    assert columns["extra.x"] == [[7], [], [1, 2], [], None]
