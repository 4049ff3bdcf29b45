"""Ragged: a variable number of values for each token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from replaydb import limits
from replaydb.domain import checks
from replaydb.domain.episodes.arrays import (
    Array,
    ArrayLike,
    bits,
    dtype_name,
    filled,
    fixed,
    from_bits,
    own,
    same,
    shape_of,
    to_array,
    to_arrays,
    to_int32,
    to_numpy,
)
from replaydb.errors import InvalidInputError


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Ragged:
    """A variable number of values for each of T tokens, for token extras such as sampling masks.

    `ragged[i]` are the values of token `i`, and `ragged[i:j]` is a `Ragged` of some of the tokens.
    Two are equal if dtypes, shapes and values are, bit for bit.

    Attributes:
        values: The values of all tokens, token after token, [V, ...]. In a batch a tensor.
        offsets: Position in `values` of the first value of each token, and V, int64 [T + 1]. In a
            batch a tensor.

    Args:
        values: Array of any dtype that can be stored, [V, ...].
        counts: Number of values of each token, integers [T] whose sum is V.

    Raises:
        InvalidInputError: `values` cannot be stored, or `counts` are not such integers.
    """

    values: Array
    offsets: Any

    def __init__(self, values: ArrayLike, counts: ArrayLike) -> None:
        array = own(to_array("values", values))
        if not array.ndim:
            raise InvalidInputError("values", "shape [V, ...]", shape_of(array))
        _set(self, array, offsets_of(to_int32("counts", counts), len(array)))

    @staticmethod
    def of(rows: Iterable[Iterable[Any]], dtype: DTypeLike | None = None) -> Ragged:
        """Return the numbers in `rows`, which has a sequence of them for each token.

        Args:
            rows: For example `[[1, 2], [], [3]]`.
            dtype: The numpy dtype of the values. Default: that of a numpy array of these numbers.

        Raises:
            InvalidInputError: `rows` has other values than numbers, `dtype` does not hold one of
                them, or there are neither numbers nor a `dtype`.
        """
        expected = "sequences of numbers"
        outer = checks.items("rows", expected, rows)
        several = [list(checks.items("rows", expected, row)) for row in outer]
        values = to_numpy("rows", [value for row in several for value in row])
        if dtype is not None:
            try:
                given, values = values, values.astype(dtype)
            except TypeError as error:
                raise InvalidInputError("dtype", "a dtype of numpy", dtype) from error
            if values.dtype.kind in "biu" and len(wrong := given[values != given]):
                raise InvalidInputError("rows", f"numbers in {values.dtype}", wrong[0])
        elif not len(values):
            raise InvalidInputError("dtype", "a dtype, because there are no numbers", None)
        return Ragged(values, [len(row) for row in several])

    @property
    def counts(self) -> Any:
        """Number of values of each token, int64 [T]."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Number of tokens, None for the number of their values, and the shape of a value."""
        return (len(self), None, *self.values.shape[1:])

    @property
    def ndim(self) -> int:
        """Number of dimensions of `shape`."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return int(self.values.nbytes + self.offsets.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        found = range(len(self))[index]
        if isinstance(found, int):
            return self.values[self.offsets[found] : self.offsets[found + 1]]
        if found.step != 1:
            raise InvalidInputError("index", "a slice with a step of 1", found.step)
        offsets = self.offsets[found.start : max(found.start, found.stop) + 1]
        return from_offsets(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def tolist(self) -> list[Any]:
        """Return the values of each token as lists."""
        return [one.tolist() for one in self]

    def clone(self) -> Ragged:
        """Return a copy."""
        return Ragged(self.values, self.counts)

    __array_ufunc__ = None  # so that comparing it with an array is False

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        raise TypeError("a Ragged, which is no array and belongs to tokens")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return same(self.values, other.values) and same(self.offsets, other.offsets)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} tokens, {len(self.values)} values of {dtype_name(self.values)})"


#: Values of tokens, with one or with a variable number of entries for each.
Values: TypeAlias = "Array | Ragged"


def _set(ragged: Ragged, values: Array, offsets: Any) -> None:
    object.__setattr__(ragged, "values", values)
    object.__setattr__(ragged, "offsets", offsets)


def from_offsets(values: Any, offsets: Any) -> Ragged:
    """Return a `Ragged` of these arrays, without copies or checks."""
    made = object.__new__(Ragged)
    _set(made, values, offsets if not isinstance(offsets, np.ndarray) else fixed(offsets))
    return made


def offsets_of(counts: Any, total: int, field: str = "counts") -> NDArray[np.int64]:
    """Return where the values of each token begin, and `total`, int64 [T + 1].

    Raises:
        InvalidInputError: A count is negative, or their sum is not `total`.
    """
    wrong = (counts < 0) | (counts > total)
    if wrong.any():
        raise InvalidInputError(field, f"integers from 0 to {total}", int(counts[wrong][0]))
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    if offsets[-1] != total:
        expected = f"integers whose sum is {total}, the number of values"
        raise InvalidInputError(field, expected, int(offsets[-1]))
    return fixed(offsets)


def to_values(field: str, value: ArrayLike) -> Values:
    """Return a `Ragged` unchanged, and apply `to_array` to anything else."""
    if isinstance(value, Ragged) and field != "token_extras['token_rewards']":
        return value
    return to_array(field, value)


def own_extras(extras: Mapping[str, ArrayLike] | None, taken: Collection[str]) -> dict[str, Any]:
    """Return copies of token extras by name. None becomes empty.

    Raises:
        InvalidInputError: A name is `taken` or invalid, or an array cannot be stored.
    """
    found = to_arrays("token_extras", extras, taken, to_values)
    return {name: one if isinstance(one, Ragged) else own(one) for name, one in found.items()}


def is_zero(values: Values) -> bool:
    """Whether no token has a value that is not 0."""
    numbers = values.counts if isinstance(values, Ragged) else bits(values)
    return not numbers.view(np.uint8).any()


def joined(several: Sequence[Any]) -> Values:
    """Concatenate values of one dtype and shape, at least one."""
    first: Values = several[0]
    if len(several) == 1:
        return first
    if isinstance(first, Ragged):
        values = joined([one.values for one in several])
        counts = np.concatenate([one.counts for one in several])
        return from_offsets(values, offsets_of(counts, len(values)))
    return fixed(from_bits(np.concatenate([bits(one) for one in several]), dtype_name(first)))


def placed(
    several: Sequence[tuple[int, Any]], length: int, like: Values, fill: float = 0
) -> Values:
    """Return the values of `length` tokens: arrays at their positions, in order, `fill` elsewhere.

    A `Ragged` has no values elsewhere.

    Raises:
        InvalidInputError: An array is larger than `replaydb.limits.MAX_ARRAY_BYTES`.
    """
    if isinstance(like, Ragged):
        counts = placed([(at, one.counts) for at, one in several], length, like.counts)
        limits.check_array(sum(one.values.nbytes for _, one in several))
        values = joined([like.values[:0], *[one.values for _, one in several]])
        return from_offsets(values, offsets_of(counts, len(values)))
    raw = filled((length, *like.shape[1:]), fill, bits(like).dtype)
    for at, values in several:
        raw[at : at + len(values)] = bits(values)
    return fixed(from_bits(raw, dtype_name(like)))
