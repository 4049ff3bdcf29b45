"""What a draw returns."""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from replaydb import checks
from replaydb.batch import packing, padding
from replaydb.batch.columns import Columns
from replaydb.batch.packing import Fit
from replaydb.batch.padding import Side
from replaydb.batch.stored import StoredGroup, id_of
from replaydb.batch.tensors import PackedBatch, PaddedBatch, SplitBatch
from replaydb.episodes import EpisodeGroup
from replaydb.episodes.arrays import ArrayLike
from replaydb.episodes.turns import set_fields
from replaydb.errors import InvalidInputError

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar


# Whoever says just `Batch` means what draws return.
if TYPE_CHECKING:
    G = TypeVar("G", bound=EpisodeGroup, covariant=True, default=StoredGroup)
else:
    G = typing.TypeVar("G")


# No `collections.abc.Sequence`: a DataLoader rebuilds those from their items, without the weights.
@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Batch(typing.Generic[G]):
    """A sequence of groups, as a draw returns them in its order, or of your own.

    `batch[0]` is a group and `batch[:8]` a batch of the same draw; iteration, `len` and `in` are
    those of the groups. `padded`, `split` and `packed` make tensors. They keep the order of groups
    and of episodes within them; groups may be of any size. Episodes that were stored as turns are
    merged first (see `replaydb.training.merge_turns`), which may make several sequences of one.

    Groups that were never stored make a batch too: `Batch(groups)`.

    Attributes:
        groups: The groups [n], with their episodes.
        probabilities: Probability of each group to be the next one drawn, among the samplable
            groups of its task, or of all tasks where they are drawn together, float64 [n]; 1.0
            where the policy leaves nothing to chance, and by default. Filters do not change it.
        weights: Importance weights `(w_i / min_j w_j) ** -beta`, float64 [n]; the largest of each
            draw (of each task, where n named tasks) is 1.0. By default they are all 1.0.
        draw_id: Where the draw is recorded; None where the buffer does not record draws.

    Raises:
        InvalidInputError: Not groups, or not one probability and one weight for each.
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
        """Ids of the groups [n]; -1, which no call takes, for one that was never stored."""
        return [id_of(group) for group in self.groups]

    @property
    def staleness(self) -> list[int | None]:
        """Policy versions that the groups were behind the buffer's when they were drawn [n].

        None where that is unknown, as of groups that were never stored. In the batch of
        `Buffer.open_lease` it is the staleness when the lease was opened.
        """
        return [getattr(group, "staleness", None) for group in self.groups]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards of the E episodes of all groups, float64 [E]; NaN where there is none."""
        return np.concatenate([np.empty(0), *(group.rewards for group in self.groups)])

    @property
    def group_index(self) -> NDArray[np.int64]:
        """Position of the group of each episode, int64 [E]."""
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
        """One row for each sequence.

        Args:
            pad_token_id: Stands where there is no token.
            side: Where the padding goes.
            pad_to_multiple_of: Round the width up.
            max_length: Sequences that are longer lose their end, and are marked `truncated`.
            fields: Which of "logprobs", "token_versions" and the extras to make tensors of; all
                by default. Token ids, masks, and what there is one of for each sequence (`rewards`,
                `advantages`, `weights`, ...) are always there, and may be named too.
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
            pad_token_id: Stands where there is no token.
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


def _one_each(field: str, values: ArrayLike | None, count: int) -> NDArray[np.float64]:
    if values is None:
        return np.ones(count)
    try:
        given = np.asarray(values, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(field, "numbers", repr(error)) from error
    if given.shape != (count,):
        raise InvalidInputError(field, f"shape [{count}]", f"shape {list(given.shape)}")
    return given
