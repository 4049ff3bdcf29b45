"""Conversion of groups to verl's tensors, TensorDict or padded DataProto, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from replaydb import EpisodeGroup, InvalidInputError
from replaydb.integrations.verl.trajectories import Fields, rows, to_fields, to_group

#: Fields of a padded batch, and the side on which each is padded.
_SIDES = {
    "prompts": "left",
    "responses": "right",
    "response_mask": "right",
    "rm_scores": "right",
    "rollout_log_probs": "right",
}
#: Fields that are derived from prompts and responses.
_DERIVED = {"input_ids", "position_ids", "loss_mask"}


def to_tensordict(groups: Iterable[EpisodeGroup]) -> TensorDict:
    """Convert groups (or a batch) to a TensorDict of the V1 trainer, one row per trajectory.

    Fields of different lengths are nested tensors. Groups that verl did not create have the
    standard fields, with the reward at the last token of `rm_scores`.

    Raises:
        InvalidInputError: There are no trajectories, or not all have the same fields.
    """
    return list_of_dict_to_tensordict(_table(groups))


def from_tensordict(table: TensorDict) -> list[EpisodeGroup]:
    """Convert the rows of a TensorDict to groups by `uid`, in the order of their first rows.

    Raises:
        InvalidInputError: `uid`, `prompts` or `responses` are missing.
    """
    return _groups(rows(table))


def to_dataproto(groups: Iterable[EpisodeGroup], pad_token_id: int) -> DataProto:
    """Convert groups (or a batch) to a padded DataProto: prompts left, responses right.

    With P and R the longest prompt and response: `prompts` [B, P]; `responses`, `response_mask`
    and, if they are known, `rm_scores` and `rollout_log_probs` [B, R]; `input_ids`,
    `attention_mask` and `position_ids` [B, P + R], positions counted as for text. All other
    fields are in `non_tensor_batch`.

    Args:
        groups: The groups.
        pad_token_id: Padding of `prompts` and `responses`.

    Raises:
        InvalidInputError: There are no trajectories, or not all have the same fields.
    """
    table = _table(groups)
    columns = {name: [row[name] for row in table] for name in table[0].keys() - _DERIVED}

    def padded(name: str, cells: list[torch.Tensor], fill: int = 0) -> torch.Tensor:
        return pad_sequence(cells, True, fill, _SIDES[name])

    ones = {name: [torch.ones_like(cell) for cell in columns[name]] for name in _TOKENS}
    mask = torch.cat([padded(name, ones[name]) for name in _TOKENS], 1)
    batch = {
        name: padded(name, columns.pop(name), pad_token_id if name in _TOKENS else 0)
        for name in _SIDES
        if name in columns
    }
    batch["input_ids"] = torch.cat([batch[name] for name in _TOKENS], 1)
    batch["attention_mask"] = mask
    batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) * mask
    others = {name: np.fromiter(cells, object, len(cells)) for name, cells in columns.items()}
    return DataProto.from_dict(tensors=batch, non_tensors=others)


def from_dataproto(data: DataProto) -> list[EpisodeGroup]:
    """Convert a padded batch to groups by `uid`, without padding.

    Tensors with as many columns as prompts, responses or both lose their padding, according to
    `attention_mask`. Tensors that the trainer added, such as advantages, are kept as fields.

    Raises:
        InvalidInputError: `uid`, `prompts`, `responses` or `attention_mask` are missing.
    """
    batch = {} if data.batch is None else dict(data.batch.items())
    for name in (*_TOKENS, "attention_mask"):
        if name not in batch:
            raise InvalidInputError(f"batch.{name}", "a tensor", None)
    mask = batch.pop("attention_mask").bool()
    length = batch["prompts"].shape[1]
    parts = {"prompts": mask[:, :length], "responses": mask[:, length:]}
    by_width = {part.shape[1]: part for part in (parts["prompts"], parts["responses"], mask)}
    table: list[Fields] = [{} for _ in range(len(mask))]
    for name, tensor in batch.items():
        kept = parts.get(name, None if tensor.ndim < 2 else by_width.get(tensor.shape[1]))
        for i, row in enumerate(table):
            row[name] = tensor[i] if kept is None else tensor[i][kept[i]]
    for name, cells in data.non_tensor_batch.items():
        for row, cell in zip(table, cells, strict=True):
            row[name] = cell
    return _groups(table)


_TOKENS = ("prompts", "responses")


def _table(groups: Iterable[EpisodeGroup]) -> list[Fields]:
    table = [
        {"uid": group.group_uid, **to_fields(group, episode)}
        for group in groups
        for episode in group.episodes
    ]
    if not table:
        raise InvalidInputError("groups", "at least one trajectory", "none")
    for i, row in enumerate(table):
        if differing := sorted(row.keys() ^ table[0].keys()):
            raise InvalidInputError(f"trajectories[{i}]", "the fields of the first", differing)
    return table


def _groups(table: Iterable[Fields]) -> list[EpisodeGroup]:
    by_uid: dict[str, dict[str, tuple[Fields, Mapping[str, Any]]]] = defaultdict(dict)
    for i, row in enumerate(table):
        uid = row.get("uid")
        if not isinstance(uid, str):
            raise InvalidInputError(f"rows[{i}].uid", "text", repr(uid))
        by_uid[uid][f"{uid}_{len(by_uid[uid])}_0"] = (row, {})
    return [to_group(uid, trajectories, {}) for uid, trajectories in by_uid.items()]
