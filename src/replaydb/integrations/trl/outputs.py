"""Conversion of `GRPOTrainer`'s generation outputs to groups, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from replaydb import Batch, EpisodeGroup
from replaydb.errors import InvalidInputError, NotSupportedError

if TYPE_CHECKING:
    from torch import Tensor

#: Log probabilities of the policy that generated, computed by the trainer and by an engine.
OLD, SAMPLING = "old_per_token_logps", "sampling_per_token_logps"
_RATIO = "importance_sampling_ratio"
_MASKS = frozenset({"completion_mask", "tool_mask"})
#: Fields with one value per token of the completions.
_PER_TOKEN = _MASKS | {OLD, SAMPLING, _RATIO, "ref_per_token_logps"}
_OTHERS = {"prompt_ids", "prompt_mask", "completion_ids", "advantages", "num_items_in_batch"}


class Scored(NamedTuple):
    """Inputs and results of the reward functions of a process, for each of B completions.

    Attributes:
        prompts: Text or messages.
        lengths: Numbers of tokens of the completions, without padding.
        texts: The completions as readable text.
        metadata: Rewards by function name, None if a function returned none; and the messages of
            completions that are more than text.
        totals: Weighted sums of the rewards [B]; NaN if no function returned one.
    """

    prompts: list[Any]
    lengths: list[int]
    texts: list[str]
    metadata: list[dict[str, Any]]
    totals: Tensor


def check(outputs: Mapping[str, Any]) -> None:
    """Refuse outputs that could not be stored and returned unchanged.

    Raises:
        NotSupportedError: A field is unknown.
        InvalidInputError: There is not one advantage per completion.
    """
    if unknown := sorted(outputs.keys() - _PER_TOKEN - _OTHERS):
        raise NotSupportedError(f"fields that cannot be replayed: {', '.join(unknown)}")
    shape = list(outputs["advantages"].shape)
    if len(shape) != 1:
        raise InvalidInputError("advantages", "one per completion, of shape [B]", shape)


def signature(fields: Mapping[str, Tensor], ratio_mode: str) -> str:
    """Return the fields that a stored group must have to be replayed by a trainer, as text."""
    mode = [ratio_mode] if _RATIO in fields else []
    return " ".join(sorted(_PER_TOKEN & fields.keys()) + mode)


def to_groups(
    fields: Mapping[str, Tensor], scored: Scored, *, size: int, version: int, tags: dict[str, Any]
) -> list[EpisodeGroup]:
    """Convert a generation to groups of `size` completions, unpadded, on the CPU."""
    width = fields["completion_ids"].size(1)
    columns = {name: _stored(name, fields[name], width) for name in _PER_TOKEN & fields.keys()}
    logprobs = columns.pop(SAMPLING if SAMPLING in fields else OLD)
    loss_mask = columns["completion_mask"] * columns.get("tool_mask", 1)
    prompt_ids, prompt_mask = fields["prompt_ids"].cpu(), fields["prompt_mask"].cpu().bool()
    # Not completion_mask, which is empty if truncated completions are masked.
    mask = torch.arange(width) < torch.tensor(scored.lengths)[:, None]
    arrays: dict[str, Any] = {
        "token_ids": torch.cat([prompt_ids, fields["completion_ids"].cpu()], 1),
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "prompt_lengths": prompt_mask.sum(1),
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "rewards": scored.totals,
        "advantages": fields["advantages"],
        "metadata": scored.metadata,
        "texts": scored.texts,
    }

    def group(first: int, part: slice) -> EpisodeGroup:
        prompt = prompt_ids[first][prompt_mask[first]]
        return EpisodeGroup.from_arrays(
            "grpo",
            **{name: of[part] for name, of in arrays.items()},
            policy_versions=version,
            token_extras={name: column[part] for name, column in columns.items()},
            prompt_uid=hashlib.sha256(prompt.numpy().tobytes()).hexdigest()[:16],
            prompt=scored.prompts[first],
            tags=tags,
        )

    return [group(first, slice(first, first + size)) for first in range(0, len(mask), size)]


def to_fields(
    groups: list[EpisodeGroup], fields: Mapping[str, Tensor], *, ratio_mode: str, **padding: Any
) -> dict[str, Tensor]:
    """Convert fresh and stored groups to the trainer's fields.

    Args:
        groups: The groups, which have the same fields.
        fields: The fields of the fresh generation, whose names and dtypes the result has.
        ratio_mode: `vllm_importance_sampling_mode` of the trainer.
        padding: Arguments of `Batch.split`.
    """
    split = Batch(groups).split(**padding)
    columns: dict[str, Any] = {
        "prompt_ids": split.prompt_ids,
        "prompt_mask": split.prompt_mask,
        "completion_ids": split.response_ids,
        "advantages": split.advantages,
        SAMPLING if SAMPLING in fields else OLD: split.logprobs,
        **split.token_extras,
    }
    if _RATIO in fields:
        # 1 in padding, because VESPO sums the logarithms of whole rows.
        columns[_RATIO] = columns[_RATIO].masked_fill(~split.response_mask, 1.0)
        if ratio_mode.startswith("sequence"):
            columns[_RATIO] = columns[_RATIO][:, :1]
    return {
        name: columns[name].to(field.dtype) for name, field in fields.items() if name in columns
    }


def _stored(name: str, field: Tensor, width: int) -> Tensor:
    """Return a per-token field on the CPU [B, C]; masks as uint8, all others as float32."""
    kind = torch.uint8 if name in _MASKS else torch.float32
    return field.detach().to("cpu", kind).expand(-1, width)
