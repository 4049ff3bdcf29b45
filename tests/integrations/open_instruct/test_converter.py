"""Conversion of open-instruct's results to groups and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import replaydb as rdb
from integrations.identical import identical
from integrations.open_instruct.upstream import GenerationResult, ProcessedResult, processed
from replaydb import blocking
from replaydb.integrations.open_instruct import Converter


def test_round_trip(url: str) -> None:
    data = processed("gsm8k/1", (1.0, 0.1, 0.0), model_step=3)
    converter = Converter(ProcessedResult)
    with blocking.Store.open(url) as store:
        buffer = store.buffer("table")
        ids = buffer.put(converter.to_group(data, "gsm8k", group_uid="1", priority=2.0))
        [stored] = buffer.get(ids)
    found = converter.from_group(stored)
    assert identical(found, data)
    assert found.reward_scores is not found.result.reward_scores


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ground_truths", ["four", "4"]),
        ("ground_truths", [[True], [1]]),
        ("ground_truths", [[[9, 9]], None]),
        ("datasets", ["gsm8k", "gsm8k"]),
        ("datasets", [["math", "code"]] * 2),
        ("datasets", [[]] * 2),
        ("reward_scores", [1e39, -1e39]),
        ("reward_scores", [10**400, -(10**400)]),
        ("reward_scores", [float("nan"), float("inf")]),
        ("reward_scores", [True, 1]),
        ("reward_scores", [np.float32(0.1), np.float64(0.1)]),
        ("reward_scores", [None, 1.0]),
        ("reward_scores", []),
        ("reward_scores", np.array([0.5, 1e39])),
        ("decoded_responses", [None, "b"]),
        ("queries", [(1, 2), np.array([1, 2])]),
        ("percent_solved", np.float64(0.5)),
        ("percent_solved", None),
        ("reward_metrics", {"of": {1: (2, 3)}, "all": np.array([1, 2]), "at": {b"x"}}),
        ("result.finish_reasons", [None, "stop"]),
        ("result.logprobs", [[0.1, float("nan"), -0.0]] * 2),
        ("result.logprobs", [[-1e39, -1, True], [-0.5, -1, -2]]),
        ("result.logprobs", None),
        ("result.logprobs", []),
        ("result.masks", [[True, False, True]] * 2),
        ("result.prompt_id", None),
        ("result.reward_scores", None),
    ],
)
def test_values_round_trip_with_their_types(name: str, value: Any) -> None:
    """Whatever the annotation says, like upstream's own table."""
    data = processed("gsm8k/1")
    *inner, field = name.split(".")
    setattr(data.result if inner else data, field, value)
    converter = Converter(ProcessedResult)
    assert identical(converter.from_group(converter.to_group(data, "gsm8k")), data)


def test_generated_text_may_hold_any_character(url: str) -> None:
    data = processed("gsm8k/1")
    data.decoded_responses = ["a\0b", "\ud800"]
    data.result.request_info.tool_outputs = ["\0", "\ud800"]
    data.raw_queries = ["\0", "\ud800"]
    converter = Converter(ProcessedResult)
    with blocking.Store.open(url) as store:
        buffer = store.buffer("table")
        [stored] = buffer.get(buffer.put(converter.to_group(data, "gsm8k")))
    assert identical(converter.from_group(stored), data)


def test_rewards_out_of_range_are_none_in_columns() -> None:
    data = processed("gsm8k/1", (1e39, float("nan"), 0.5))
    group = Converter(ProcessedResult).to_group(data, "gsm8k")
    assert [one.reward for one in group.episodes] == [None, None, 0.5]


@pytest.mark.parametrize(
    ("datasets", "tags"),
    [
        (["gsm8k"] * 2, {"dataset": "gsm8k"}),
        ([["gsm8k"]] * 2, {"dataset": "gsm8k"}),
        ([["math", "code"]] * 2, {"dataset": "math, code"}),
        ([[]] * 2, {}),
        ([None] * 2, {}),
        ([], {}),
    ],
)
def test_the_dataset_is_a_tag(datasets: Any, tags: dict[str, str]) -> None:
    data = processed("gsm8k/1")
    data.datasets = datasets
    assert Converter(ProcessedResult).to_group(data, "gsm8k").tags == tags


def test_columns_of_a_group(url: str) -> None:
    group = Converter(ProcessedResult).to_group(processed("gsm8k/1", model_step=3), "gsm8k")
    assert (group.prompt_uid, group.tags) == ("gsm8k/1", {"dataset": "gsm8k"})
    assert group.rewards.tolist() == [1.0, 0.0]
    assert group.min_policy_version == 3
    first = group.episodes[0]
    assert first.prompt_ids.tolist() == [1, 2]
    assert first.response_ids.tolist() == [5, 6, 7]
    assert first.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 1]
    assert first.logprobs is not None
    assert first.logprobs.tolist() == [0, 0, -0.5, 0, -0.25]
    assert (first.finish_reason, first.text) == ("stop", "answer 0")


def test_a_result_by_itself() -> None:
    data = processed("gsm8k/1").result
    converter = Converter(GenerationResult)
    assert converter.from_group(converter.to_group(data, "gsm8k")) == data
    data.logprobs, data.reward_scores = None, [0.5, 0.25]
    assert converter.from_group(converter.to_group(data, "gsm8k")) == data


def test_values_that_cannot_be_stored_are_refused() -> None:
    data = processed("gsm8k/1")
    with pytest.raises(rdb.InvalidInputError, match="expected a GenerationResult, got Processed"):
        Converter(GenerationResult).to_group(data, "gsm8k")  # type: ignore[arg-type]
    data.reward_metrics = {"what": object()}
    with pytest.raises(rdb.InvalidInputError, match=r"data.reward_metrics.what: .* got object"):
        Converter(ProcessedResult).to_group(data, "gsm8k")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("result.finish_reasons", ["stop"], "result.finish_reasons: expected 2 values.* got 1"),
        ("result.masks", [[1, 0, 1]] * 3, "result.masks: expected 2 values, .*, got 3"),
        ("result.masks", [[1, 0]] * 2, r"result.masks\[0\]: expected shape"),
        ("result.masks", None, "result.masks: expected a list, got NoneType"),
        ("result.logprobs", [[0.5] * 3], "result.logprobs: expected 2 values, .*, got 1"),
        ("result.responses", [[1, 2, 3], [2**31] * 3], r"responses\[1\]: expected 32-bit"),
        ("reward_scores", 1.0, "data.reward_scores: expected a list, got float"),
        ("result.model_step", "new", r"result.model_step\[0\]: expected"),
        ("queries", [[1, 2]], "data.queries: expected 2 values, .*, got 1"),
        ("decoded_responses", ["a"], "data.decoded_responses: expected 2 values, .*, got 1"),
        ("reward_scores", [1.0], "data.reward_scores: expected 2 values, .*, got 1"),
        ("result", None, "data.result: expected .* ProcessedResult has, got NoneType"),
    ],
)
def test_malformed_results_are_refused(name: str, value: Any, expected: str) -> None:
    data = processed("gsm8k/1")
    *inner, field = name.split(".")
    setattr(data.result if inner else data, field, value)
    with pytest.raises(rdb.InvalidInputError, match=expected):
        Converter(ProcessedResult).to_group(data, "gsm8k")


def test_data_of_an_earlier_version_have_the_default_of_a_new_field() -> None:
    @dataclass
    class Older:
        responses: list[list[int]]
        masks: list[list[int]]
        finish_reasons: list[str]
        prompt_id: str

    @dataclass
    class Newer(Older):
        model_step: int = 0

    Newer.__qualname__ = Older.__qualname__
    group = Converter(Older).to_group(Older([[1]], [[1]], ["stop"], "a"), "gsm8k")
    assert Converter(Newer).from_group(group) == Newer([[1]], [[1]], ["stop"], "a")


def test_a_kind_that_is_not_a_dataclass_is_refused() -> None:
    with pytest.raises(rdb.InvalidInputError, match="kind: expected a dataclass"):
        Converter(dict)
