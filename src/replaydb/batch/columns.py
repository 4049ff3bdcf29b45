"""Columns of the episodes of a batch. Token-level columns stay in their stored parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb.batch.stored import id_of
from replaydb.batch.tensors import ALWAYS
from replaydb.domain import checks
from replaydb.domain.episodes import EpisodeGroup, flat
from replaydb.domain.episodes.arrays import Array, bits, dtype_name, from_bits
from replaydb.domain.episodes.flat import FlatEpisodes, flatten
from replaydb.domain.episodes.merging import MergeReport, merge_turns
from replaydb.errors import InvalidInputError

#: An unknown policy version: staler than every limit, and still far enough from the ends of int64
#: to be subtracted from another version.
UNKNOWN_VERSION = -(2**62)

#: Token-level fields other than extras. `fields=` selects among both.
LOGPROBS = "logprobs"
TOKEN_VERSIONS = "token_versions"  # noqa: S105 - not a password


@dataclass(frozen=True, slots=True)
class TokenField:
    """A token-level field of all parts.

    Attributes:
        name: Name of the field.
        dtype: Its dtype, as numpy and torch both spell it.
        trailing: Shape of the value of one token.
        parts: Values of each part [T, ...]; None if no episode of the part has the field.
        absent: Value for episodes without the field.
        present: Which sequences have the field, bool [N].
    """

    name: str
    dtype: str
    trailing: tuple[int, ...]
    parts: Sequence[Array | None]
    absent: float
    present: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """N sequences: the episodes of some groups. Episodes with turns are merged to one or more rows.

    Attributes:
        parts: Parts with their tokens, in order.
        bounds: Part i has the sequences `bounds[i]:bounds[i + 1]`.
        group_index: Index of the group of each sequence, int64 [N].
        group_ids: Id of this group in the store, -1 if it has none, int64 [N].
        episode_index: Index of its episode among all episodes, int64 [N].
        weights: Importance weight of its group, float64 [N].
        merged: Report on merged turns; None if there were no turns.
    """

    parts: tuple[FlatEpisodes, ...]
    bounds: NDArray[np.int64]
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
        stored = [(i, part) for i, group in enumerate(groups) for part in group.parts]
        end = checks.optional(checks.token_id, "end_token_id", end_token_id)
        merged = [_merged(part, end) for _, part in stored]
        parts = tuple([result.part for result in merged])
        owners = np.array([i for i, _ in stored], np.int64)
        sizes = np.array([part.num_episodes for part in parts], np.int64)
        firsts = _starts([part.num_episodes for _, part in stored])
        group_index = np.repeat(owners, sizes)
        ids = np.array([id_of(group) for group in groups], np.int64)
        reports = [result.report for result in merged if result.report is not None]
        return cls(
            parts=parts,
            bounds=_starts(sizes),
            group_index=group_index,
            group_ids=ids[group_index],
            episode_index=_joined(
                [first + result.episodes for first, result in zip(firsts, merged, strict=False)],
                np.int64,
            ),
            weights=weights[group_index],
            merged=sum(reports, MergeReport()) if reports else None,
        )

    @property
    def num_sequences(self) -> int:
        """Number of sequences, N."""
        return len(self.group_index)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sequence, int64 [N]."""
        return _joined([part.lengths for part in self.parts], np.int64)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Number of prompt tokens of each sequence, int64 [N]."""
        return _joined([part.prompt_lengths for part in self.parts], np.int64)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards of the episodes, NaN if there is none, float64 [N]."""
        return _joined([part.rewards for part in self.parts], np.float64)

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Advantages of the episodes, NaN if there is none, float64 [N]."""
        return _joined([part.advantages for part in self.parts], np.float64)

    @property
    def has_logprobs(self) -> NDArray[np.bool_]:
        """Which sequences have behaviour logprobs, bool [N]."""
        return _joined([part.has_logprobs for part in self.parts], np.bool_)

    @property
    def policy_versions(self) -> NDArray[np.int64]:
        """Lowest version that generated a token, or `UNKNOWN_VERSION`, int64 [N]."""
        return _joined([_oldest_versions(part) for part in self.parts], np.int64)

    def everywhere(self, name: str, dtype: str) -> TokenField:
        """Return token ids or the loss mask, which all sequences have."""
        parts = [getattr(part, name) for part in self.parts]
        return TokenField(name, dtype, (), parts, 0, np.ones(self.num_sequences, np.bool_))

    def token_fields(self, names: Collection[str] | None) -> list[TokenField]:
        """Return token-level fields other than ids and masks: all, or those in `names`.

        Raises:
            InvalidInputError: An extra has several dtypes or shapes.
        """
        found = [field for field in (self._logprobs(), self._versions()) if field is not None]
        extras = {name for part in self.parts for name in _token_names(part)}
        found += [self._token_extra(name) for name in sorted(extras) if _wanted(name, names)]
        return [field for field in found if _wanted(field.name, names)]

    def extras(self, names: Collection[str] | None) -> dict[str, Extra]:
        """Return episode-level extras: all, or those in `names`."""
        found = {
            name: None
            for part in self.parts
            for row in (part.extras, *part.each_extras.values())
            for name in row
        }
        return {name: self._extra(name) for name in sorted(found) if _wanted(name, names)}

    def chosen(self, names: Collection[str] | None) -> frozenset[str] | None:
        """Return the optional fields among `names`; None: all.

        Raises:
            InvalidInputError: A name is neither a field of an episode nor one that every batch has.
        """
        known = {LOGPROBS, TOKEN_VERSIONS} | {
            name
            for part in self.parts
            for row in (_token_names(part), part.extras, *part.each_extras.values())
            for name in row
        }
        found = checks.some_of("fields", names, [*sorted(known), *sorted(ALWAYS - known)])
        return None if found is None else found & known

    def _logprobs(self) -> TokenField | None:
        parts = [part.logprobs for part in self.parts]
        if all(part is None for part in parts):
            return None
        return TokenField(LOGPROBS, "float32", (), parts, np.nan, self.has_logprobs)

    def _versions(self) -> TokenField | None:
        if all(part.token_versions is None for part in self.parts):
            return None
        parts = [_token_versions(part) for part in self.parts]
        present = self.policy_versions != UNKNOWN_VERSION
        return TokenField(TOKEN_VERSIONS, "int64", (), parts, UNKNOWN_VERSION, present)

    def _token_extra(self, name: str) -> TokenField:
        kinds = {
            (dtype_name(array), *array.shape[1:])
            for part in self.parts
            for row in (part.token_extras, *part.each_token_extras.values())
            if (array := row.get(name)) is not None
        }
        if len(kinds) > 1:
            raise InvalidInputError(
                f"token_extras[{name!r}]",
                "one dtype and shape in all episodes, or `fields` that leave it out",
                sorted(map(str, kinds)),
            )
        dtype, *trailing = kinds.pop()
        parts = [_full_extra(part, name) for part in self.parts]
        present = [
            _present(part, part.token_extras, part.each_token_extras, name) for part in self.parts
        ]
        return TokenField(name, dtype, tuple(trailing), parts, 0, _joined(present, np.bool_))

    def _extra(self, name: str) -> Extra:
        present = [_present(part, part.extras, part.each_extras, name) for part in self.parts]
        found = [
            (span, array)
            for begin, part in zip(self.bounds.tolist(), self.parts, strict=False)
            for span, array in _spans(begin, part, name)
        ]
        kinds = {(dtype_name(array), *array.shape[1:]) for _, array in found}
        if len(kinds) > 1:
            rows: list[Array | None] = [None] * self.num_sequences
            for span, array in found:
                rows[span] = [array[i, ...] for i in range(len(array))]
            return Extra(None, rows, _joined(present, np.bool_))
        dtype, *shape = kinds.pop()
        raw = np.zeros((self.num_sequences, *shape), bits(found[0][1]).dtype)
        for span, array in found:
            raw[span] = bits(array)
        return Extra(from_bits(raw, dtype), [], _joined(present, np.bool_))


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


class _Merged(NamedTuple):
    """A part with merged turns, and the episode of each sequence."""

    part: FlatEpisodes
    episodes: NDArray[np.int64]
    report: MergeReport | None


def _merged(part: FlatEpisodes, end_token_id: int | None) -> _Merged:
    if part.turns is None:
        return _Merged(part, np.arange(part.num_episodes), None)
    rows, owners, report = [], [], MergeReport()
    for i, episode in enumerate(part.episodes()):
        if not episode.turns:
            rows.append(episode)
            owners.append(i)
            continue
        found, done = merge_turns(episode, end_token_id=end_token_id)
        rows += [row.episode for row in found]
        owners += [i] * len(found)
        report += done
    return _Merged(flatten(rows), np.array(owners, np.int64), report)


def _oldest_versions(part: FlatEpisodes) -> NDArray[np.int64]:
    oldest = part.min_policy_versions
    return np.where(oldest == flat.NO_VERSION, UNKNOWN_VERSION, oldest)


def _token_versions(part: FlatEpisodes) -> NDArray[np.int64]:
    """Return one version per token, even if versions are stored per episode."""
    spread = np.repeat(_oldest_versions(part), part.lengths)
    if part.token_versions is None:
        return spread
    return np.where(np.repeat(part.has_token_versions, part.lengths), part.token_versions, spread)


def _token_names(part: FlatEpisodes) -> Iterator[str]:
    for row in (part.token_extras, *part.each_token_extras.values()):
        yield from row


def _full_extra(part: FlatEpisodes, name: str) -> Array | None:
    """Return a token extra of a complete part, with zeros in the episodes that do not have it."""
    if name in part.token_extras:
        return part.token_extras[name]
    some = {i: row[name] for i, row in part.each_token_extras.items() if name in row}
    if not some:
        return None
    first = next(iter(some.values()))
    raw = np.zeros((part.num_tokens, *first.shape[1:]), bits(first).dtype)
    bounds = list(pairwise(part.offsets.tolist()))
    for i, array in some.items():
        raw[slice(*bounds[i])] = bits(array)
    return from_bits(raw, dtype_name(first))


def _present(
    part: FlatEpisodes,
    shared: Mapping[str, Array],
    each: Mapping[int, Mapping[str, Array]],
    name: str,
) -> NDArray[np.bool_]:
    """Return which episodes of a part have an extra, bool [E]."""
    present = np.full(part.num_episodes, name in shared)
    present[[i for i, row in each.items() if name in row]] = True
    return present


def _spans(begin: int, part: FlatEpisodes, name: str) -> Iterator[tuple[slice, Array]]:
    """Yield which sequences have an extra, and its values [n, ...]. The part begins at `begin`."""
    if name in part.extras:
        yield slice(begin, begin + part.num_episodes), part.extras[name]
    for i, row in part.each_extras.items():
        if name in row:
            yield slice(begin + i, begin + i + 1), row[name][None]


def _wanted(name: str, names: Collection[str] | None) -> bool:
    return names is None or name in names


def _starts(sizes: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _joined(arrays: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
