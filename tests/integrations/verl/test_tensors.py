"""Conversion of groups to TensorDict and DataProto, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples.verl_cpu import prompt, trajectory
from verl import DataProto
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from replaydb import Batch, Buffer, Episode, EpisodeGroup, Fifo, InvalidInputError
from replaydb.integrations.verl import (
    from_dataproto,
    from_tensordict,
    to_dataproto,
    to_tensordict,
)


def _table() -> list[dict[str, Any]]:
    return [
        trajectory(number, session) | prompt(number) | {"uid": f"u{number}"}
        for number in range(3)
        for session in range(2)
    ]


async def test_tensordict_round_trip(buffer: Buffer) -> None:
    table = _table()
    given = from_tensordict(list_of_dict_to_tensordict(table))
    assert [(one.group_uid, one.num_episodes) for one in given] == [("u0", 2), ("u1", 2), ("u2", 2)]
    await buffer.put(given)
    back = to_tensordict(await buffer.sample(3, Fifo()))
    assert set(back.keys()) == set(table[0])
    for name, column in back.items():
        cells = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
        for row, cell in zip(table, cells, strict=True):
            assert (
                torch.equal(cell, row[name])
                if isinstance(cell, torch.Tensor)
                else cell == row[name]
            )


def test_dataproto_round_trip() -> None:
    given = from_tensordict(list_of_dict_to_tensordict(_table()))
    data = to_dataproto(Batch(given), pad_token_id=9)
    batch = data.batch
    assert batch["prompts"].tolist()[1] == [0, 1]
    assert batch["responses"].shape == (6, 5)
    assert batch["responses"][0].tolist() == [0, 1, 2, 9, 9]
    assert batch["response_mask"][0].tolist() == [1, 0, 1, 0, 0]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert batch["rm_scores"][1].tolist() == [0, 0, 0, 1, 0]
    assert data.non_tensor_batch["uid"].tolist() == ["u0", "u0", "u1", "u1", "u2", "u2"]
    assert data.non_tensor_batch["extra_fields"][0] == _table()[0]["extra_fields"]
    assert from_dataproto(data)[0].rewards.tolist() == [0.0, 1.0]
    assert to_dataproto(from_dataproto(data), 9).batch["rm_scores"].equal(batch["rm_scores"])
    for one, other in zip(from_dataproto(data), given, strict=True):
        assert one.group_uid == other.group_uid
        for left, right in zip(one.episodes, other.episodes, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            assert left.loss_mask.tolist() == right.loss_mask.tolist()
            assert left.logprobs is not None
            assert right.logprobs is not None
            assert left.logprobs.tolist() == right.logprobs.tolist()


def test_prompts_of_different_lengths_and_later_columns() -> None:
    episodes = [
        Episode(prompt_ids=[1, 2, 3], response_ids=[4], reward=1.0, logprobs=[-0.5]),
        Episode(prompt_ids=[1], response_ids=[5, 6], reward=0.5, logprobs=[-0.5, -1.0]),
    ]
    data = to_dataproto([EpisodeGroup("math", episodes, group_uid="u")], pad_token_id=0)
    assert data.batch["input_ids"].tolist() == [[1, 2, 3, 4, 0], [0, 0, 1, 5, 6]]
    assert data.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert data.batch["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 0, 0, 1, 2]]
    assert data.batch["rm_scores"].tolist() == [[1.0, 0.0], [0.0, 0.5]]
    data.batch["advantages"] = torch.tensor([[2.0, 0.0], [3.0, 4.0]])
    [group] = from_dataproto(data)
    assert group.rewards.tolist() == [1.0, 0.5]
    table = to_tensordict([group])
    assert [cell.tolist() for cell in table["advantages"].unbind()] == [[2.0], [3.0, 4.0]]
    assert [cell.tolist() for cell in table["prompts"].unbind()] == [[1, 2, 3], [1]]


@pytest.mark.parametrize(
    "scores",
    [
        torch.tensor([0.0, 0.5, 1.0]),
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor([-0.0, 0.0, 1.0]),
        torch.tensor([0.0, 0.0, -0.0]),
        torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64),
        torch.tensor([0.0, 0.0, float("inf")]),
    ],
    ids=str,
)
def test_scores_are_returned_bit_for_bit(scores: torch.Tensor) -> None:
    """They are stored if they do not follow from the reward: its value at the last token."""
    fields = {"prompts": torch.tensor([1]), "responses": torch.tensor([2, 3, 4])}
    row = {**fields, "rm_scores": scores, "uid": "u"}
    [group] = from_tensordict(list_of_dict_to_tensordict([row]))
    back = to_tensordict([group])["rm_scores"].unbind()[0]
    assert back.dtype == scores.dtype
    assert back.numpy().tobytes() == scores.numpy().tobytes()


def test_errors_name_missing_fields() -> None:
    with pytest.raises(InvalidInputError, match="groups"):
        to_tensordict([])
    some = Episode(prompt_ids=[1], response_ids=[2], reward=1.0)
    other = Episode(prompt_ids=[1], response_ids=[2])
    with pytest.raises(InvalidInputError, match="rm_scores"):
        to_tensordict([EpisodeGroup("math", [some, other])])
    with pytest.raises(InvalidInputError, match="uid"):
        from_tensordict(list_of_dict_to_tensordict([trajectory(0, 0)]))
    tensors = {"prompts": torch.zeros(1, 2), "responses": torch.zeros(1, 2)}
    data = DataProto.from_dict(tensors=tensors)
    with pytest.raises(InvalidInputError, match="attention_mask"):
        from_dataproto(data)
