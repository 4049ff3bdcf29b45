"""Tensors with one row per sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from replaydb.batch.columns import LOGPROBS, TOKEN_VERSIONS, Columns, TokenField
from replaydb.batch.layouts import Layout, row_layout
from replaydb.batch.tensors import PaddedBatch, SequenceTensors, SplitBatch
from replaydb.domain import checks
from replaydb.domain.episodes.arrays import Array

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Side = Literal["left", "right"]

_B = TypeVar("_B", bound=SequenceTensors)


def padded(
    columns: Columns,
    pad_token_id: int,
    *,
    side: Side = "right",
    pad_to_multiple_of: int | None = None,
    max_length: int | None = None,
    fields: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> PaddedBatch:
    """Return a `PaddedBatch` with one row per sequence; see `Batch.padded`."""
    fields = columns.chosen(fields)
    pad = checks.token_id("pad_token_id", pad_token_id)
    full_lengths = columns.lengths
    lengths = _shortened(full_lengths, "max_length", max_length)
    cut = lengths < full_lengths
    # Keep the beginning: responses are truncated before prompts.
    kept = _kept(columns, np.zeros_like(lengths), lengths) if cut.any() else None
    width = _width(lengths, pad_to_multiple_of)
    layout = row_layout(columns, lengths, width, left=_is_left("side", side), kept=kept)
    found = columns.token_fields(fields)
    tokens = token_tensors(columns, layout, pad, found, pinned=is_pinned(device))
    return moved(
        PaddedBatch(
            **sequence_tensors(columns, lengths, cut, found, fields),
            **tokens,
            attention_mask=tensor_of(layout.filled),
        ),
        device,
    )


def split(
    columns: Columns,
    pad_token_id: int,
    *,
    prompt_side: Side = "left",
    side: Side = "right",
    pad_to_multiple_of: int | None = None,
    max_prompt_length: int | None = None,
    max_length: int | None = None,
    fields: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> SplitBatch:
    """Return a `SplitBatch` with prompts and responses separately; see `Batch.split`."""
    fields = columns.chosen(fields)
    pad = checks.token_id("pad_token_id", pad_token_id)
    prompts = columns.prompt_lengths
    responses = columns.lengths - prompts
    prompt_sizes = _shortened(prompts, "max_prompt_length", max_prompt_length)
    response_sizes = _shortened(responses, "max_length", max_length)
    before = row_layout(
        columns,
        prompt_sizes,
        _width(prompt_sizes, pad_to_multiple_of),
        left=_is_left("prompt_side", prompt_side),
        kept=_kept(columns, prompts - prompt_sizes, prompt_sizes),
    )
    after = row_layout(
        columns,
        response_sizes,
        _width(response_sizes, pad_to_multiple_of),
        left=_is_left("side", side),
        kept=_kept(columns, prompts, response_sizes),
    )
    pinned = is_pinned(device)
    found = columns.token_fields(fields)
    tokens = token_tensors(columns, after, pad, found, pinned=pinned)
    cut = (prompt_sizes < prompts) | (response_sizes < responses)
    per_sequence = sequence_tensors(columns, prompt_sizes + response_sizes, cut, found, fields)
    return moved(
        SplitBatch(
            **per_sequence | {"prompt_lengths": tensor_of(prompt_sizes)},
            prompt_ids=before.tensor(_token_ids(columns), dtype="int64", pad=pad, pinned=pinned),
            prompt_mask=tensor_of(before.filled),
            response_ids=tokens.pop("token_ids"),
            response_mask=tensor_of(after.filled),
            **tokens,
        ),
        device,
    )


def token_tensors(
    columns: Columns,
    layout: Layout,
    pad: int,
    fields: Sequence[TokenField],
    *,
    pinned: bool,
) -> dict[str, Any]:
    """Return the token-level attributes of a batch by name, except its attention masks."""
    loss_mask = TokenField(
        "loss_mask",
        "bool",
        (),
        [part.loss_mask for part in columns.parts],
        0,
        np.ones(columns.num_sequences, np.bool_),
    )
    tensors: dict[str, Tensor] = {
        field.name: layout.tensor(field, pinned=pinned) for field in fields
    }
    return {
        "token_ids": layout.tensor(_token_ids(columns), dtype="int64", pad=pad, pinned=pinned),
        "loss_mask": layout.tensor(loss_mask, pinned=pinned),
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
        field.name: field.present
        for field in token_fields
        if field.name not in (LOGPROBS, TOKEN_VERSIONS)
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


def _token_ids(columns: Columns) -> TokenField:
    present = np.ones(columns.num_sequences, np.bool_)
    return TokenField(
        "token_ids", "int32", (), [part.token_ids for part in columns.parts], 0, present
    )


def _kept(
    columns: Columns, skipped: NDArray[np.int64], kept: NDArray[np.int64]
) -> list[NDArray[np.bool_]]:
    """Return which tokens of each part are the `kept` ones after `skipped` ones, by sequence."""
    rest = columns.lengths - skipped - kept
    runs = np.stack([skipped, kept, rest], axis=1)
    return [
        np.repeat(np.tile([False, True, False], end - begin), runs[begin:end].reshape(-1))
        for begin, end in pairwise(columns.bounds.tolist())
    ]


def _width(lengths: NDArray[np.int64], multiple: int | None) -> int:
    longest = int(lengths.max(initial=0))
    step = 1 if multiple is None else checks.whole_number("pad_to_multiple_of", multiple, 1)
    return -(-longest // step) * step


def _shortened(lengths: NDArray[np.int64], name: str, limit: int | None) -> NDArray[np.int64]:
    return lengths if limit is None else np.minimum(lengths, checks.whole_number(name, limit, 1))


def _is_left(name: str, side: str) -> bool:
    return bool(checks.one_of(name, side, get_args(Side)) == "left")
