"""Episodes from flat or padded arrays, without an object for each episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from replaydb.domain import checks
from replaydb.domain.episodes.arrays import (
    Array,
    ArrayLike,
    bits,
    dtype_name,
    fixed,
    from_bits,
    frozen,
    own,
    shape_of,
    to_array,
    to_arrays,
    to_bool,
    to_float64,
    to_int32,
    to_logprobs,
)
from replaydb.domain.episodes.building import CORE_FIELDS
from replaydb.domain.episodes.flat import NO_VERSION, FlatEpisodes
from replaydb.domain.episodes.ragged import Ragged, Values, to_values
from replaydb.errors import InvalidInputError

_T = TypeVar("_T")


def flat_from_arrays(
    *,
    token_ids: ArrayLike,
    lengths: ArrayLike | None,
    attention_mask: ArrayLike | None,
    prompt_lengths: ArrayLike | None,
    loss_mask: ArrayLike | None,
    logprobs: ArrayLike | None,
    rewards: ArrayLike | None,
    advantages: ArrayLike | None,
    policy_versions: ArrayLike | None,
    token_versions: ArrayLike | None,
    finish_reasons: Iterable[str | None] | None,
    token_extras: Mapping[str, ArrayLike] | None,
    episode_extras: Mapping[str, ArrayLike] | None,
    metadata: Iterable[Mapping[str, Any] | None] | None,
) -> FlatEpisodes:
    """Return the columns of the episodes. The arguments are those of `EpisodeGroup.from_arrays`.

    Raises:
        InvalidInputError: An argument has the wrong shape, dtype or value.
    """
    tokens = to_array("token_ids", token_ids)
    rows = _Rows.of(tokens, lengths, attention_mask)
    rows, mask = rows.with_prompts(prompt_lengths, loss_mask)
    count = len(rows.lengths)
    versions, has_versions = _token_versions(rows, token_versions)
    per_token = to_arrays("token_extras", token_extras, CORE_FIELDS, to_values)
    per_episode = to_arrays("episode_extras", episode_extras, CORE_FIELDS | per_token.keys())
    return FlatEpisodes(
        lengths=rows.lengths,
        prompt_lengths=rows.prompt_lengths,
        rewards=_numbers("rewards", rewards, count),
        advantages=_numbers("advantages", advantages, count),
        versions=_scalar_versions(policy_versions, token_versions is not None, count),
        has_logprobs=np.full(count, logprobs is not None),
        has_token_versions=has_versions,
        token_ids=to_int32("token_ids", rows.flat("token_ids", tokens)),
        loss_mask=mask,
        logprobs=None
        if logprobs is None
        else to_logprobs(rows.flat("logprobs", to_array("logprobs", logprobs))),
        token_versions=versions,
        token_extras={
            name: rows.flat(f"token_extras[{name!r}]", array) for name, array in per_token.items()
        },
        extras={
            name: own(_rows_of(f"episode_extras[{name!r}]", array, count))
            for name, array in per_episode.items()
        },
        each_token_extras={},
        each_extras={},
        finish_reasons=tuple(_each("finish_reasons", finish_reasons, count, checks.string)),
        metadata=tuple(one or {} for one in _each("metadata", metadata, count, _json_object)),
        turns=None,
    )


def texts_of(texts: Iterable[str | None] | None, count: int) -> list[str | None]:
    """Return the transcripts of `count` episodes."""
    return _each("texts", texts, count, checks.text)


@dataclass(frozen=True)
class _Rows:
    """Where the tokens of E episodes are in the arrays of the caller.

    Attributes:
        lengths: Number of tokens of each episode, int64 [E].
        mask: Which positions of padded arrays have a token, bool [E, L]; None if they are flat.
        prompt_lengths: Number of prompt tokens of each episode, int64 [E].
    """

    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    prompt_lengths: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: Array, lengths: ArrayLike | None, attention_mask: ArrayLike | None) -> Self:
        """Find the tokens. The lengths of prompts are not known yet, and 0."""
        if tokens.ndim not in (1, 2):
            raise InvalidInputError("token_ids", "shape [T] or [E, L]", shape_of(tokens))
        if attention_mask is None:
            if lengths is None:
                expected = "the number of tokens of each episode"
                raise InvalidInputError("lengths", expected, None)
            counts = to_int32("lengths", lengths).astype(np.int64)
            most = len(tokens) if tokens.ndim == 1 else tokens.shape[1]
            _check_range("lengths", counts, most)
            if tokens.ndim == 1 and counts.sum() != most:
                expected = f"lengths with a sum of {most}, as many as token_ids"
                raise InvalidInputError("lengths", expected, int(counts.sum()))
            if tokens.ndim == 2 and len(counts) != len(tokens):
                raise InvalidInputError("lengths", f"shape [{len(tokens)}]", shape_of(counts))
            mask = None if tokens.ndim == 1 else np.arange(most) < counts[:, None]
        else:
            if lengths is not None:
                raise InvalidInputError("attention_mask", "None, as lengths is given", "a value")
            given = to_array("attention_mask", attention_mask)
            if tokens.ndim != 2 or given.shape != tokens.shape:
                expected = "the shape of padded token_ids [E, L]"
                raise InvalidInputError("attention_mask", expected, shape_of(given))
            mask = to_bool("attention_mask", given.reshape(-1)).reshape(given.shape)
            counts = mask.sum(1, dtype=np.int64)
        if not len(counts):
            raise InvalidInputError("token_ids", "at least one episode", "none")
        return cls(counts, mask, np.zeros_like(counts))

    def with_prompts(
        self, prompt_lengths: ArrayLike | None, loss_mask: ArrayLike | None
    ) -> tuple[_Rows, NDArray[np.bool_]]:
        """Return the rows with the lengths of their prompts, and the flat loss mask, bool [T]."""
        if prompt_lengths is None and loss_mask is None:
            raise InvalidInputError("prompt_lengths", "a value, if there is no loss_mask", None)
        rows = self
        if prompt_lengths is not None:
            prompts = to_int32("prompt_lengths", prompt_lengths).astype(np.int64)
            if prompts.shape != self.lengths.shape:
                expected = f"shape [{len(self.lengths)}]"
                raise InvalidInputError("prompt_lengths", expected, shape_of(prompts))
            _check_range("prompt_lengths", prompts, self.lengths)
            rows = _Rows(self.lengths, self.mask, prompts)
        if loss_mask is None:
            return rows, frozen(rows.is_response, "?")
        given = to_array("loss_mask", loss_mask)
        if prompt_lengths is None and not self.is_whole(given):
            expected = "a value, if loss_mask has only responses"
            raise InvalidInputError("prompt_lengths", expected, None)
        mask = to_bool("loss_mask", rows.flat("loss_mask", given))
        if prompt_lengths is None:
            ends = np.cumsum(self.lengths)
            # of each episode: the position of its first token in the loss, or its end
            ones = np.append(np.flatnonzero(mask), len(mask))
            first = ones[np.searchsorted(ones, ends - self.lengths)]
            prompts = np.minimum(first, ends) - (ends - self.lengths)
            rows = _Rows(self.lengths, self.mask, prompts)
        return rows, mask

    @cached_property
    def is_response(self) -> NDArray[np.bool_]:
        """Which tokens are after the prompt, bool [T]."""
        starts = np.cumsum(self.lengths) - self.lengths
        positions = np.arange(int(self.lengths.sum())) - np.repeat(starts, self.lengths)
        return positions >= np.repeat(self.prompt_lengths, self.lengths)

    def flat(self, field: str, array: Values) -> Any:
        """Return a copy with the values of all tokens, [T, ...].

        Prompts have zeros if the array has only responses.

        Raises:
            InvalidInputError: The array has neither the shape of the tokens nor of the responses.
        """
        if isinstance(array, Ragged):
            return Ragged(array.values, self.flat(field, array.counts))
        given = bits(array)
        dtype = given.dtype.newbyteorder("<")
        if self.is_whole(array):
            values = np.array(given, dtype) if self.mask is None else given[self.mask]
            values = values.astype(dtype, order="C", copy=False)
        else:
            responses = self._responses(given)
            if responses is None:
                raise InvalidInputError(field, self._expected(array), shape_of(array))
            values = np.zeros((int(self.lengths.sum()), *responses.shape[1:]), dtype)
            values[self.is_response] = responses
        return fixed(from_bits(values, dtype_name(array)))

    def is_whole(self, array: Array) -> bool:
        if self.mask is None:
            return array.ndim > 0 and len(array) == self.lengths.sum()
        return tuple(array.shape[:2]) == self.mask.shape

    def _responses(self, given: NDArray[Any]) -> NDArray[Any] | None:
        """Return the values of response tokens; None if the array does not have exactly these."""
        counts = self.lengths - self.prompt_lengths
        if self.mask is None:
            return given if given.ndim and len(given) == counts.sum() else None
        if given.ndim < 2 or len(given) != len(counts) or given.shape[1] > self.mask.shape[1]:
            return None
        last = self.mask[:, self.mask.shape[1] - given.shape[1] :]
        return given[last] if np.array_equal(last.sum(1), counts) else None

    def _expected(self, array: Array) -> str:
        more = ", ..." if array.ndim > (1 if self.mask is None else 2) else ""
        if self.mask is None:
            responses = int((self.lengths - self.prompt_lengths).sum())
            return f"shape [{self.lengths.sum()}{more}], or [{responses}{more}] for the responses"
        count, width = self.mask.shape
        return (
            f"shape [{count}, {width}{more}], or [{count}, R{more}] "
            "if the last R columns of token_ids are the responses"
        )


def _token_versions(
    rows: _Rows, value: ArrayLike | None
) -> tuple[NDArray[np.int32] | None, NDArray[np.bool_]]:
    """Return versions per token, int32 [T], and which episodes have them, bool [E].

    Prompts get the lowest version of their response, if only responses have versions.
    """
    if value is None:
        return None, np.zeros(len(rows.lengths), np.bool_)
    array = to_array("token_versions", value)
    versions = to_int32("token_versions", rows.flat("token_versions", array))
    is_whole = rows.is_whole(array)
    counts = rows.lengths if is_whole else rows.lengths - rows.prompt_lengths
    has_versions = counts > 0
    if is_whole or not has_versions.any():
        return (versions if has_versions.any() else None), has_versions
    lowest = np.zeros_like(counts)
    responses = versions[rows.is_response]
    starts = (np.cumsum(counts) - counts)[has_versions]
    lowest[has_versions] = np.minimum.reduceat(responses, starts)
    filled = np.where(rows.is_response, versions, np.repeat(lowest, rows.lengths))
    return frozen(filled, "<i4"), has_versions


def _scalar_versions(value: ArrayLike | None, per_token: bool, count: int) -> NDArray[np.int64]:
    if value is None:
        return np.full(count, NO_VERSION)
    if per_token:
        raise InvalidInputError("policy_versions", "None, as token_versions is given", "a value")
    array = to_array("policy_versions", value)
    if not array.ndim:
        version = checks.whole_number("policy_versions", value, *checks.INT32)
        return np.full(count, version, np.int64)
    versions = to_int32("policy_versions", _rows_of("policy_versions", array, count))
    return versions.astype(np.int64)


def _numbers(field: str, value: ArrayLike | None, count: int) -> NDArray[np.float64]:
    """Return a number of each episode, float64 [E]; NaN if it has none."""
    if value is None:
        return np.full(count, np.nan)
    return to_float64(field, _rows_of(field, to_array(field, value), count), count)


def _rows_of(field: str, array: Array, count: int) -> Array:
    if not array.ndim or len(array) != count:
        more = ", ..." if array.ndim > 1 else ""
        raise InvalidInputError(field, f"shape [{count}{more}], one per episode", shape_of(array))
    return array


def _each(
    field: str, values: Iterable[Any] | None, count: int, check: Callable[[str, Any], _T]
) -> list[_T | None]:
    """Check a value or None for each episode."""
    if values is None:
        return [None] * count
    found = list(checks.items(field, "a value or None for each episode", values))
    if len(found) != count:
        raise InvalidInputError(field, f"{count} values, one per episode", len(found))
    return [checks.optional(check, f"{field}[{i}]", one) for i, one in enumerate(found)]


def _json_object(field: str, value: Any) -> dict[str, Any]:
    return checks.json_object(field, value, checks.text)


def _check_range(field: str, counts: NDArray[np.int64], most: NDArray[np.int64] | int) -> None:
    wrong = (counts < 0) | (counts > most)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        limit = int(np.broadcast_to(most, counts.shape)[i])
        raise InvalidInputError(f"{field}[{i}]", f"an integer from 0 to {limit}", int(counts[i]))
