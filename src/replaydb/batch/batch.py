"""What a draw returns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from replaydb.batch import packing, padding
from replaydb.batch.columns import Columns
from replaydb.batch.packing import Fit
from replaydb.batch.padding import Side
from replaydb.batch.stored import StoredGroup
from replaydb.batch.tensors import PackedBatch, PaddedBatch, SplitBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Groups of one draw, in its order.

    `padded`, `split` and `packed` make tensors of it. They keep the order of groups and of
    episodes within them; groups may be of any size. Episodes that were stored as turns are merged
    first (see `replaydb.training.merge_turns`), which may make several sequences of one.

    Attributes:
        groups: The groups [n], with their episodes.
        probabilities: Chance of each group to be the next one drawn of its task's (or, in a draw
            over several tasks together, of all their) samplable groups, float64 [n]; 1.0 where
            the policy leaves nothing to chance. Filters do not enter.
        weights: Importance weights `(w_i / min_j w_j) ** -beta`, float64 [n]; the largest of each
            draw (of each task, where n named tasks) is 1.0.
        draw_id: Where the draw is recorded; None where the buffer does not record draws.
    """

    groups: Sequence[StoredGroup]
    probabilities: NDArray[np.float64]
    weights: NDArray[np.float64]
    draw_id: int | None = None

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def ids(self) -> list[int]:
        """Ids of the groups [n]."""
        return [group.id for group in self.groups]

    @property
    def staleness(self) -> list[int | None]:
        """Staleness of the groups when they were drawn [n]; None where it is unknown."""
        return [group.staleness for group in self.groups]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards of the E episodes of all groups, float64 [E]; NaN where there is none."""
        parts = [part.rewards for group in self.groups for part in group.parts]
        return np.concatenate(parts) if parts else np.empty(0)

    @property
    def group_index(self) -> NDArray[np.int64]:
        """Position of the group of each episode, int64 [E]."""
        sizes = [sum(part.num_episodes for part in group.parts) for group in self.groups]
        return np.repeat(np.arange(len(sizes)), sizes)

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
        """One row for each sequence.

        Args:
            pad_token_id: Stands where there is no token.
            side: Where the padding goes.
            pad_to_multiple_of: Round the width up.
            max_length: Sequences that are longer lose their end, and are marked `truncated`.
            fields: Which of "logprobs", "token_versions" and the extras to make tensors of; all
                by default. Token ids and masks always are.
            end_token_id: See `replaydb.training.merge_turns`.
            device: Where the tensors go. Copies to a CUDA device are made from page-locked memory
                and not waited for.

        Raises:
            InvalidInputError: An argument is wrong, or a token extra does not have one dtype and
                shape in all episodes.
        """
        return padding.padded(
            self._columns(end_token_id),
            pad_token_id,
            side=side,
            pad_to_multiple_of=pad_to_multiple_of,
            max_length=max_length,
            fields=fields,
            device=device,
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
        """Prompts and responses apart, as GRPO trainers keep them.

        Args:
            pad_token_id: See `padded`, also for what is not listed here.
            prompt_side: Where the padding of prompts goes.
            side: Where the padding of responses goes.
            pad_to_multiple_of: Round both widths up.
            max_prompt_length: Prompts that are longer lose their beginning.
            max_length: Responses that are longer lose their end.
            fields: See `padded`.
            end_token_id: See `padded`.
            device: See `padded`.

        Raises:
            InvalidInputError: As for `padded`.
        """
        return padding.split(
            self._columns(end_token_id),
            pad_token_id,
            prompt_side=prompt_side,
            side=side,
            pad_to_multiple_of=pad_to_multiple_of,
            max_prompt_length=max_prompt_length,
            max_length=max_length,
            fields=fields,
            device=device,
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
        """Several sequences in each row of `max_tokens` places.

        Args:
            pad_token_id: See `padded`.
            max_tokens: Width of a row.
            fit: "next" keeps the order of sequences; "first" places the longest first, which
                needs fewer rows.
            drop_oversized: Leave out sequences that are longer than a row (they have length 0 and
                are named in `dropped`) instead of refusing them.
            fields: See `padded`.
            end_token_id: See `padded`.
            device: See `padded`.

        Raises:
            InvalidInputError: As for `padded`; or a sequence is longer than a row.
        """
        return packing.packed(
            self._columns(end_token_id),
            pad_token_id,
            max_tokens=max_tokens,
            fit=fit,
            drop_oversized=drop_oversized,
            fields=fields,
            device=device,
        )

    def _columns(self, end_token_id: int | None) -> Columns:
        return Columns.of(self.groups, self.weights, end_token_id=end_token_id)

    def __repr__(self) -> str:
        return f"Batch(of {len(self)} groups, ids={self.ids})"
