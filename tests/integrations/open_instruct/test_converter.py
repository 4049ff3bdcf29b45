"""What open-instruct generates, as groups and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import replaydb as rdb
from integrations.open_instruct.upstream import GenerationResult, ProcessedResult, processed
from replaydb import blocking
from replaydb.integrations.open_instruct import Converter


def test_everything_comes_back(url: str) -> None:
    data = processed("gsm8k/1", (1.0, 0.1, 0.0), model_step=3)
    converter = Converter(ProcessedResult)
    with blocking.Store.open(url) as store:
        buffer = store.buffer("table")
        ids = buffer.put(converter.to_group(data, "gsm8k", group_uid="1", priority=2.0))
        [stored] = buffer.get(ids)
    assert converter.from_group(stored) == data


def test_columns_say_what_it_is(url: str) -> None:
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


def test_numbers_of_numpy() -> None:
    data = processed("gsm8k/1")
    data.reward_metrics = {"mean": np.float32(0.5), "all": np.array([1, 2])}
    converter = Converter(ProcessedResult)
    found = converter.from_group(converter.to_group(data, "gsm8k"))
    assert found.reward_metrics == {"mean": 0.5, "all": [1, 2]}


def test_what_cannot_be_kept() -> None:
    data = processed("gsm8k/1")
    with pytest.raises(rdb.InvalidInputError, match="expected a GenerationResult, got Processed"):
        Converter(GenerationResult).to_group(data, "gsm8k")  # type: ignore[arg-type]
    data.reward_metrics = {"what": object()}
    with pytest.raises(rdb.InvalidInputError, match="expected what JSON can hold, got object"):
        Converter(ProcessedResult).to_group(data, "gsm8k")


@pytest.mark.parametrize(
    ("part", "field", "value", "expected"),
    [
        ("result", "finish_reasons", [None, "stop"], "result.finish_reasons.0: .*valid string"),
        ("result", "finish_reasons", ["stop"], "result.finish_reasons: expected 2, .*, got 1"),
        ("result", "masks", [[1, 0, 1]] * 3, "result.masks: expected 2, .*, got 3"),
        ("result", "logprobs", [], "result.logprobs: expected 2, .*, got 0"),
        ("data", "queries", [[1, 2]], "queries: expected 2, .*, got 1"),
        ("data", "decoded_responses", ["a"], "decoded_responses: expected 2, .*, got 1"),
        ("data", "decoded_responses", [None, "b"], "decoded_responses.0: .*valid string"),
        ("data", "reward_scores", [1.0], "reward_scores: expected 2, .*, got 1"),
        ("data", "reward_scores", [1.0, None], "reward_scores.1: .*valid number.* got None"),
        ("data", "ground_truths", ["four", "4"], "ground_truths.0: .* got 'four'"),
        ("data", "percent_solved", None, "percent_solved: .*valid number.* got None"),
    ],
)
def test_what_could_not_be_made_again(part: str, field: str, value: Any, expected: str) -> None:
    data = processed("gsm8k/1")
    setattr(data.result if part == "result" else data, field, value)
    with pytest.raises(rdb.InvalidInputError, match=expected):
        Converter(ProcessedResult).to_group(data, "gsm8k")


def test_what_json_has_no_word_for() -> None:
    data = processed("gsm8k/1").result
    data.reward_scores, data.reward_metrics = [], {"of": {1: (2, 3)}}
    converter = Converter(GenerationResult)
    found = converter.from_group(converter.to_group(data, "gsm8k"))
    assert found.reward_scores is None
    assert found.reward_metrics == {"of": {"1": [2, 3]}}
