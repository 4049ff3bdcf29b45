"""Batch: the result of a draw."""

from __future__ import annotations

import math
import typing
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from replaydb import limits
from replaydb.batch import packing, padding
from replaydb.batch.columns import IDS, Columns
from replaydb.batch.layouts import Layout, row_layout
from replaydb.batch.packing import Fit
from replaydb.batch.padding import Side
from replaydb.batch.stored import StoredGroup, id_of
from replaydb.batch.tensors import PackedBatch, PaddedBatch, SplitBatch, TreeBatch
from replaydb.batch.trees import Placement
from replaydb.domain import checks
from replaydb.domain.episodes import EpisodeGroup
from replaydb.domain.episodes.arrays import ArrayLike, to_float64
from replaydb.domain.episodes.turns import set_fields
from replaydb.errors import InvalidInputError

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar


# `Batch` without a parameter means batches of stored groups.
if TYPE_CHECKING:
    G = TypeVar("G", bound=EpisodeGroup, covariant=True, default=StoredGroup)
else:
    G = typing.TypeVar("G")


# Not a `collections.abc.Sequence`: a DataLoader rebuilds those from their items, without weights.
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Batch(typing.Generic[G]):
    """A sequence of groups: the result of a draw, in its order, or `Batch(groups)` of your own.

    `batch[0]` is a group and `batch[:8]` a batch of the same draw. Iteration, `len` and `in` apply
    to the groups. `padded`, `split`, `packed` and `trees` return tensors. They keep the order of
    groups and of episodes within groups; groups can have different sizes. Episodes that were stored
    as turns are merged first (see `replaydb.training.merge_turns`, with `interleaved=True`), so one
    episode can become several sequences, or none if all its turns are discarded.

    Attributes:
        groups: The groups [n], with their episodes.
        probabilities: Probability of each group to be drawn next among the drawable groups of its
            task, or of all tasks if they are drawn together, float64 [n]. 1.0 if the sampling
            strategy is not random, and by default. Filters do not change it.
        weights: Importance weights `(w_i / min_j w_j) ** -beta`, float64 [n]. The largest weight of
            each draw (of each task if n has a number per task) is 1.0. All 1.0 by default.
        draw_id: Id of the recorded draw; None if it was not recorded.

    Raises:
        InvalidInputError: `groups` has other objects than groups, or there is not one probability
            and one weight per group.
    """

    groups: tuple[G, ...]
    probabilities: NDArray[np.float64]
    weights: NDArray[np.float64]
    draw_id: int | None

    def __init__(
        self,
        groups: Iterable[G],
        probabilities: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        draw_id: int | None = None,
    ) -> None:
        several = checks.instances("groups", groups, EpisodeGroup)
        set_fields(
            self,
            groups=several,
            probabilities=_one_each("probabilities", probabilities, len(several)),
            weights=_one_each("weights", weights, len(several)),
            draw_id=checks.optional(checks.whole_number, "draw_id", draw_id),
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[G]:
        return iter(self.groups)

    def __contains__(self, group: object) -> bool:
        return group in self.groups

    @overload
    def __getitem__(self, index: SupportsIndex) -> G: ...

    @overload
    def __getitem__(self, index: slice) -> Batch[G]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> G | Batch[G]:
        if not isinstance(index, slice):
            return self.groups[index]
        return Batch(
            self.groups[index], self.probabilities[index], self.weights[index], self.draw_id
        )

    @property
    def ids(self) -> list[int]:
        """Ids of the groups [n]; -1 for groups that were never stored, which no call accepts."""
        return [id_of(group) for group in self.groups]

    @property
    def staleness(self) -> list[int | None]:
        """Policy versions that the groups were behind the buffer's when they were drawn [n].

        None if unknown, as for groups that were never stored. In the batch of `Buffer.open_lease`
        it is the staleness when the lease was opened.
        """
        return [getattr(group, "staleness", None) for group in self.groups]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards of the E episodes of all groups, float64 [E]; NaN if an episode has none."""
        return np.concatenate([np.empty(0), *(group.rewards for group in self.groups)])

    @property
    def group_index(self) -> NDArray[np.int64]:
        """Index of the group of each episode, int64 [E]."""
        return np.repeat(np.arange(len(self)), [group.num_episodes for group in self.groups])

    def padded(
        self,
        pad_token_id: int,
        *,
        side: Side = "right",
        pad_to_multiple_of: int | None = None,
        max_length: int | None = None,
        fields: Collection[str] | None = None,
        end_token_id: int | None = None,
        device: torch.device | str | None = None,
    ) -> PaddedBatch:
        """Return tensors with one row per sequence.

        Args:
            pad_token_id: Token id for padding.
            side: Side of the padding, "right" or "left".
            pad_to_multiple_of: Round the width up to a multiple of this. Default: no rounding.
            max_length: Maximum length. Longer sequences lose their end and are marked `truncated`.
                Default: no limit.
            fields: Which of "logprobs", "token_versions" and the extras to include. Default: all.
                Token ids, masks, and fields with one value per sequence (`rewards`, `advantages`,
                `weights`, ...) are always included, and can be named too.
            end_token_id: Token that ends an answer, for merging turns whose text was tokenized
                differently; see `replaydb.training.merge_turns`. Default: none.
            device: Device of the tensors. Default: CPU. Copies to a CUDA device are made
                asynchronously from page-locked memory.

        Returns:
            Tensors of shape [N, L]: N sequences, L tokens in the longest one.

        Raises:
            InvalidInputError: An argument is invalid, or a token extra does not have the same dtype
                and shape in all episodes.
        """
        columns = Columns.of(self.groups, self.weights, end_token_id)
        chosen = columns.chosen(fields)
        pad = checks.token_id("pad_token_id", pad_token_id)
        full_lengths = columns.lengths
        lengths = padding.shortened(full_lengths, "max_length", max_length)
        cut = lengths < full_lengths
        # Keep the beginning: responses are truncated before prompts.
        begins = np.zeros_like(lengths)
        width = padding.width_of(lengths, pad_to_multiple_of)
        layout = row_layout(columns, begins, lengths, width, left=padding.is_left("side", side))
        found = columns.token_fields(chosen)
        tokens = padding.token_tensors(layout, pad, found, pinned=padding.is_pinned(device))
        return padding.moved(
            PaddedBatch(
                **padding.sequence_tensors(columns, lengths, cut, found, chosen),
                **tokens,
                attention_mask=padding.tensor_of(layout.filled),
            ),
            device,
        )

    def split(
        self,
        pad_token_id: int,
        *,
        prompt_side: Side = "left",
        side: Side = "right",
        pad_to_multiple_of: int | None = None,
        max_prompt_length: int | None = None,
        max_length: int | None = None,
        fields: Collection[str] | None = None,
        end_token_id: int | None = None,
        device: torch.device | str | None = None,
    ) -> SplitBatch:
        """Return tensors with prompts and responses separately, as GRPO trainers use them.

        Args:
            pad_token_id: Token id for padding.
            prompt_side: Side of the padding of prompts.
            side: Side of the padding of responses.
            pad_to_multiple_of: Round both widths up to a multiple of this. Default: no rounding.
            max_prompt_length: Maximum length of prompts. Longer prompts lose their beginning.
            max_length: Maximum length of responses. Longer responses lose their end.
            fields: Which of "logprobs", "token_versions" and the extras to include, see `padded`.
                Default: all.
            end_token_id: Token that ends an answer, for merging turns, see `padded`.
            device: Device of the tensors, see `padded`. Default: CPU.

        Returns:
            Tensors of shape [N, P] for prompts and [N, R] for responses.

        Raises:
            InvalidInputError: As for `padded`.
        """
        columns = Columns.of(self.groups, self.weights, end_token_id)
        chosen = columns.chosen(fields)
        pad = checks.token_id("pad_token_id", pad_token_id)
        prompts = columns.prompt_lengths
        responses = columns.lengths - prompts
        prompt_sizes = padding.shortened(prompts, "max_prompt_length", max_prompt_length)
        response_sizes = padding.shortened(responses, "max_length", max_length)
        before = row_layout(
            columns,
            prompts - prompt_sizes,
            prompt_sizes,
            padding.width_of(prompt_sizes, pad_to_multiple_of),
            left=padding.is_left("prompt_side", prompt_side),
        )
        after = row_layout(
            columns,
            prompts,
            response_sizes,
            padding.width_of(response_sizes, pad_to_multiple_of),
            left=padding.is_left("side", side),
        )
        pinned = padding.is_pinned(device)
        found = columns.token_fields(chosen)
        tokens = padding.token_tensors(after, pad, found, pinned=pinned)
        cut = (prompt_sizes < prompts) | (response_sizes < responses)
        per_sequence = padding.sequence_tensors(
            columns, prompt_sizes + response_sizes, cut, found, chosen
        )
        return padding.moved(
            SplitBatch(
                **per_sequence | {"prompt_lengths": padding.tensor_of(prompt_sizes)},
                prompt_ids=before.tensor(IDS, dtype="int64", pad=pad, pinned=pinned),
                prompt_mask=padding.tensor_of(before.filled),
                response_ids=tokens.pop("token_ids"),
                response_mask=padding.tensor_of(after.filled),
                **tokens,
            ),
            device,
        )

    def packed(
        self,
        pad_token_id: int,
        *,
        max_tokens: int,
        fit: Fit = "next",
        drop_oversized: bool = False,
        fields: Collection[str] | None = None,
        end_token_id: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedBatch:
        """Return tensors with several sequences in each row of `max_tokens` tokens.

        Args:
            pad_token_id: Token id for padding.
            max_tokens: Width of a row.
            fit: "next" keeps the order of sequences. "first" packs the longest first, which needs
                fewer rows.
            drop_oversized: Whether to omit sequences that are longer than a row. They have length 0
                and are listed in `dropped`. With False they raise an error.
            fields: Which of "logprobs", "token_versions" and the extras to include, see `padded`.
                Default: all.
            end_token_id: Token that ends an answer, for merging turns, see `padded`.
            device: Device of the tensors, see `padded`. Default: CPU.

        Returns:
            Tensors of shape [R, C]: R rows of C = `max_tokens` tokens.

        Raises:
            InvalidInputError: As for `padded`, or a sequence is longer than a row.
        """
        columns = Columns.of(self.groups, self.weights, end_token_id)
        chosen = columns.chosen(fields)
        pad = checks.token_id("pad_token_id", pad_token_id)
        width = checks.whole_number("max_tokens", max_tokens, least=1)
        drop = checks.flag("drop_oversized", drop_oversized)
        full_lengths = columns.lengths
        oversized = full_lengths > width
        if oversized.any() and not drop:
            longest = full_lengths.max()
            expected = (
                f"at least {longest}, the length of the longest sequence, or drop_oversized=True"
            )
            raise InvalidInputError("max_tokens", expected, width)
        lengths = np.where(oversized, 0, full_lengths)
        rows, begins = packing.plan(lengths, width, fit)
        starts = rows * width + begins
        runs = packing.Runs.of(starts, lengths, rows, width)
        limits.check_array(math.prod(runs.shape))
        layout = Layout(
            shape=runs.shape,
            filled=runs.spread(runs.members >= 0),
            segments=columns.segments,
            begins=[0] * columns.num_sequences,
            lengths=lengths.tolist(),
            targets=starts.tolist(),
        )
        found = columns.token_fields(chosen)
        return padding.moved(
            PackedBatch(
                **padding.sequence_tensors(columns, lengths, oversized, found, chosen),
                **padding.token_tensors(layout, pad, found, pinned=padding.is_pinned(device)),
                attention_mask=padding.tensor_of(layout.filled),
                position_ids=padding.tensor_of(runs.positions()),
                sequence_index=padding.tensor_of(runs.spread(runs.members)),
                cu_seqlens=padding.tensor_of(runs.bounds.astype(np.int32)),
                max_seqlen=int(runs.lengths.max(initial=0)),
                row_lengths=padding.tensor_of(layout.filled.sum(axis=1)),
                dropped=padding.tensor_of(columns.episode_index[oversized]),
            ),
            device,
        )

    def trees(
        self,
        pad_token_id: int,
        *,
        pad_to_multiple_of: int | None = None,
        fields: Collection[str] | None = None,
        end_token_id: int | None = None,
        device: torch.device | str | None = None,
    ) -> TreeBatch:
        """Return tensors in which tokens that several sequences of a group begin with are once.

        A model that attends by `tree_mask` and is given `position_ids` computes for each token what
        it does for the token in a `PaddedBatch`.

        Args:
            pad_token_id: Token id for padding.
            pad_to_multiple_of: Round the width up to a multiple of this. Default: no rounding.
            fields: Which of "logprobs", "token_versions" and the extras to include, see `padded`.
                Default: all.
            end_token_id: Token that ends an answer, for merging turns, see `padded`.
            device: Device of the tensors, see `padded`. Default: CPU.

        Returns:
            Tensors of shape [A, B]: A groups, B tokens in the trees of the largest one.

        Raises:
            InvalidInputError: As for `padded`.
        """
        columns = Columns.of(self.groups, self.weights, end_token_id)
        chosen = columns.chosen(fields)
        pad = checks.token_id("pad_token_id", pad_token_id)
        found = columns.token_fields(chosen)
        placement = Placement.of(columns, found, len(self))
        layout = placement.layout(padding.width_of(placement.widths, pad_to_multiple_of))
        lengths, pinned = columns.lengths, padding.is_pinned(device)
        whole = np.zeros(len(lengths), np.bool_)
        indices: dict[str, Any] = {
            name: padding.tensor_of(array)
            for name, array in placement.indices(layout.shape).items()
        }
        return padding.moved(
            TreeBatch(
                **padding.sequence_tensors(columns, lengths, whole, found, chosen),
                **padding.token_tensors(layout, pad, found, pinned=pinned),
                **indices,
                attention_mask=padding.tensor_of(layout.filled),
            ),
            device,
        )

    def __repr__(self) -> str:
        return f"Batch(of {len(self)} groups, ids={self.ids})"


def _one_each(field: str, values: ArrayLike | None, count: int) -> NDArray[np.float64]:
    return np.ones(count) if values is None else to_float64(field, values, count)
