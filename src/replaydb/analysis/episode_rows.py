"""Conversion of decoded groups to Arrow: one row for each episode, tokens in list columns.

Token columns are list arrays over the arrays of the payload. They are not copied if the batch has
one payload, and concatenated if it has several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaydb.analysis.decoded_groups import DecodedGroup, EpisodePart
from replaydb.analysis.episode_columns import (
    ARRAY,
    DTYPES,
    EPISODE,
    GROUP,
    TEXT,
    TOKENS,
    TURN,
    extra_fields,
)
from replaydb.domain.episodes.arrays import Array, bits, dtype_name
from replaydb.domain.episodes.flat import NO_VERSION, FlatEpisodes
from replaydb.errors import InvalidInputError
from replaydb.util import escapes

#: Values of a part, their number for each episode, and which episodes have values (None: all).
Column = tuple[NDArray[Any] | None, NDArray[np.int64], NDArray[np.bool_] | None]


def batch_of_episodes(schema: pa.Schema, groups: Sequence[DecodedGroup]) -> pa.RecordBatch:
    """Return one row for each episode; each group must have at least one."""
    parts = [part for one in groups for part in one.parts]
    flats = [part.flat for part in parts]
    counts = [one.num_episodes for one in groups]
    index = np.repeat(np.arange(len(groups)), counts)
    columns = [column.take(pa.array(index)) for column in _group_columns(groups)]
    columns += _episode_columns(parts)
    columns += _token_columns(flats)
    columns += [_turns(parts)]
    episodes = [episode for part in parts for episode in part.episodes]
    token_extras = [episode.token_extras for episode in episodes]
    extras = [episode.extras for episode in episodes]
    columns += [_arrays(token_extras), _arrays(extras), *_context_columns(groups, counts)]
    both = [one | other for one, other in zip(token_extras, extras, strict=True)]
    columns += [_extra_column(both, field) for field in extra_fields(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def batch_of_empty(schema: pa.Schema, groups: Sequence[DecodedGroup]) -> pa.RecordBatch:
    """Return one row for each group; the groups have no episodes."""
    columns = dict(zip(GROUP, _group_columns(groups), strict=True))
    context = _context_columns(groups, [1] * len(groups))
    columns |= dict(zip(("group_prompt_ids", "group_extras"), context, strict=True))
    arrays = [columns.get(one.name, pa.nulls(len(groups), one.type)) for one in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _group_columns(groups: Sequence[DecodedGroup]) -> list[pa.Array]:
    rows = zip(*(one.row for one in groups), strict=True)
    return [pa.array(column, kind) for column, kind in zip(rows, GROUP.values(), strict=True)]


def _episode_columns(parts: Sequence[EpisodePart]) -> list[pa.Array]:
    flats = [part.flat for part in parts]
    positions = [part.positions for part in parts]
    turns = [
        np.ones(flat.num_episodes, np.int64) if flat.turns is None else flat.turns.counts.clip(1)
        for flat in flats
    ]
    columns = {
        "position": pa.array([one for several in positions for one in several], pa.int64()),
        "reward": _floats([flat.rewards for flat in flats]),
        "advantage": _floats([flat.advantages for flat in flats]),
        "finish_reason": pa.array([one for flat in flats for one in flat.finish_reasons], TEXT),
        "num_tokens": pa.array(np.concatenate([flat.lengths for flat in flats])),
        "num_loss_tokens": pa.array(np.concatenate([_loss_tokens(flat) for flat in flats])),
        "num_turns": pa.array(np.concatenate(turns)),
        "prompt_length": pa.array(np.concatenate([flat.prompt_lengths for flat in flats])),
        "policy_version": _versions([flat.versions for flat in flats]),
        "min_policy_version": _versions([flat.min_policy_versions for flat in flats]),
        "max_policy_version": _versions([flat.max_policy_versions for flat in flats]),
        "metadata": pa.array([one for part in parts for one in part.metadata], TEXT),
        "text": pa.array(
            [
                None if text is None else escapes.escape(text)
                for part in parts
                for text in part.texts
            ],
            TEXT,
        ),
    }
    return [columns[name] for name in EPISODE]


def _token_columns(flats: Sequence[FlatEpisodes]) -> list[pa.Array]:
    columns: dict[str, list[Column]] = {
        "token_ids": [(flat.token_ids, flat.lengths, None) for flat in flats],
        "loss_mask": [(flat.loss_mask, flat.lengths, None) for flat in flats],
        "logprobs": [(flat.logprobs, flat.lengths, flat.has_logprobs) for flat in flats],
        "token_versions": [
            (flat.token_versions, flat.lengths, flat.has_token_versions) for flat in flats
        ],
        "token_rewards": [_token_rewards(flat) for flat in flats],
    }
    return [_list(columns[name], kind) for name, kind in TOKENS.items()]


def _list(parts: Sequence[Column], kind: pa.DataType) -> pa.Array:
    """Return a list column, null for episodes without values."""
    values, sizes, present = [], [], []
    for numbers, lengths, having in parts:
        has = np.full(len(lengths), numbers is not None) if having is None else having
        if numbers is not None and not has.all() and len(numbers) == lengths.sum():
            numbers = numbers[np.repeat(has, lengths)]
        if numbers is not None:
            values.append(numbers)
        sizes.append(np.where(has, lengths, 0))
        present.append(has)
    joined = values[0] if len(values) == 1 else np.concatenate([np.empty(0, DTYPES[kind]), *values])
    array = pa.array(joined, kind)
    return _lists(array, np.concatenate(sizes), ~np.concatenate(present))


def _lists(values: pa.Array, sizes: NDArray[np.int64], missing: NDArray[np.bool_]) -> pa.Array:
    """Return lists of these sizes, null for those that are missing."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def _token_rewards(flat: FlatEpisodes) -> Column:
    """Return token rewards of turns; without turns, of the token extra "token_rewards"."""
    values = np.zeros(len(flat.token_ids), np.float32)
    having = np.zeros(flat.num_episodes, np.bool_)
    if flat.turns is not None and flat.turns.token_rewards is not None:
        ends = np.cumsum(flat.turns.counts)
        known = np.concatenate([[0], np.cumsum(flat.turns.has_token_rewards)])
        having = known[ends] > known[ends - flat.turns.counts]
        values = flat.turns.token_rewards.copy()
    elif (of_all := _rewards(flat.token_extras)) is not None:
        return of_all, flat.lengths, None
    for i, extras in flat.each_token_extras.items():
        if not having[i] and (own := _rewards(extras)) is not None:
            values[flat.offsets[i] : flat.offsets[i + 1]] = own
            having[i] = True
    return values, flat.lengths, having


def _rewards(extras: Mapping[str, Array]) -> NDArray[np.float32] | None:
    found = extras.get("token_rewards")
    if isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype.kind in "fiub":
        with np.errstate(over="ignore"):  # values beyond float32 become infinite
            return found.astype(np.float32, copy=False)
    return None


def _turns(parts: Sequence[EpisodePart]) -> pa.Array:
    flats = [part.flat for part in parts]
    known = [flat.turns for flat in flats if flat.turns is not None]
    sizes = np.concatenate(
        [
            np.zeros(flat.num_episodes, np.int64) if flat.turns is None else flat.turns.counts
            for flat in flats
        ]
    )
    if not known:
        return pa.nulls(len(sizes), pa.list_(TURN))
    columns: dict[str, pa.Array] = {
        "num_tokens": pa.array(np.concatenate([part.lengths for part in known])),
        "prompt_length": pa.array(np.concatenate([part.prompt_lengths for part in known])),
        "reward": _floats([part.rewards for part in known]),
        "policy_version": _versions([part.versions for part in known]),
        "token_versions": pa.array(
            [row for flat in flats if flat.turns is not None for row in _turn_versions(flat)],
            pa.list_(pa.int32()),
        ),
        "finish_reason": pa.array([one for part in known for one in part.finish_reasons], TEXT),
        "metadata": pa.array([one for part in parts for one in part.turn_metadata], TEXT),
        "token_extras": pa.array(
            [list(names) for part in known for names in part.token_extras], pa.list_(TEXT)
        ),
    }
    for name in ("has_logprobs", "has_token_rewards"):
        columns[name] = pa.array(np.concatenate([getattr(part, name) for part in known]))
    structs = pa.StructArray.from_arrays([columns[one.name] for one in TURN], fields=list(TURN))
    return _lists(structs, sizes, sizes == 0)


def _turn_versions(flat: FlatEpisodes) -> Iterator[NDArray[np.int32] | None]:
    """Yield the token versions of the response of each turn; None if it has one version."""
    turns, versions = flat.turns, flat.token_versions
    assert turns is not None  # noqa: S101
    starts = np.repeat(flat.offsets[:-1], turns.counts)
    firsts = np.repeat(np.cumsum(turns.counts) - turns.counts, turns.counts)
    before = np.concatenate([[0], np.cumsum(turns.lengths)])
    begins = starts + before[:-1] - before[firsts]
    rows = zip(begins, turns.prompt_lengths, turns.lengths, turns.has_token_versions, strict=True)
    for begin, prompt, length, has_own in rows:
        yield (
            versions[begin + prompt : begin + length] if has_own and versions is not None else None
        )


def _floats(parts: Iterable[NDArray[np.float64]]) -> pa.Array:
    joined = np.concatenate(list(parts))
    return pa.array(joined, mask=np.isnan(joined))


def _versions(parts: Iterable[NDArray[np.int64]]) -> pa.Array:
    joined = np.concatenate(list(parts))
    return pa.array(joined, mask=joined == NO_VERSION)


def _loss_tokens(flat: FlatEpisodes) -> NDArray[np.int64]:
    known = np.concatenate([[0], np.cumsum(flat.loss_mask)])
    return np.diff(known[flat.offsets])


def _arrays(rows: Iterable[Mapping[str, Array]]) -> pa.Array:
    """Return a column of named arrays of any dtype and shape, null if there are none."""
    return pa.array([named_arrays(row) for row in rows], pa.list_(ARRAY))


def named_arrays(arrays: Mapping[str, Array]) -> list[dict[str, Any]] | None:
    """Convert arrays to rows of `ARRAY`; their bytes are little-endian, in C order."""
    rows = [
        {
            "name": name,
            "dtype": dtype_name(array),
            "shape": list(array.shape),
            "data": bits(array).tobytes(),
        }
        for name, array in arrays.items()
    ]
    return rows or None


def _context_columns(groups: Sequence[DecodedGroup], counts: Sequence[int]) -> list[pa.Array]:
    """Return the prompt ids and extras of groups, only in the first row of each group."""
    ids, extras = [], []
    for one, count in zip(groups, counts, strict=True):
        context = one.context
        ids += [context.prompt_ids, *[None] * (count - 1)]
        extras += [named_arrays(context.extras), *[None] * (count - 1)]
    return [pa.array(ids, pa.list_(pa.int32())), pa.array(extras, pa.list_(ARRAY))]


def _extra_column(rows: Iterable[Mapping[str, Array]], field: pa.Field) -> pa.Array:
    """Return the column of one extra, of tokens or of episodes."""
    dtype = DTYPES[field.type.value_type]
    arrays = [_numbers(row[field.name], dtype, field.name) if field.name in row else None
              for row in rows]  # fmt: skip
    return _list(
        [(array, np.array([0 if array is None else len(array)]), None) for array in arrays],
        field.type.value_type,
    )


def _numbers(array: Array, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    numbers = array if isinstance(array, np.ndarray) else array.float().numpy()
    if not np.can_cast(numbers.dtype, dtype, "same_kind"):
        expected = f"a dtype that {dtype_name(array)}, as in a stored episode, can be cast to"
        raise InvalidInputError(f"extras[{name!r}]", expected, dtype)
    with np.errstate(over="ignore"):
        return numbers.reshape(-1).astype(dtype, copy=False)
