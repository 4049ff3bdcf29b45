"""Tensor batches for trainers: dataclasses of tensors of N sequences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from replaydb.domain.episodes.merging import MergeReport
from replaydb.domain.episodes.ragged import Ragged, from_offsets

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The label that `torch.nn.functional.cross_entropy` ignores.
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceTensors:
    """Tensors with one value per sequence. A sequence is an episode, or a row of merged turns.

    Attributes:
        lengths: Number of tokens in the batch, int64 [N].
        prompt_lengths: Number of these tokens that belong to the prompt, int64 [N].
        truncated: Whether tokens were left out, bool [N].
        rewards: Reward of the episode, float32 [N]; NaN if there is none. Every row of an episode
            whose turns were merged to several rows has the reward of the episode. Rewards of single
            turns are in `token_extras["token_rewards"]`.
        advantages: Stored advantages, float32 [N]; NaN if there is none.
        policy_versions: Lowest version that generated a token, int64 [N];
            `replaydb.UNKNOWN_VERSION` (-2**62) if unknown.
        weights: Importance weights of the draw, float32 [N].
        group_index: Index of the group in the batch, int64 [N].
        group_ids: Id of the group in the store, int64 [N]; -1 if it is not stored.
        episode_index: Index of the episode among all episodes, int64 [N]. Not an arange if turns
            were merged to several rows or episodes were dropped.
        has_logprobs: Which sequences have behaviour logprobs, bool [N].
        extras: Episode-level extras, each [N, ...], zeros where absent. Extras with several shapes
            or dtypes are lists of N tensors or None.
        present: For each extra that some sequences do not have: which have it, bool [N].
        merged: Report on merged turns; None if there were no turns.
    """

    lengths: Tensor
    prompt_lengths: Tensor
    truncated: Tensor
    rewards: Tensor
    advantages: Tensor
    policy_versions: Tensor
    weights: Tensor
    group_index: Tensor
    group_ids: Tensor
    episode_index: Tensor
    has_logprobs: Tensor
    extras: dict[str, Any]
    present: dict[str, Tensor]
    merged: MergeReport | None

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the batch on a device; `non_blocking` as in `Tensor.to`, for pinned memory."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory. `torch.utils.data.DataLoader` calls this."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(
            self,
            **{field.name: _changed(getattr(self, field.name), change) for field in fields(self)},
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenTensors(SequenceTensors):
    """Tokens in rows of equal width, [A, B].

    If padded, there is one row per sequence, and [A, B] is [N, L]: N sequences, the longest with L
    tokens. If packed, it is [R, C]: R rows of C tokens, with several sequences in each.

    Attributes:
        token_ids: Token ids, int64 [A, B]; the padding token where there is no token.
        attention_mask: Where there is a token, bool [A, B].
        loss_mask: Which tokens are in the loss, bool [A, B].
        logprobs: Behaviour logprobs, float32 [A, B]: 0.0 in padding, NaN in sequences without
            logprobs. None if no sequence has any.
        token_versions: Policy version of each token, int64 [A, B]; None if no sequence has versions
            per token.
        token_extras: Token-level extras by name, each [A, B, ...], zeros in padding and where
            absent. A `Ragged` has the A * B tokens of all rows, row after row, and no values in
            padding: those at `[row, position]` are `ragged[row * B + position]`.
    """

    token_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    logprobs: Tensor | None
    token_versions: Tensor | None
    token_extras: dict[str, Any]

    def shifted(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return at each token the value of the next token, which it predicts.

        Args:
            values: One value per token, [A, B, ...].
            fill: Value where nothing is predicted: at the last token of each sequence and in
                padding.

        Returns:
            [A, B, ...]. No value crosses from one sequence to another.
        """
        import torch

        result = torch.full_like(values, fill)
        predicts = self._predicts.view(*self._predicts.shape, *[1] * (values.ndim - 2))
        result[:, :-1] = torch.where(predicts, values[:, 1:], result[:, :-1])
        return result

    @property
    def labels(self) -> Tensor:
        """Token to predict from each position, int64 [A, B]; -100 if it is not in the loss."""
        import torch

        wanted = torch.where(self.loss_mask, self.token_ids, IGNORED_LABEL)
        return self.shifted(wanted, IGNORED_LABEL)

    @property
    @abstractmethod
    def _predicts(self) -> Tensor:
        """Whether a token is followed by a token of the same sequence, bool [A, B - 1]."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PaddedBatch(TokenTensors):
    """One row per sequence, as wide as the longest: [A, B] is [N, L]."""

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat values of sequences [N] for each of their tokens [N, L]; 0 in padding."""
        return values[:, None] * self.attention_mask

    @property
    def position_ids(self) -> Tensor:
        """Position of each token in its sequence, int64 [N, L]; 0 in padding."""
        return _positions(self.attention_mask)

    @property
    def _predicts(self) -> Tensor:
        return self.attention_mask[:, 1:] & self.attention_mask[:, :-1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedBatch(TokenTensors):
    """Several sequences in each row of C tokens: [A, B] is [R, C].

    Attributes:
        position_ids: Position of each token in its sequence, int64 [R, C]; 0 in padding.
        sequence_index: Index of the sequence of each token, int64 [R, C]; -1 in padding. Attention
            must stay within one sequence.
        cu_seqlens: Start of each sequence in the flattened rows, and R * C, int32, as the
            variable-length kernels of FlashAttention take it. The padding at the end of a row
            counts as a sequence.
        max_seqlen: Length of the longest sequence of `cu_seqlens`.
        row_lengths: Number of tokens in each row, int64 [R].
        dropped: `episode_index` of sequences that were longer than a row, int64.
    """

    position_ids: Tensor
    sequence_index: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    row_lengths: Tensor
    dropped: Tensor

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat values of sequences [N] for each of their tokens [R, C]; 0 in padding."""
        if not len(values):
            return values.new_zeros(self.token_ids.shape)
        return values[self.sequence_index.clamp(min=0)] * self.attention_mask

    @property
    def _predicts(self) -> Tensor:
        return self.position_ids[:, 1:] > 0

    def row_cu_seqlens(self, row: int) -> Tensor:
        """Return `cu_seqlens` of one row alone, from 0 to C, int32."""
        width = self.token_ids.shape[1]
        begin, end = row * width, (row + 1) * width
        inside = (self.cu_seqlens >= begin) & (self.cu_seqlens <= end)
        return self.cu_seqlens[inside] - begin


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SplitBatch(SequenceTensors):
    """Prompts and responses in separate tensors, P and R tokens wide, as GRPO trainers use them.

    Attributes:
        prompt_ids: Token ids of prompts, int64 [N, P].
        prompt_mask: Where there is a prompt token, bool [N, P].
        response_ids: Token ids of responses, int64 [N, R]. With merged turns, later prompts are
            included.
        response_mask: Where there is a response token, bool [N, R].
        loss_mask: Which response tokens are in the loss, bool [N, R].
        logprobs: Behaviour logprobs of the response, float32 [N, R], as in `TokenTensors`.
        token_versions: Policy version of each response token, int64 [N, R], or None.
        token_extras: Token-level extras of the responses by name, each [N, R, ...]. `Ragged` as in
            `TokenTensors`, with N * R tokens.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    logprobs: Tensor | None
    token_versions: Tensor | None
    token_extras: dict[str, Any]

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat values of sequences [N] for each of their response tokens [N, R]; 0 in padding."""
        return values[:, None] * self.response_mask

    @property
    def input_ids(self) -> Tensor:
        """Prompts followed by responses, int64 [N, P + R]."""
        import torch

        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """Where `input_ids` has a token, bool [N, P + R]."""
        import torch

        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    @property
    def position_ids(self) -> Tensor:
        """Position of each token of `input_ids` in its sequence, int64 [N, P + R]; 0 in padding."""
        return _positions(self.attention_mask)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TreeBatch(SequenceTensors):
    """The sequences of each group as trees, in a row for each of A groups: [A, B].

    Tokens with which several sequences of a group begin are there once. Tokens are in depth-first
    order: those before a token in its sequences are earlier ones of its row, and those after it in
    any of them are consecutive.

    A token in the loss belongs to one sequence alone. Context is shared if all fields of the batch
    have the same values for it, except `token_versions`, which are then those of the first
    sequence. With the tokens `path = batch.path(i)` of sequence `i` in its row,
    `token_ids[batch.group_index[i], path]` are those of its row in a `PaddedBatch`; so are the
    other fields, but the loss mask and `token_rewards` only where `sequence_index` is `i`, and 0
    elsewhere.

    Attributes:
        token_ids: Token ids, int64 [A, B]; the padding token where there is no token.
        attention_mask: Where there is a token, bool [A, B].
        loss_mask: Which tokens are in the loss, bool [A, B].
        logprobs: Behaviour logprobs, float32 [A, B], as in `TokenTensors`.
        token_versions: Policy version of each token, int64 [A, B], or None.
        token_extras: Token-level extras by name, each [A, B, ...], as in `TokenTensors`.
        parents: Position in the row of the token before, which predicts it, int64 [A, B]; -1 for
            the first token of a sequence and in padding.
        enter: Position in the row, int64 [A, B].
        exit: Position in the row after the last token below it, int64 [A, B]. A token `q` attends
            to the tokens `k` with `enter[k] <= enter[q] < exit[k]`. Padding attends to itself only.
        position_ids: Position of each token in its sequences, int64 [A, B]; 0 in padding.
        sequence_index: Index of the (first) sequence of each token, int64 [A, B]; -1 in padding.
        leaves: Position in its row of the last token of each sequence, int64 [N]; -1 if it has no
            tokens.
    """

    token_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    logprobs: Tensor | None
    token_versions: Tensor | None
    token_extras: dict[str, Any]
    parents: Tensor
    enter: Tensor
    exit: Tensor
    position_ids: Tensor
    sequence_index: Tensor
    leaves: Tensor

    @property
    def tree_mask(self) -> Tensor:
        """Whether a token (the second axis) attends to another one (the third), bool [A, B, B]."""
        query = self.enter[:, :, None]
        return (self.enter[:, None] <= query) & (query < self.exit[:, None])

    @property
    def predicted(self) -> Tensor:
        """Tokens in the loss that another token predicts, bool [A, B]."""
        return self.loss_mask & (self.parents >= 0)

    def before(self, values: Tensor) -> Tensor:
        """Return at each token the value of the token before, which predicts it.

        Args:
            values: One value per token, [A, B, ...], such as logits.

        Returns:
            [A, B, ...]. First tokens and padding have the value of the first token of the row.
        """
        import torch

        rows = torch.arange(len(values), device=values.device)[:, None]
        return values[rows, self.parents.clamp(min=0)]

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat values of sequences [N] for each of their own tokens [A, B]; 0 in padding."""
        if not len(values):
            return values.new_zeros(self.token_ids.shape)
        return values[self.sequence_index.clamp(min=0)] * self.attention_mask

    def path(self, sequence: int) -> Tensor:
        """Return the positions in its row of the tokens of a sequence, int64 [L]."""
        row, leaf = self.group_index[sequence], self.leaves[sequence]
        on_path = (self.enter[row] <= leaf) & (leaf < self.exit[row])
        return on_path.nonzero()[:, 0]


#: Fields that every batch has, whatever `fields` are requested.
ALWAYS = frozenset(field.name for field in fields(SequenceTensors)).difference(
    {"extras", "present", "merged"}
) | {"token_ids", "attention_mask", "loss_mask"}


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(dim=1) - 1).clamp_(min=0).mul_(mask)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return {name: _changed(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, Ragged):
        return from_offsets(*map(change, (value.values, value.offsets)))
    return change(value) if hasattr(value, "pin_memory") else value
