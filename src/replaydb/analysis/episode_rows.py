"""Conversion of decoded groups to Arrow: one row for each episode, tokens in list columns.

Token columns are list arrays. They are views of the payload if a batch has one episode whose tokens
are in one piece, and are concatenated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaydb.analysis.decoded_groups import DecodedGroup, EpisodeRow
from replaydb.analysis.episode_columns import (
    ARRAY,
    DTYPES,
    EPISODE,
    GROUP,
    TOKENS,
    TURN,
    extra_fields,
)
from replaydb.domain.episodes import Turn
from replaydb.domain.episodes.arrays import Versions, bits, dtype_name
from replaydb.domain.episodes.ragged import Ragged, Values
from replaydb.domain.episodes.segments import EXTRA, Column
from replaydb.domain.episodes.turns import MARKS
from replaydb.errors import InvalidInputError
from replaydb.util import escapes


def batch_of_episodes(schema: pa.Schema, groups: Sequence[DecodedGroup]) -> pa.RecordBatch:
    """Return one row for each episode; each group must have at least one."""
    rows = [row for one in groups for row in one.rows]
    counts = [len(one.rows) for one in groups]
    index = np.repeat(np.arange(len(groups)), counts)
    columns = [column.take(pa.array(index)) for column in _group_columns(groups)]
    versions = [row.tokens.versions() for row in rows]
    token_extras = [row.tokens.token_extras() for row in rows]
    extras = [row.episode.extras for row in rows]
    columns += _episode_columns(rows, versions)
    columns += _token_columns(rows, versions, token_extras)
    columns += [_turns(rows)]
    columns += [_arrays(token_extras), _arrays(extras), *_context_columns(groups, counts)]
    both: list[dict[str, Any]] = [
        {**one, **other} for one, other in zip(token_extras, extras, strict=True)
    ]
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


def _episode_columns(rows: Sequence[EpisodeRow], versions: Sequence[Versions]) -> list[pa.Array]:
    columns = {
        "position": [row.position for row in rows],
        "num_tokens": [row.tokens.num_tokens for row in rows],
        "policy_version": [one if isinstance(one, int) else None for one in versions],
        "metadata": [row.metadata for row in rows],
        "text": [_text(row.episode.text) for row in rows],
    }
    return [
        pa.array(
            columns[name] if name in columns else [getattr(row.episode, name) for row in rows], kind
        )
        for name, kind in EPISODE.items()
    ]


def _text(text: str | None) -> str | None:
    return None if text is None else escapes.escape(text)


def _token_columns(
    rows: Sequence[EpisodeRow],
    versions: Sequence[Versions],
    extras: Sequence[Mapping[str, Values]],
) -> list[pa.Array]:
    columns: dict[str, list[NDArray[Any] | None]] = {
        "token_ids": [row.tokens.token_ids() for row in rows],
        "loss_mask": [row.tokens.loss_mask() for row in rows],
        "logprobs": [row.tokens.logprobs() for row in rows],
        "token_versions": [_if_array(one) for one in versions],
        "token_rewards": [
            _rewards(one) if (found := row.tokens.token_rewards()) is None else found
            for row, one in zip(rows, extras, strict=True)
        ],
    }
    return [_list(columns[name], kind) for name, kind in TOKENS.items()]


def _list(values: Sequence[NDArray[Any] | None], kind: pa.DataType) -> pa.Array:
    """Return a list column, null for episodes without values."""
    known = [one for one in values if one is not None]
    joined = known[0] if len(known) == 1 else np.concatenate([np.empty(0, DTYPES[kind]), *known])
    sizes = np.array([0 if one is None else len(one) for one in values])
    return _lists(pa.array(joined, kind), sizes, np.array([one is None for one in values]))


def _lists(values: pa.Array, sizes: NDArray[np.int64], missing: NDArray[np.bool_]) -> pa.Array:
    """Return lists of these sizes, null for those that are missing."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def _rewards(extras: Mapping[str, Values]) -> NDArray[np.float32] | None:
    found = extras.get("token_rewards")
    if isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype.kind in "fiub":
        with np.errstate(over="ignore"):  # values beyond float32 become infinite
            return found.astype(np.float32, copy=False)
    return None


def _turns(rows: Sequence[EpisodeRow]) -> pa.Array:
    with_turns = [row for row in rows if row.episode.turns]
    turns = [turn for row in with_turns for turn in row.episode.turns]
    columns: dict[str, list[Any]] = {
        "num_tokens": [turn.num_tokens for turn in turns],
        "prompt_length": [turn.segment.prompt_length for turn in turns],
        "reward": [turn.reward for turn in turns],
        "policy_version": [turn.version for turn in turns],
        "token_versions": [_if_array(turn.policy_version) for turn in turns],
        "has_logprobs": [turn.logprobs is not None for turn in turns],
        "has_token_rewards": [turn.token_rewards is not None for turn in turns],
        "finish_reason": [turn.finish_reason for turn in turns],
        "metadata": [one for row in with_turns for one in row.turn_metadata],
        "token_extras": [[name for name, _ in _extras(turn)] for turn in turns],
        "parent": [None if i < 0 else i for row in with_turns for i in row.tokens.parents],
        "shared": [count for row in with_turns for count in row.tokens.shared],
        "short_extras": [
            [name for name, column in _extras(turn) if column.end < turn.num_tokens]
            for turn in turns
        ],
        "context_extras": [named_arrays(one) for row in with_turns for one in row.context_extras],
        **{name: [getattr(turn, name) for turn in turns] for name in MARKS},
    }
    structs = pa.StructArray.from_arrays(
        [pa.array(columns[one.name], one.type) for one in TURN], fields=list(TURN)
    )
    sizes = np.array([len(row.episode.turns) for row in rows])
    return _lists(structs, sizes, sizes == 0)


def _if_array(version: Versions) -> NDArray[np.int32] | None:
    return version if isinstance(version, np.ndarray) else None


def _extras(turn: Turn) -> list[tuple[str, Column]]:
    """Return the columns of the token extras of a turn, by the name of the extra."""
    columns = turn.segment.columns.items()
    return [(name.removeprefix(EXTRA), one) for name, one in columns if name.startswith(EXTRA)]


def _arrays(rows: Iterable[Mapping[str, Values]]) -> pa.Array:
    """Return a column of named arrays of any dtype and shape, null if there are none."""
    return pa.array([named_arrays(row) for row in rows], pa.list_(ARRAY))


def named_arrays(arrays: Mapping[str, Values]) -> list[dict[str, Any]] | None:
    """Convert arrays to rows of `ARRAY`; their bytes are little-endian, in C order."""
    rows: list[dict[str, Any]] = []
    for name, array in arrays.items():
        counts = array.counts if isinstance(array, Ragged) else None
        array = array.values if isinstance(array, Ragged) else array
        rows.append(
            {
                "name": name,
                "dtype": dtype_name(array),
                "shape": list(array.shape),
                "data": bits(array).tobytes(),
                "counts": counts,
            }
        )
    return rows or None


def _context_columns(groups: Sequence[DecodedGroup], counts: Sequence[int]) -> list[pa.Array]:
    """Return the prompt ids and extras of groups, only in the first row of each group."""
    ids, extras = [], []
    for one, count in zip(groups, counts, strict=True):
        context = one.context
        ids += [context.prompt_ids, *[None] * (count - 1)]
        extras += [named_arrays(context.extras), *[None] * (count - 1)]
    return [pa.array(ids, pa.list_(pa.int32())), pa.array(extras, pa.list_(ARRAY))]


def _extra_column(rows: Iterable[Mapping[str, Values]], field: pa.Field) -> pa.Array:
    """Return the column of one extra, of tokens or of episodes."""
    kind, name = field.type.value_type, field.name
    return _list(
        [_numbers(row[name], DTYPES[kind], name) if name in row else None for row in rows], kind
    )


def _numbers(array: Values, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    if isinstance(array, Ragged):
        expected = "an extra with one shape for all tokens; token_extras has the others"
        raise InvalidInputError(f"extras[{name!r}]", expected, repr(array))
    numbers = array if isinstance(array, np.ndarray) else array.float().numpy()
    if not np.can_cast(numbers.dtype, dtype, "same_kind"):
        expected = f"a dtype that {dtype_name(array)}, as in a stored episode, can be cast to"
        raise InvalidInputError(f"extras[{name!r}]", expected, dtype)
    with np.errstate(over="ignore"):
        return numbers.reshape(-1).astype(dtype, copy=False)
