"""Tensors of token extras with a variable number of values, against plain loops."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import Batch, Episode, EpisodeGroup, InvalidInputError, Ragged, Turn, limits
from support.batches import batch_of
from support.examples import examples

TOKENS = st.lists(st.integers(0, 9), max_size=4)

COVERED = st.sampled_from(["none", "all", "response", "all but the last"])


class Row(NamedTuple):
    """A training row.

    Attributes:
        ids: Its tokens.
        values: The values of each token.
        prompt_length: Number of tokens before its first response.
    """

    ids: list[int]
    values: list[list[int]]
    prompt_length: int


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[Episode, list[Row]]:
    """Return an episode of turns, or without turns, and its training rows."""
    rows: list[Row] = []
    turns: list[Turn] = []
    for i in range(draw(st.integers(1, 4))):
        response, new = draw(TOKENS), draw(TOKENS)
        is_child = draw(st.booleans())
        continues = draw(st.booleans())
        before = rows[-1] if rows and continues else Row([], [], 0)
        if not before.ids:
            before, new = Row([], [], 0), [100 + i, *new]
        context = before.ids + new
        fields: dict[str, Any] = {"prompt_ids": context, "response_ids": response}
        if before.ids and is_child:
            fields = {"parent": turns[-1], "new_ids": new, "response_ids": response}
        total = len(context) + len(response)
        values: list[list[int]] = [[] for _ in range(total)]
        covered = draw(COVERED)
        if covered != "none":
            first = len(context) if covered == "response" else 0
            last = total - (covered == "all but the last" and len(context) != 1)
            values[first:last] = [draw(TOKENS) for _ in range(last - first)]
            given = Ragged.of(values[first:last], np.int16)
            fields["token_extras"] = {"x": given}
        turns.append(Turn(**fields))
        known = len(before.ids)
        row = Row(context + response, before.values + values[known:], before.prompt_length)
        if known:
            rows[-1] = row
        else:
            rows.append(row._replace(prompt_length=len(context)))
    if len(turns) > 1 or draw(st.booleans()):
        return Episode(turns=turns), rows
    del fields["prompt_ids"], fields["response_ids"]
    return Episode(prompt_ids=context, response_ids=response, **fields), rows


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=3), st.booleans(), st.integers(1, 9))
def test_every_layout_equals_a_plain_loop(
    several: list[tuple[Episode, list[Row]]], is_stored: bool, most: int
) -> None:
    episodes = [episode for episode, _ in several]
    rows = [row for _, mine in several for row in mine]
    batch: Batch[Any] = Batch([EpisodeGroup("t", episodes)])
    if is_stored:
        batch = batch_of([episodes])
    if all("x" not in one.token_extras for one in episodes):
        assert batch.padded(0).token_extras == {}
        return
    cut = [row.values[:most] for row in rows]
    assert found(batch.padded(0)) == filled([row.values for row in rows])
    assert found(batch.padded(0, max_length=most, side="left")) == filled(cut, left=True)
    responses = [row.values[row.prompt_length :] for row in rows]
    assert found(batch.split(0)) == filled(responses)
    left = [values[:most] for values in responses]
    assert found(batch.split(0, max_length=most, side="left")) == filled(left, left=True)
    longest = max(len(row.ids) for row in rows)
    for fit in ("next", "first"):
        packed = batch.packed(0, max_tokens=longest + most, fit=fit)
        expected = [
            [
                rows[sequence].values[position] if sequence >= 0 else []
                for sequence, position in zip(sequences, positions, strict=True)
            ]
            for sequences, positions in zip(
                packed.sequence_index.tolist(), packed.position_ids.tolist(), strict=True
            )
        ]
        assert found(packed) == expected


def filled(rows: list[list[list[int]]], left: bool = False) -> list[list[list[int]]]:
    """Return rows of equal width, with tokens without values at their ends."""
    width = max(len(row) for row in rows)
    padding: list[list[list[int]]] = [[[]] * (width - len(row)) for row in rows]
    return [
        [*empty, *row] if left else [*row, *empty] for row, empty in zip(rows, padding, strict=True)
    ]


def found(tensors: Any) -> list[list[list[int]]]:
    """Return the values of each position, as the documentation explains."""
    x = tensors.token_extras["x"]
    assert (x.values.dtype, x.offsets.dtype) == (torch.int16, torch.int64)
    ids = tensors.response_ids if hasattr(tensors, "response_ids") else tensors.token_ids
    height, width = ids.shape
    assert x.offsets.shape == (height * width + 1,)
    assert x.counts.view(height, width).shape == ids.shape
    return [
        [x[row * width + position].tolist() for position in range(width)] for row in range(height)
    ]


def test_values_become_a_mask_over_the_vocabulary() -> None:
    rows = [[[1, 3], [2]], [[0]]]
    group = EpisodeGroup(
        "t",
        [
            Episode(prompt_ids=[], response_ids=[7] * len(row), token_extras={"x": Ragged.of(row)})
            for row in rows
        ],
    )
    padded = Batch([group]).padded(0)
    x = padded.token_extras["x"]
    allowed = torch.zeros(*padded.token_ids.shape, 4, dtype=torch.bool)
    allowed.view(-1, 4)[torch.repeat_interleave(x.counts), x.values] = True
    assert allowed.int().tolist() == [[[0, 1, 0, 1], [0, 0, 1, 0]], [[1, 0, 0, 0], [0, 0, 0, 0]]]


def test_values_of_every_shape_are_moved_to_the_device() -> None:
    values = torch.arange(6.0).reshape(3, 2).bfloat16()
    one = Episode(prompt_ids=[1], response_ids=[2], token_extras={"x": Ragged(values, [1, 2])})
    other = Episode(prompt_ids=[1], response_ids=[])
    batch = Batch([EpisodeGroup("t", [one, other])])
    x = batch.padded(0, fields=["x"]).token_extras["x"]
    assert torch.equal(x.values, values)
    assert x.offsets.tolist() == [0, 1, 3, 3, 3]
    moved = batch.padded(0, device="meta").token_extras["x"]
    assert moved.values.device.type == moved.offsets.device.type == "meta"
    assert (moved.values.shape, moved.offsets.shape) == ((3, 2), (5,))
    assert batch.padded(0).present["x"].tolist() == [True, False]
    assert batch.padded(0, fields=[]).token_extras == {}


def test_one_kind_in_all_episodes() -> None:
    several = [
        Episode(prompt_ids=[1], response_ids=[2], token_extras={"x": values})
        for values in (Ragged.of([[1], [2, 3]]), np.zeros(2, np.int64))
    ]
    with pytest.raises(InvalidInputError, match="one dtype and shape in all episodes"):
        Batch([EpisodeGroup("t", several)]).padded(0)


def test_tensors_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = {"x": Ragged(np.zeros(1000), [500, 500])}
    turns = [Turn(prompt_ids=[1], response_ids=[2], token_extras=extras)]
    batch = Batch([EpisodeGroup("t", [Episode(turns=turns * 2)])])
    monkeypatch.setattr(limits, "MAX_ARRAY_BYTES", 10_000)
    assert turns[0].token_extras["x"] == extras["x"]
    for make in (lambda: batch.padded(0), lambda: batch.groups[0].episodes[0].token_extras):
        with pytest.raises(InvalidInputError, match="MAX_ARRAY_BYTES: expected at least 16000"):
            make()
