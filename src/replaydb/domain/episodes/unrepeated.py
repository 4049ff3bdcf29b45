"""Tokens of an episode in which no turn repeats those of its parent, for tables and pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

from replaydb.domain.episodes.arrays import Versions
from replaydb.domain.episodes.episode import Episode
from replaydb.domain.episodes.ragged import Ragged, Values, joined, placed
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOGPROBS,
    TOKEN_VERSIONS,
    TURN_REWARDS,
    common_tokens,
)
from replaydb.domain.episodes.turns import Turn, parents_of

#: Size of the number of values of a token.
COUNT_BYTES = 8


class Unrepeated:
    """The tokens of an episode, turn after turn, without those that a turn has from its parent.

    Positions count these tokens. Arrays are made only of the tokens that are asked for, by default
    of all. They are views if these tokens are in one piece.

    Attributes:
        episode: The episode.
        segments: The tokens of each turn, or those of an episode without turns.
        parents: Index of the parent of each segment, -1 for none.
        shared: Number of first tokens of each segment that are left out.
        sizes: Number of tokens of each segment that are not left out.
        offsets: Position of the first token of each segment, and the number of all tokens.
    """

    def __init__(self, episode: Episode) -> None:
        turns = episode.turns
        self.episode = episode
        self.segments = episode.segments
        self.parents = parents_of(turns) or [-1]
        continues = zip(turns, self.parents, episode.forest.continues, strict=bool(turns))
        self.shared = [_num_shared(turn, above == named) for turn, named, above in continues] or [0]
        self.sizes = [one.length - n for one, n in zip(self.segments, self.shared, strict=True)]
        self.offsets = [0, *accumulate(self.sizes)]
        self._starts = [0, *accumulate(one.length for one in self.segments)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.offsets[-1]

    def token_ids(self, begin: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """Return the ids of the tokens from `begin` to `end`, int32."""
        found = self._joined(begin, end, lambda i, *at: self.segments[i].tokens(*at))
        return cast("NDArray[np.int32]", found)

    def loss_mask(self, begin: int = 0, end: int | None = None) -> NDArray[np.bool_]:
        """Return which of the tokens are in the loss, bool."""
        found = self._joined(begin, end, lambda i, *at: self.segments[i].mask(*at))
        return cast("NDArray[np.bool_]", found)

    def logprobs(self, begin: int = 0, end: int | None = None) -> NDArray[np.float32] | None:
        """Return the logprobs of the tokens as `Episode` does, float32; None if there are none."""
        if not any(LOGPROBS in segment.columns for segment in self.segments):
            return None

        def logprobs(i: int, first: int, last: int) -> Values:
            segment = self.segments[i]
            if LOGPROBS in segment.columns:
                return segment.values(LOGPROBS, first, last)
            unknown = np.full(last - first, np.nan, np.float32)
            unknown[: max(segment.prompt_length - first, 0)] = 0
            return unknown

        return cast("NDArray[np.float32]", self._joined(begin, end, logprobs))

    def versions(self, begin: int = 0, end: int | None = None) -> Versions:
        """Return the policy version, or one for each of the tokens, int32; None if unknown."""
        of_all = self.episode.version
        of_turns = [turn.version for turn in self.episode.turns] or [None]
        has_own = [TOKEN_VERSIONS in segment.columns for segment in self.segments]
        if isinstance(of_all, int):
            return of_all
        if of_all is None and not any(has_own) and len(set(of_turns)) == 1:
            return of_turns[0]
        if of_all is None and (False, None) in zip(has_own, of_turns, strict=True):
            return None

        def versions(i: int, first: int, last: int) -> Values:
            if of_all is not None:
                return self.joint(of_all, i, first, last)
            if has_own[i]:
                return self.segments[i].versions(first, last)
            return np.full(last - first, of_turns[i], np.int32)

        return cast("NDArray[np.int32]", self._joined(begin, end, versions))

    def token_rewards(self) -> NDArray[np.float32] | None:
        """Return the rewards that turns have for each token, 0 elsewhere; None if none has any."""
        if not any(TURN_REWARDS in segment.columns for segment in self.segments):
            return None
        return cast("NDArray[np.float32]", self._values(TURN_REWARDS, 0, None))

    def token_extras(
        self, begin: int = 0, end: int | None = None, names: Collection[str] | None = None
    ) -> dict[str, Values]:
        """Return token extras of the tokens by name, [n, ...]. `names`: only these.

        Turns without an extra have zeros. Without turns, the last token may not have a value.
        """
        joint = self.episode.joint_extras
        columns = [name for segment in self.segments for name in segment.columns]
        own = [name.removeprefix(EXTRA) for name in columns if name.startswith(EXTRA)]
        return {
            name: self._joined(begin, end, partial(self.joint, joint[name]))
            if name in joint
            else self._values(EXTRA + name, begin, end)
            for name in dict.fromkeys([*own, *joint])
            if names is None or name in names
        }

    @property
    def extra_bytes(self) -> int:
        """Size of the token extras. An upper bound."""
        likes = dict(self.episode.joint_extras)
        ragged = [one for one in likes.values() if isinstance(one, Ragged)]
        for segment, shared in zip(self.segments, self.shared, strict=True):
            for name in [name for name in segment.columns if name.startswith(EXTRA)]:
                likes[name] = segment.columns[name].pieces[0][1]
                found = segment.pieces(name, shared, segment.length)
                ragged += [one for _, one in found if isinstance(one, Ragged)]
        widths = [
            COUNT_BYTES if isinstance(one, Ragged) else one.itemsize * math.prod(one.shape[1:])
            for one in likes.values()
        ]
        return self.num_tokens * sum(widths) + sum(one.values.nbytes for one in ragged)

    def joint(self, values: Values, i: int, first: int, last: int) -> Values:
        """Return the values of some tokens of turn `i`, of an array over all tokens of turns."""
        return values[self._starts[i] + first : self._starts[i] + last]

    def _values(self, name: str, begin: int, end: int | None) -> Values:
        """Return the values of a column that at least one segment has."""
        columns = (one.columns[name] for one in self.segments if name in one.columns)
        like = next(columns).pieces[0][1]

        def values(i: int, first: int, last: int) -> Values:
            segment = self.segments[i]
            if name in segment.columns:
                if not self.episode.turns:
                    last = min(last, segment.columns[name].end)
                return segment.values(name, first, last)
            return placed([], last - first, like)

        return self._joined(begin, end, values)

    def _joined(
        self, begin: int, end: int | None, values: Callable[[int, int, int], Values]
    ) -> Values:
        """Join what `values` returns for the index, first and last token of each segment."""
        end = self.num_tokens if end is None else end
        if len(self.segments) == 1:
            return values(0, begin, end)
        found = [
            values(i, max(begin - at, 0) + shared, min(end, following) - at + shared)
            for i, (at, following, shared) in enumerate(
                zip(self.offsets[:-1], self.offsets[1:], self.shared, strict=True)
            )
            if at < end and begin < following
        ]
        return joined(found or [values(0, self.shared[0], self.shared[0])])


def _num_shared(turn: Turn, continues_parent: bool) -> int:
    """Return how many first tokens of its context a turn has from its parent."""
    if turn.parent is None:
        return 0
    own, theirs = turn.segment, turn.parent.segment
    if continues_parent:
        return theirs.length
    if own.parent is theirs and own.shared == own.prompt_length:
        return own.shared  # there cannot be more
    return common_tokens(theirs, own.tokens(0, own.prompt_length))
