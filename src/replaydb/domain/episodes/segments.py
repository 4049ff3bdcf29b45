"""Segments: the tokens of a turn, or of an episode without turns, and the values of these tokens.

A segment can begin with tokens of another one, its parent. It then has only its other tokens, and
arrays of all its tokens are made when they are asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb.domain.episodes.arrays import bits, dtype_name, fixed
from replaydb.domain.episodes.ragged import Ragged, Values, is_zero, placed

#: Columns of a segment that are no extras. The names are those of the payload.
TOKEN_IDS = "token_ids"  # noqa: S105 - not a password
LOSS_MASK = "loss_mask"
LOGPROBS = "logprobs"
TOKEN_VERSIONS = "token_versions"  # noqa: S105 - not a password
TURN_REWARDS = "turn/token_rewards"
#: Prefix of the columns of token extras.
EXTRA = "token/"

#: Number of tokens that are compared before all are.
_PROBE = 16
#: Number of ancestors that are pickled one within the other.
_NESTED = 64

#: Values of consecutive tokens, and the position of the first one in its segment.
Piece = tuple[int, Values]


class Column(NamedTuple):
    """Values of the tokens of a segment.

    Attributes:
        pieces: Values of some tokens, at least one piece, in order and without overlaps.
        end: Number of tokens that the column covers: all, or all but the last.
        inherits: Whether tokens before the first piece have the values of the parent. Tokens that
            are in no piece, or before it, otherwise have the value 0.
    """

    pieces: tuple[Piece, ...]
    end: int
    inherits: bool = False

    @property
    def begin(self) -> int:
        """Position of the first piece."""
        return self.pieces[0][0]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Dtype of the values, and the shape of those of one token: None, ... if it is `Ragged`."""
        values = self.pieces[0][1]
        return (dtype_name(values), *values.shape[1:])


class Segment:
    """T tokens: a context of P tokens, and a response.

    Attributes:
        parent: The segment with whose tokens it begins, or None.
        length: Number of tokens, T.
        prompt_length: Number of tokens of the context, P.
        columns: Values of tokens by name. `TOKEN_IDS` is always present. Without a `LOSS_MASK`,
            exactly the tokens of the response are in the loss.
    """

    __slots__ = ("columns", "length", "parent", "prompt_length")

    def __init__(
        self,
        length: int,
        prompt_length: int,
        columns: dict[str, Column],
        parent: Segment | None = None,
    ) -> None:
        self.length = length
        self.prompt_length = prompt_length
        self.columns = columns
        self.parent = parent

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle some ancestors before the parent, because each level is a recursion."""
        values = (self.length, self.prompt_length, self.columns, self.parent)
        return _unpickled, (lineage(self), *values)

    @property
    def shared(self) -> int:
        """Number of tokens that are those of the parent."""
        column = self.columns[TOKEN_IDS]
        return column.begin if column.inherits else 0

    def _view(self, name: str, begin: int, end: int) -> Values | None:
        """Return the values of some tokens if one piece has them all. This is the usual case."""
        column = self.columns.get(name)
        if column is None or begin >= end:
            return None
        for at, values in column.pieces:
            if at <= begin:
                if end <= at + len(values):
                    whole = at == begin and len(values) == end - begin
                    return values if whole else values[begin - at : end - at]
            else:
                break
        return None

    def pieces(self, name: str, begin: int, end: int) -> list[Piece]:
        """Return the values of the tokens from `begin` to `end`, as far as they are not 0."""
        if (own := self._view(name, begin, end)) is not None:
            return [(begin, own)]
        found: list[Piece] = []
        segment: Segment | None = self
        while segment is not None and begin < end:
            column = segment.columns.get(name)
            if column is None:
                break
            for piece in reversed(column.pieces):
                at, values = piece
                stop = at + len(values)
                if at >= end or stop <= begin:
                    continue
                if at < begin or stop > end:
                    first = at if at > begin else begin
                    piece = first, values[first - at : (stop if stop < end else end) - at]
                found.append(piece)
            if not column.inherits:
                break
            end = min(end, column.pieces[0][0])
            segment = segment.parent
        found.reverse()
        return found

    def values(self, name: str, begin: int, end: int, fill: float = 0) -> Values:
        """Return the values of the tokens from `begin` to `end`, `fill` where there are none.

        It is a view if these tokens are in one piece.
        """
        if (own := self._view(name, begin, end)) is not None:
            return own
        found = self.pieces(name, begin, end)
        like = self.columns[name].pieces[0][1]
        moved = [(at - begin, values) for at, values in found]
        return placed(moved, max(end - begin, 0), like, fill)

    def tokens(self, begin: int, end: int) -> NDArray[np.int32]:
        """Return the ids of the tokens from `begin` to `end`, int32."""
        return self.values(TOKEN_IDS, begin, end)  # type: ignore[return-value]

    def mask(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return which of the tokens from `begin` to `end` are in the loss, bool."""
        if LOSS_MASK in self.columns:
            return self.values(LOSS_MASK, begin, end)  # type: ignore[return-value]
        mask = np.ones(end - begin, np.bool_)
        mask[: max(self.prompt_length - begin, 0)] = False
        return fixed(mask)

    def versions(self, begin: int, end: int) -> NDArray[np.int32]:
        """Return the policy versions of the tokens from `begin` to `end`, int32.

        Those of the prompt are the lowest of the response if they are not stored.
        """
        own = self.columns[TOKEN_VERSIONS]
        lowest = min([int(np.min(values)) for _, values in own.pieces if len(values)], default=0)
        return self.values(TOKEN_VERSIONS, begin, end, lowest)  # type: ignore[return-value]

    def extras(self, begin: int = 0) -> dict[str, Values]:
        """Return the token extras from a position on by name, [T - begin, ...] or one less each."""
        return {
            name.removeprefix(EXTRA): self.values(name, begin, column.end)
            for name, column in self.columns.items()
            if name.startswith(EXTRA)
        }

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens in the loss."""
        if LOSS_MASK not in self.columns:
            return self.length - self.prompt_length
        found = self.pieces(LOSS_MASK, 0, self.length)
        return sum(int(np.count_nonzero(values)) for _, values in found)


def _unpickled(_: tuple[Segment, ...], *values: Any) -> Segment:
    return Segment(*values)


def lineage(one: Any) -> tuple[Any, ...]:
    """Return some ancestors of a segment or turn, `_NESTED` apart, from the first one."""
    found = []
    while (one := one.parent) is not None:
        found.append(one)
    return tuple(found[::-1][::_NESTED])


def response_column(values: Values, length: int) -> Column:
    """Return the column of values [R, ...] of the response of a segment of T tokens."""
    return Column(((length - len(values), values),), length)


def column_of(
    values: Values, length: int, prompt_length: int, name: str = "", parent: Segment | None = None
) -> Column:
    """Return the column of values [T, ...] or [T - 1, ...] of a segment.

    Values of the prompt that are 0, or those of the parent, are left out.

    Args:
        values: The values of all tokens, or of all but the last.
        length: Number of tokens, T.
        prompt_length: Number of tokens of the prompt.
        name: Name of the column.
        parent: The segment that may have the same values.
    """
    if len(values) == length and is_zero(values[:prompt_length]):
        return response_column(own_memory(values[prompt_length:]), length)
    return inherited(values, len(values), name, parent)


def inherited(values: Values, end: int, name: str, parent: Segment | None) -> Column:
    """Return a column of all values [end, ...] without those that are the parent's."""
    theirs = None if parent is None else parent.columns.get(name)
    whole = Column(((0, values),), end)
    if parent is None or theirs is None or theirs.kind != whole.kind:
        return whole
    known = min(end, theirs.end)
    shared = common_prefix(values, parent.values(name, 0, known), known)
    return Column(((shared, own_memory(values[shared:])),), end, inherits=True)


def own_memory(values: Values) -> Values:
    """Return a copy of a view that would keep a larger array alive."""
    return fixed(values.copy()) if isinstance(values, np.ndarray) else values.clone()


def common_prefix(one: Values, other: Values, most: int) -> int:
    """Return how many of the first `most` rows of two arrays have the same bits."""
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        most = common_prefix(one.counts, other.counts, most)
        equal = common_prefix(one.values, other.values, int(one.offsets[most]))
        # the token of the first value that differs, if one does
        return min(most, int(one.offsets.searchsorted(equal, "right")) - 1)
    left, right = _as_bytes(one[:most]), _as_bytes(other[:most])
    differ = left != right
    if differ.ndim > 1:
        differ = differ.any(axis=1)
    first = int(differ.argmax()) if len(differ) else 0
    return first if len(differ) and differ[first] else most


def _as_bytes(values: Any) -> NDArray[Any]:
    """View an array as integers, [n] or [n, bytes], so that it can be compared bit for bit."""
    raw = np.ascontiguousarray(bits(values))
    if raw.ndim == 1 and raw.dtype.kind in "biu":
        return raw
    return (
        raw.view(np.uint8).reshape(len(raw), -1) if raw.size else np.empty((len(raw), 0), np.uint8)
    )


def common_tokens(segment: Segment, tokens: NDArray[np.int32]) -> int:
    """Return how many of the first tokens of a segment are the first of `tokens`."""
    end = min(segment.length, len(tokens))
    for at, own in segment.pieces(TOKEN_IDS, 0, end):
        size = len(own)
        same = common_prefix(own, tokens[at : at + size], size)
        if same < size:
            return at + same
    return end


def begins_with(segment: Segment, before: Segment) -> bool:
    """Whether the context of a segment begins with all tokens of another one."""
    if segment.prompt_length < before.length:
        return False
    if segment.parent is before and segment.shared == before.length:
        return True
    # A segment usually differs where its own tokens begin.
    probe = slice(segment.shared, min(segment.shared + _PROBE, before.length))
    if probe.start < before.length and not np.array_equal(
        segment.tokens(probe.start, probe.stop), before.tokens(probe.start, probe.stop)
    ):
        return False
    # Tokens that both have from the same segment are not compared.
    known = before.shared
    if known and owner(segment, known) is not owner(before, known):
        known = 0
    return np.array_equal(segment.tokens(known, before.length), before.tokens(known, before.length))


def owner(segment: Segment, length: int) -> Segment:
    """Return the ancestor (or the segment itself) that has the last of its first tokens itself."""
    while segment.parent is not None and length <= segment.shared:
        segment = segment.parent
    return segment
