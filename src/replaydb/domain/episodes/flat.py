"""Columnar form of episodes, as payload format 1 stores them and `from_arrays` receives them.

Token-level fields are concatenated over all episodes. Text is not included; it has its own table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from replaydb.domain.episodes.arrays import Array, Versions, bits, dtype_name, from_bits
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.episode import Episode
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOGPROBS,
    LOSS_MASK,
    TOKEN_IDS,
    TOKEN_VERSIONS,
    TURN_REWARDS,
    Column,
    Segment,
    response_column,
)
from replaydb.domain.episodes.turns import Turn, same_fields, trusted

#: None in stored version columns. Versions are 32-bit, so none has this value.
NO_VERSION = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True, eq=False)
class FlatTurns:
    """The N turns of all episodes of one part, in order.

    Their tokens, masks, logprobs, per-token versions and token extras are those of `FlatEpisodes`,
    split at `lengths`.

    Attributes:
        counts: Number of turns of each episode, int64 [E]; 0 if it was not built from turns.
        lengths: Number of tokens of each turn, int64 [N].
        prompt_lengths: Number of these that are context, int64 [N].
        rewards: float64 [N]; NaN if there is none.
        versions: int64 [N]; `NO_VERSION` if unknown or per token.
        has_logprobs: bool [N].
        has_token_versions: bool [N].
        finish_reasons: N strings or None.
        metadata: N JSON objects.
        token_rewards: float32 [T], T of `FlatEpisodes`, only meaningful on responses of turns with
            `has_token_rewards`. None if no turn has any.
        has_token_rewards: bool [N].
        token_extras: Names of the token extras of its episode that each turn has, N tuples.
    """

    counts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    rewards: NDArray[np.float64]
    versions: NDArray[np.int64]
    has_logprobs: NDArray[np.bool_]
    has_token_versions: NDArray[np.bool_]
    finish_reasons: tuple[str | None, ...]
    metadata: tuple[dict[str, Any], ...]
    token_rewards: NDArray[np.float32] | None
    has_token_rewards: NDArray[np.bool_]
    token_extras: tuple[tuple[str, ...], ...]

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, FlatTurns) else NotImplemented


@dataclass(frozen=True, slots=True, eq=False)
class FlatEpisodes:
    """E episodes with T tokens in total.

    Attributes:
        lengths: Number of tokens of each episode, int64 [E].
        prompt_lengths: Number of tokens before the (first) response, int64 [E].
        rewards: float64 [E]; NaN if there is none.
        advantages: float64 [E]; NaN if there is none.
        versions: int64 [E]; `NO_VERSION` if unknown or per token.
        has_logprobs: bool [E].
        has_token_versions: bool [E].
        token_ids: int32 [T].
        loss_mask: bool [T].
        logprobs: float32 [T], NaN in episodes without. None if no episode has any.
        token_versions: int32 [T], only meaningful in episodes (and turns) with
            `has_token_versions`. None if there are none.
        token_extras: [T, ...] by name: extras that all episodes have with the same dtype and shape.
        extras: [E, ...] by name: extras that all episodes have with the same dtype and shape.
        each_token_extras: All other token extras, by episode index, then name.
        each_extras: All other extras, by episode index, then name.
        finish_reasons: E strings or None.
        metadata: E JSON objects.
        turns: None if no episode was built from turns.
        context: Prompt and extras of their group, in its first part.
    """

    lengths: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    rewards: NDArray[np.float64]
    advantages: NDArray[np.float64]
    versions: NDArray[np.int64]
    has_logprobs: NDArray[np.bool_]
    has_token_versions: NDArray[np.bool_]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None
    token_versions: NDArray[np.int32] | None
    token_extras: dict[str, Array]
    extras: dict[str, Array]
    each_token_extras: dict[int, dict[str, Array]]
    each_extras: dict[int, dict[str, Array]]
    finish_reasons: tuple[str | None, ...]
    metadata: tuple[dict[str, Any], ...]
    turns: FlatTurns | None
    context: GroupContext = field(default_factory=GroupContext)

    @property
    def num_episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.lengths)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Start of each episode in the token-level fields, and T: int64 [E + 1]."""
        offsets = np.zeros(self.num_episodes + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    def episodes(self, texts: Sequence[str | None] | None = None) -> list[Episode]:
        """Return the episodes. Their arrays are views of these.

        Args:
            texts: Transcripts, one per episode.
        """
        bounds = list(pairwise(self.offsets.tolist()))
        turns = None if self.turns is None else _unflatten_turns(self, self.turns)
        implied = self._implied()
        found = []
        for i, (begin, end) in enumerate(bounds):
            mine = () if turns is None else turns[i]
            token_extras = {
                name: column[begin:end] for name, column in self.token_extras.items()
            } | self.each_token_extras.get(i, {})
            version: Versions = None
            if not any(turn.policy_version is not None for turn in mine):
                version = _version(self.token_versions, begin, end, self, i)
            of_turns = {name for turn in mine for name in turn.segment.columns}
            found.append(
                trusted(
                    Episode,
                    segment=None if mine else self._segment(i, begin, end, token_extras, implied),
                    turns=mine,
                    version=version if mine or not isinstance(version, np.ndarray) else None,
                    joint_extras={
                        name: array
                        for name, array in token_extras.items()
                        if mine and EXTRA + name not in of_turns
                    },
                    reward=_known(self.rewards[i]),
                    advantage=_known(self.advantages[i]),
                    finish_reason=self.finish_reasons[i],
                    extras={
                        # the ellipsis returns a 0-d array instead of a scalar
                        **{name: column[i, ...] for name, column in self.extras.items()},
                        **self.each_extras.get(i, {}),
                    },
                    metadata=self.metadata[i],
                    text=texts[i] if texts is not None else None,
                )
            )
        return found

    def _implied(self) -> frozenset[str]:
        """Return which columns have nothing to say on prompts, or on no token at all."""
        runs = np.stack([self.prompt_lengths, self.lengths - self.prompt_lengths], axis=1)
        is_response = np.repeat(np.tile([False, True], self.num_episodes), runs.reshape(-1))
        found = set()
        if np.array_equal(self.loss_mask, is_response):
            found.add(LOSS_MASK)
        if (
            self.logprobs is not None
            and not (self.logprobs.view(np.int32) != 0)[~is_response].any()
        ):
            found.add(LOGPROBS)
        return frozenset(found)

    def _segment(
        self,
        i: int,
        begin: int,
        end: int,
        token_extras: Mapping[str, Array],
        implied: Collection[str],
    ) -> Segment:
        """Return the tokens of an episode without turns."""
        length, prompt_length = end - begin, int(self.prompt_lengths[i])
        columns: dict[str, Array | None] = {
            TOKEN_IDS: self.token_ids[begin:end],
            LOSS_MASK: None if LOSS_MASK in implied else self.loss_mask[begin:end],
            LOGPROBS: _cut(self.logprobs, begin, end, self.has_logprobs[i]),
            TOKEN_VERSIONS: _cut(self.token_versions, begin, end, self.has_token_versions[i]),
        }
        columns |= {EXTRA + name: array for name, array in token_extras.items()}
        found = {
            name: Column(((0, values),), length)
            for name, values in columns.items()
            if values is not None
        }
        if LOGPROBS in implied and LOGPROBS in found:
            [(_, logprobs)] = found[LOGPROBS].pieces
            found[LOGPROBS] = response_column(logprobs[prompt_length:], length)
        return Segment(length, prompt_length, found)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, FlatEpisodes) else NotImplemented


def flatten(episodes: Sequence[Episode], context: GroupContext | None = None) -> FlatEpisodes:
    """Return the columns of episodes and the context of their group. Tokens are copied once."""
    token_extras, each_token_extras = _columns(
        [episode.token_extras for episode in episodes],
        lambda array: (dtype_name(array), *array.shape[1:]),
        np.concatenate,
    )
    extras, each_extras = _columns(
        [episode.extras for episode in episodes],
        lambda array: (dtype_name(array), *array.shape),
        np.stack,
    )
    lengths = [len(episode.token_ids) for episode in episodes]
    logprobs = [episode.logprobs for episode in episodes]
    versions = [episode.policy_version for episode in episodes]
    return FlatEpisodes(
        lengths=np.array(lengths, np.int64),
        prompt_lengths=np.array([episode.prompt_length for episode in episodes], np.int64),
        # numpy converts None to NaN in a float array
        rewards=np.array([episode.reward for episode in episodes], np.float64),
        advantages=np.array([episode.advantage for episode in episodes], np.float64),
        versions=_scalar_versions(versions),
        has_logprobs=np.array([array is not None for array in logprobs], np.bool_),
        has_token_versions=_per_token(versions),
        token_ids=_concatenate([episode.token_ids for episode in episodes], np.int32),
        loss_mask=_concatenate([episode.loss_mask for episode in episodes], np.bool_),
        logprobs=_filled(logprobs, lengths, np.float32, np.nan),
        token_versions=_filled(
            [_token_versions(episode) for episode in episodes], lengths, np.int32, 0
        ),
        token_extras=token_extras,
        extras=extras,
        each_token_extras=each_token_extras,
        each_extras=each_extras,
        finish_reasons=tuple([episode.finish_reason for episode in episodes]),
        metadata=tuple([episode.metadata for episode in episodes]),
        turns=_flatten_turns(episodes) if any(episode.turns for episode in episodes) else None,
        context=GroupContext() if context is None else context,
    )


def _flatten_turns(episodes: Sequence[Episode]) -> FlatTurns:
    turns = [turn for episode in episodes for turn in episode.turns]
    versions = [turn.policy_version for turn in turns]
    return FlatTurns(
        counts=np.array([len(episode.turns) for episode in episodes], np.int64),
        lengths=np.array([turn.num_tokens for turn in turns], np.int64),
        prompt_lengths=np.array([len(turn.prompt_ids) for turn in turns], np.int64),
        rewards=np.array([turn.reward for turn in turns], np.float64),
        versions=_scalar_versions(versions),
        has_logprobs=np.array([turn.logprobs is not None for turn in turns], np.bool_),
        has_token_versions=_per_token(versions),
        finish_reasons=tuple(turn.finish_reason for turn in turns),
        metadata=tuple(turn.metadata for turn in turns),
        token_rewards=_filled(
            [_token_rewards(episode) for episode in episodes],
            [_length(episode) for episode in episodes],
            np.float32,
            0,
        ),
        has_token_rewards=np.array([turn.token_rewards is not None for turn in turns], np.bool_),
        token_extras=tuple(tuple(turn.token_extras) for turn in turns),
    )


def _unflatten_turns(flat: FlatEpisodes, columns: FlatTurns) -> list[tuple[Turn, ...]]:
    """Return the turns of each episode, split from its tokens and token extras."""
    found, turn = [], 0
    starts = flat.offsets.tolist()
    for episode, (start, count) in enumerate(zip(starts, columns.counts.tolist(), strict=False)):
        each = flat.each_token_extras.get(episode, {})
        mine = []
        begin = start
        for i in range(turn, turn + count):
            middle, end = begin + int(columns.prompt_lengths[i]), begin + int(columns.lengths[i])
            length, prompt_length = end - begin, middle - begin
            version = _version(flat.token_versions, middle, end, columns, i)
            responses: dict[str, Array | None] = {
                LOSS_MASK: flat.loss_mask[middle:end],
                LOGPROBS: _cut(flat.logprobs, middle, end, columns.has_logprobs[i]),
                TURN_REWARDS: _cut(
                    columns.token_rewards, middle, end, columns.has_token_rewards[i]
                ),
                TOKEN_VERSIONS: version if isinstance(version, np.ndarray) else None,
            }
            segment = Segment(
                length,
                prompt_length,
                {TOKEN_IDS: Column(((0, flat.token_ids[begin:end]),), length)}
                | {
                    name: Column(((prompt_length, values),), length)
                    for name, values in responses.items()
                    if values is not None
                }
                | {
                    EXTRA + name: Column(
                        ((0, each[name][begin - start : end - start]),)
                        if name in each
                        else ((0, flat.token_extras[name][begin:end]),),
                        length,
                    )
                    for name in columns.token_extras[i]
                },
            )
            mine.append(
                trusted(
                    Turn,
                    segment=segment,
                    parent=None,
                    version=None if isinstance(version, np.ndarray) else version,
                    reward=_known(columns.rewards[i]),
                    finish_reason=columns.finish_reasons[i],
                    metadata=columns.metadata[i],
                )
            )
            begin = end
        found.append(tuple(mine))
        turn += count
    return found


def _token_versions(episode: Episode) -> NDArray[np.int32] | None:
    """Return per-token versions of the episode, or of those of its turns that have them."""
    if isinstance(episode.policy_version, np.ndarray):
        return episode.policy_version
    versions = [turn.policy_version for turn in episode.turns]
    given = [version if isinstance(version, np.ndarray) else None for version in versions]
    return _on_responses(episode, given, np.int32)


def _token_rewards(episode: Episode) -> NDArray[np.float32] | None:
    """Return per-token rewards of those of its turns that have them."""
    return _on_responses(episode, [turn.token_rewards for turn in episode.turns], np.float32)


def _length(episode: Episode) -> int:
    """Return the number of tokens of an episode, with all that its turns repeat."""
    return sum(segment.length for segment in episode.segments)


def _on_responses(
    episode: Episode, arrays: Sequence[NDArray[Any] | None], dtype: DTypeLike
) -> NDArray[Any] | None:
    """Place arrays of turns at their response tokens, 0 elsewhere. Return None if all are None."""
    if all(array is None for array in arrays):
        return None
    row = np.zeros(_length(episode), dtype)
    end = 0
    for turn, array in zip(episode.turns, arrays, strict=True):
        end += turn.num_tokens
        if array is not None:
            row[end - len(turn.response_ids) : end] = array
    return row


def _columns(
    rows: list[dict[str, Any]],
    kind: Callable[[Array], tuple[object, ...]],
    join: Callable[[list[NDArray[Any]]], NDArray[Any]],
) -> tuple[dict[str, Array], dict[int, dict[str, Array]]]:
    """Join extras that all rows have with the same dtype and shape; return the others by row."""
    if not any(rows):
        return {}, {}
    joined: dict[str, Array] = {}
    for name, first in rows[0].items():
        column = [row[name] for row in rows if name in row]
        if len(column) == len(rows) and all(kind(array) == kind(first) for array in column):
            joined_array = join([bits(array) for array in column])
            joined_array.setflags(write=False)
            joined[name] = from_bits(joined_array, dtype_name(first))
    each: dict[int, dict[str, Array]] = {}
    for i, row in enumerate(rows):
        others = {name: array for name, array in row.items() if name not in joined}
        if others:
            each[i] = others
    return joined, each


def _filled(
    arrays: Sequence[NDArray[Any] | None], lengths: list[int], dtype: DTypeLike, absent: float
) -> NDArray[Any] | None:
    """Concatenate arrays, with `absent` for those that are None. Return None if all are None."""
    if all(array is None for array in arrays):
        return None
    return _concatenate(
        [
            np.full(length, absent, dtype) if array is None else array
            for array, length in zip(arrays, lengths, strict=True)
        ],
        dtype,
    )


def _concatenate(arrays: list[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    joined_array = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    joined_array.setflags(write=False)
    return joined_array


def _scalar_versions(versions: Sequence[Versions]) -> NDArray[np.int64]:
    return np.array([v if isinstance(v, int) else NO_VERSION for v in versions], np.int64)


def _per_token(versions: Sequence[Versions]) -> NDArray[np.bool_]:
    return np.array([isinstance(version, np.ndarray) for version in versions], np.bool_)


def _cut(
    column: NDArray[Any] | None, begin: int, end: int, present: np.bool_
) -> NDArray[Any] | None:
    return column[begin:end] if present and column is not None else None


def _known(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)


def _version(
    column: NDArray[np.int32] | None,
    begin: int,
    end: int,
    owner: FlatEpisodes | FlatTurns,
    position: int,
) -> Versions:
    if owner.has_token_versions[position]:
        return _cut(column, begin, end, owner.has_token_versions[position])
    version = int(owner.versions[position])
    return None if version == NO_VERSION else version
