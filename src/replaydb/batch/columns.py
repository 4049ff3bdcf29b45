"""The episodes of a batch as columns; token-level ones stay in the parts they were stored in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb import checks
from replaydb.batch.stored import id_of
from replaydb.batch.tensors import ALWAYS
from replaydb.episodes import EpisodeGroup, flat
from replaydb.episodes.arrays import Array, bits, dtype_name, from_bits
from replaydb.episodes.flat import FlatEpisodes, flatten
from replaydb.episodes.merging import MergeReport, merge_turns
from replaydb.errors import InvalidInputError

#: Stands for a policy version that is not known: staler than every limit, and still far enough
#: from the ends of int64 to be subtracted from another version.
UNKNOWN_VERSION = -(2**62)

#: Token-level fields beside the named extras; `fields=` chooses among both.
LOGPROBS = "logprobs"
TOKEN_VERSIONS = "token_versions"  # noqa: S105 - not a password


@dataclass(frozen=True, slots=True)
class TokenField:
    """A token-level field of all parts.

    Attributes:
        name: Its name.
        dtype: Its dtype, as numpy and torch both spell it.
        trailing: Shape of what belongs to one token.
        parts: Its values in each part [T, ...]; None where no episode of the part has it.
        absent: Stands in the episodes that do not have it.
        present: Which sequences have it, bool [N].
    """

    name: str
    dtype: str
    trailing: tuple[int, ...]
    parts: Sequence[Array | None]
    absent: float
    present: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """N sequences: the episodes of some groups, those with turns merged to one row or several.

    Attributes:
        parts: Their tokens, in order.
        bounds: Part i holds the sequences `bounds[i]:bounds[i + 1]`.
        group_index: Position of the group of each sequence, int64 [N].
        group_ids: Its id in the store, -1 where it has none, int64 [N].
        episode_index: Position of its episode among all episodes, int64 [N].
        weights: Importance weight of its group, float64 [N].
        merged: What merging turns did; None where there were none.
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
        weights: NDArray[np.float64] | None = None,
        *,
        end_token_id: int | None = None,
    ) -> Columns:
        """Of groups in their order.

        Args:
            groups: Fresh or stored.
            weights: Importance weight of each group [n]; by default 1.
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
        each = np.ones(len(groups)) if weights is None else np.asarray(weights, np.float64)
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
            weights=each[group_index],
            merged=sum(reports, MergeReport()) if reports else None,
        )

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.group_index)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, int64 [N]."""
        return _joined([part.lengths for part in self.parts], np.int64)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Of which are the prompt, int64 [N]."""
        return _joined([part.prompt_lengths for part in self.parts], np.int64)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards of their episodes, NaN where there is none, float64 [N]."""
        return _joined([part.rewards for part in self.parts], np.float64)

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Advantages, NaN where there is none, float64 [N]."""
        return _joined([part.advantages for part in self.parts], np.float64)

    @property
    def has_logprobs(self) -> NDArray[np.bool_]:
        """Which have behaviour logprobs, bool [N]."""
        return _joined([part.has_logprobs for part in self.parts], np.bool_)

    @property
    def policy_versions(self) -> NDArray[np.int64]:
        """The oldest version that made a token, or `UNKNOWN_VERSION`, int64 [N]."""
        return _joined([_oldest_versions(part) for part in self.parts], np.int64)

    def token_fields(self, names: Collection[str] | None) -> list[TokenField]:
        """Fields of tokens but their ids and masks: all, or those named.

        Raises:
            InvalidInputError: An extra has several dtypes or shapes.
        """
        found = [field for field in (self._logprobs(), self._versions()) if field is not None]
        extras = {name for part in self.parts for name in _token_names(part)}
        found += [self._token_extra(name) for name in sorted(extras) if _wanted(name, names)]
        return [field for field in found if _wanted(field.name, names)]

    def extras(self, names: Collection[str] | None) -> dict[str, Extra]:
        """Episode-level extras: all, or those named."""
        found = {
            name: None
            for part in self.parts
            for row in (part.extras, *part.each_extras.values())
            for name in row
        }
        return {name: self._extra(name) for name in sorted(found) if _wanted(name, names)}

    def chosen(self, names: Collection[str] | None) -> frozenset[str] | None:
        """The names of fields that were asked for and may be left out; None: all.

        Raises:
            InvalidInputError: No episode has a field of that name, nor has every batch.
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
        parts = [_whole_extra(part, name) for part in self.parts]
        present = [
            _present(part, part.token_extras, part.each_token_extras, name) for part in self.parts
        ]
        return TokenField(name, dtype, tuple(trailing), parts, 0, _joined(present, np.bool_))

    def _extra(self, name: str) -> Extra:
        present = [_present(part, part.extras, part.each_extras, name) for part in self.parts]
        places = [
            (place, array)
            for begin, part in zip(self.bounds.tolist(), self.parts, strict=False)
            for place, array in _places(begin, part, name)
        ]
        kinds = {(dtype_name(array), *array.shape[1:]) for _, array in places}
        if len(kinds) > 1:
            rows: list[Array | None] = [None] * self.num_sequences
            for place, array in places:
                rows[place] = [array[i, ...] for i in range(len(array))]
            return Extra(None, rows, _joined(present, np.bool_))
        dtype, *shape = kinds.pop()
        raw = np.zeros((self.num_sequences, *shape), bits(places[0][1]).dtype)
        for place, array in places:
            raw[place] = bits(array)
        return Extra(from_bits(raw, dtype), [], _joined(present, np.bool_))


class Extra(NamedTuple):
    """An episode-level extra.

    Attributes:
        stacked: [N, ...], zeros where absent; None if there are several dtypes or shapes.
        rows: Then N arrays as they are stored, None where absent; else empty.
        present: Which sequences have it, bool [N].
    """

    stacked: Array | None
    rows: list[Array | None]
    present: NDArray[np.bool_]


class _Merged(NamedTuple):
    """A part whose turns were merged, and which of its episodes each sequence is of."""

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
    """One version for each token, whether it was stored so or not."""
    spread = np.repeat(_oldest_versions(part), part.lengths)
    if part.token_versions is None:
        return spread
    return np.where(np.repeat(part.has_token_versions, part.lengths), part.token_versions, spread)


def _token_names(part: FlatEpisodes) -> Iterator[str]:
    for row in (part.token_extras, *part.each_token_extras.values()):
        yield from row


def _whole_extra(part: FlatEpisodes, name: str) -> Array | None:
    """A token extra over the whole part, zeros in the episodes that do not have it."""
    if name in part.token_extras:
        return part.token_extras[name]
    some = {i: row[name] for i, row in part.each_token_extras.items() if name in row}
    if not some:
        return None
    first = next(iter(some.values()))
    raw = np.zeros((part.num_tokens, *first.shape[1:]), bits(first).dtype)
    places = list(pairwise(part.offsets.tolist()))
    for i, array in some.items():
        raw[slice(*places[i])] = bits(array)
    return from_bits(raw, dtype_name(first))


def _present(
    part: FlatEpisodes,
    shared: Mapping[str, Array],
    each: Mapping[int, Mapping[str, Array]],
    name: str,
) -> NDArray[np.bool_]:
    """Which episodes of a part have an extra, bool [E]."""
    present = np.full(part.num_episodes, name in shared)
    present[[i for i, row in each.items() if name in row]] = True
    return present


def _places(begin: int, part: FlatEpisodes, name: str) -> Iterator[tuple[slice, Array]]:
    """Where sequences have an extra, and its values there [n, ...]; the part begins at `begin`."""
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
