"""Tensors of a batch, and which tokens they have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from replaydb.batch.columns import IDS, MASK, Columns, TokenField
from replaydb.batch.layouts import Layout
from replaydb.batch.tensors import SequenceTensors
from replaydb.domain import checks
from replaydb.domain.episodes.arrays import Array
from replaydb.domain.episodes.ragged import Ragged
from replaydb.domain.episodes.segments import LOGPROBS, TOKEN_VERSIONS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Side = Literal["left", "right"]

_B = TypeVar("_B", bound=SequenceTensors)


def token_tensors(
    layout: Layout,
    pad: int,
    fields: Sequence[TokenField],
    *,
    pinned: bool,
) -> dict[str, Any]:
    """Return the token-level attributes of a batch by name, except its attention masks."""
    tensors: dict[str, Tensor | Ragged] = {
        field.name: (layout.ragged if None in field.trailing else layout.tensor)(
            field, pinned=pinned
        )
        for field in fields
    }
    return {
        "token_ids": layout.tensor(IDS, dtype="int64", pad=pad, pinned=pinned),
        "loss_mask": layout.tensor(MASK, pinned=pinned),
        LOGPROBS: tensors.pop(LOGPROBS, None),
        TOKEN_VERSIONS: tensors.pop(TOKEN_VERSIONS, None),
        "token_extras": tensors,
    }


def sequence_tensors(
    columns: Columns,
    lengths: NDArray[np.int64],
    cut: NDArray[np.bool_],
    token_fields: Sequence[TokenField],
    fields: Collection[str] | None,
) -> dict[str, Any]:
    """Return the attributes of `SequenceTensors` by name."""
    extras = columns.extras(fields)
    present = {name: extra.present for name, extra in extras.items()} | {
        field.name: field.present for field in token_fields if field.present is not None
    }
    return {
        "lengths": tensor_of(lengths),
        "prompt_lengths": tensor_of(np.minimum(columns.prompt_lengths, lengths)),
        "truncated": tensor_of(cut),
        "rewards": tensor_of(columns.rewards.astype(np.float32)),
        "advantages": tensor_of(columns.advantages.astype(np.float32)),
        "policy_versions": tensor_of(columns.policy_versions),
        "weights": tensor_of(columns.weights.astype(np.float32)),
        "group_index": tensor_of(columns.group_index),
        "group_ids": tensor_of(columns.group_ids),
        "episode_index": tensor_of(columns.episode_index),
        "has_logprobs": tensor_of(columns.has_logprobs),
        "extras": {
            name: tensor_of(extra.stacked)
            if extra.stacked is not None
            else [None if row is None else tensor_of(row) for row in extra.rows]
            for name, extra in extras.items()
        },
        "present": {name: tensor_of(mask) for name, mask in present.items() if not mask.all()},
        "merged": columns.merged,
    }


def tensor_of(array: Array) -> Tensor:
    """Return an array as a tensor. It shares memory only with a writable array."""
    import torch

    if not isinstance(array, np.ndarray):
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def is_pinned(device: torch.device | str | None) -> bool:
    """Whether tensors are made in page-locked memory: if the device is an available CUDA device."""
    if device is None:
        return False
    import torch

    return torch.device(device).type == "cuda" and torch.cuda.is_available()


def moved(batch: _B, device: torch.device | str | None) -> _B:
    """Move a batch to a device. All copies are asynchronous if memory is page-locked."""
    if device is None:
        return batch
    if is_pinned(device):
        return batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device)


def width_of(lengths: NDArray[np.int64], multiple: int | None) -> int:
    """Return the width of rows: the longest length, rounded up to a multiple."""
    longest = int(lengths.max(initial=0))
    step = 1 if multiple is None else checks.whole_number("pad_to_multiple_of", multiple, 1)
    return -(-longest // step) * step


def shortened(lengths: NDArray[np.int64], name: str, limit: int | None) -> NDArray[np.int64]:
    """Return lengths up to a limit, which is the argument `name`."""
    return lengths if limit is None else np.minimum(lengths, checks.whole_number(name, limit, 1))


def is_left(name: str, side: str) -> bool:
    """Whether padding is on the left, by the argument `name`."""
    return bool(checks.one_of(name, side, get_args(Side)) == "left")
