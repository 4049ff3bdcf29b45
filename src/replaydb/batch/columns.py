"""Columns of the sequences of a batch. Values of tokens stay in their stored segments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb.batch.stored import id_of
from replaydb.batch.tensors import ALWAYS
from replaydb.domain import checks
from replaydb.domain.episodes import Episode, EpisodeGroup
from replaydb.domain.episodes.arrays import Array, bits, dtype_name, from_bits
from replaydb.domain.episodes.merging import MergeReport, merge_turns
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOGPROBS,
    LOSS_MASK,
    TOKEN_IDS,
    TOKEN_VERSIONS,
    Segment,
)
from replaydb.errors import InvalidInputError

#: An unknown policy version: staler than every limit, and still far enough from the ends of int64
#: to be subtracted from another version.
UNKNOWN_VERSION = -(2**62)


@dataclass(frozen=True, slots=True)
class TokenField:
    """A token-level field of all sequences.

    Attributes:
        name: Name of the field.
        column: Name of the column of segments that has its values.
        dtype: Its dtype, as numpy and torch both spell it.
        trailing: Shape of the values of one token, which begins with None if their number varies.
        present: Which sequences have the field, bool [N].
        fill: Value of tokens that have none in the column, for each sequence; None: 0.
    """

    name: str
    column: str
    dtype: str
    trailing: tuple[int | None, ...] = ()
    present: NDArray[np.bool_] | None = None
    fill: Sequence[float] | None = None


@dataclass(frozen=True, eq=False)
class Columns:
    """N sequences: the episodes of some groups. Episodes with turns are merged to rows.

    Attributes:
        episodes: The sequences, without turns.
        group_index: Index of the group of each sequence, int64 [N].
        group_ids: Id of this group in the store, -1 if it has none, int64 [N].
        episode_index: Index of its episode among all episodes, int64 [N].
        weights: Importance weight of its group, float64 [N].
        merged: Report on merged turns; None if there were no turns.
    """

    episodes: Sequence[Episode]
    group_index: NDArray[np.int64]
    group_ids: NDArray[np.int64]
    episode_index: NDArray[np.int64]
    weights: NDArray[np.float64]
    merged: MergeReport | None

    @classmethod
    def of(
        cls,
        groups: Sequence[EpisodeGroup],
        weights: NDArray[np.float64],
        end_token_id: int | None,
    ) -> Columns:
        """Return the columns of groups, in their order.

        Args:
            groups: New or stored groups.
            weights: Importance weight of each group [n].
            end_token_id: As for `merge_turns`.
        """
        end = checks.optional(checks.token_id, "end_token_id", end_token_id)
        episodes: list[Episode] = []
        owners: list[int] = []
        indexes: list[int] = []
        reports: list[MergeReport] = []
        index = 0
        for owner, group in enumerate(groups):
            for episode in group.episodes:
                if episode.segment is not None:
                    episodes.append(episode)
                    indexes.append(index)
                else:
                    merged, report = merge_turns(episode, interleaved=True, end_token_id=end)
                    episodes += [row.episode for row in merged]
                    indexes += [index] * len(merged)
                    reports.append(report)
                index += 1
            owners += [owner] * (len(episodes) - len(owners))
        group_index = np.array(owners, np.int64)
        ids = np.array([id_of(group) for group in groups], np.int64)
        return cls(
            episodes=episodes,
            group_index=group_index,
            group_ids=ids[group_index],
            episode_index=np.array(indexes, np.int64),
            weights=weights[group_index],
            merged=sum(reports, MergeReport()) if reports else None,
        )

    @cached_property
    def segments(self) -> list[Segment]:
        """The tokens of each sequence."""
        return [one.segment for one in self.episodes if one.segment is not None]

    @property
    def num_sequences(self) -> int:
        """Number of sequences, N."""
        return len(self.episodes)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, int64 [N]."""
        return np.array([segment.length for segment in self.segments], np.int64)

    @cached_property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Number of prompt tokens of each sequence, int64 [N]."""
        return np.array([segment.prompt_length for segment in self.segments], np.int64)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards of the episodes, NaN if there is none, float64 [N]."""
        return np.array([episode.reward for episode in self.episodes], np.float64)

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Advantages of the episodes, NaN if there is none, float64 [N]."""
        return np.array([episode.advantage for episode in self.episodes], np.float64)

    @cached_property
    def has_logprobs(self) -> NDArray[np.bool_]:
        """Which sequences have behaviour logprobs, bool [N]."""
        return self._having(LOGPROBS)

    @cached_property
    def policy_versions(self) -> NDArray[np.int64]:
        """Lowest version that generated a token, or `UNKNOWN_VERSION`, int64 [N]."""
        oldest = [
            one.version if type(one.version) is int else one.min_policy_version
            for one in self.episodes
        ]
        return np.array([UNKNOWN_VERSION if one is None else one for one in oldest], np.int64)

    def token_fields(self, names: Collection[str] | None) -> list[TokenField]:
        """Return token-level fields other than ids and masks: all, or those in `names`.

        Raises:
            InvalidInputError: An extra has several dtypes or shapes.
        """
        found = []
        columns = self._columns
        if LOGPROBS in columns and _wanted(LOGPROBS, names):
            fill = np.where(self.has_logprobs, 0.0, np.nan).tolist()
            found.append(TokenField(LOGPROBS, LOGPROBS, "float32", fill=fill))
        if TOKEN_VERSIONS in columns and _wanted(TOKEN_VERSIONS, names):
            # Those of a prompt are the lowest of the response.
            versions = self.policy_versions.tolist()
            found.append(TokenField(TOKEN_VERSIONS, TOKEN_VERSIONS, "int64", fill=versions))
        extras = sorted(name.removeprefix(EXTRA) for name in columns if name.startswith(EXTRA))
        return found + [self._token_extra(name) for name in extras if _wanted(name, names)]

    def extras(self, names: Collection[str] | None) -> dict[str, Extra]:
        """Return episode-level extras: all, or those in `names`."""
        found = {name for episode in self.episodes for name in episode.extras}
        return {name: self._extra(name) for name in sorted(found) if _wanted(name, names)}

    def chosen(self, names: Collection[str] | None) -> frozenset[str] | None:
        """Return the optional fields among `names`; None: all.

        Raises:
            InvalidInputError: A name is neither a field of an episode nor one that every batch has.
        """
        known = {LOGPROBS, TOKEN_VERSIONS}
        known |= {name.removeprefix(EXTRA) for name in self._columns if name.startswith(EXTRA)}
        known |= {name for episode in self.episodes for name in episode.extras}
        found = checks.some_of("fields", names, [*sorted(known), *sorted(ALWAYS - known)])
        return None if found is None else found & known

    @cached_property
    def _columns(self) -> frozenset[str]:
        """The names of all columns of segments."""
        return frozenset().union(*[segment.columns for segment in self.segments])

    def _having(self, column: str) -> NDArray[np.bool_]:
        return np.array([column in segment.columns for segment in self.segments], np.bool_)

    def _token_extra(self, name: str) -> TokenField:
        column = EXTRA + name
        kinds = {
            segment.columns[column].kind for segment in self.segments if column in segment.columns
        }
        if len(kinds) > 1:
            raise InvalidInputError(
                f"token_extras[{name!r}]",
                "one dtype and shape in all episodes, or `fields` that leave it out",
                sorted(map(str, kinds)),
            )
        dtype, *trailing = kinds.pop()
        return TokenField(name, column, dtype, tuple(trailing), self._having(column))

    def _extra(self, name: str) -> Extra:
        rows = [episode.extras.get(name) for episode in self.episodes]
        present = np.array([row is not None for row in rows], np.bool_)
        kinds = {(dtype_name(row), *row.shape) for row in rows if row is not None}
        if len(kinds) > 1:
            return Extra(None, rows, present)
        dtype, *shape = kinds.pop()
        like = next(row for row in rows if row is not None)
        raw = np.zeros((self.num_sequences, *shape), bits(like).dtype)
        for i, row in enumerate(rows):
            if row is not None:
                raw[i] = bits(row)
        return Extra(from_bits(raw, dtype), [], present)


#: Fields that all sequences have.
IDS = TokenField(TOKEN_IDS, TOKEN_IDS, "int32")
MASK = TokenField(LOSS_MASK, LOSS_MASK, "bool")


class Extra(NamedTuple):
    """An episode-level extra.

    Attributes:
        stacked: [N, ...], zeros where absent; None if there are several dtypes or shapes.
        rows: In that case N arrays as stored, None where absent; otherwise empty.
        present: Which sequences have it, bool [N].
    """

    stacked: Array | None
    rows: list[Array | None]
    present: NDArray[np.bool_]


def _wanted(name: str, names: Collection[str] | None) -> bool:
    return names is None or name in names
