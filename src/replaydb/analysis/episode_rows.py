"""Conversion of decoded groups to Arrow: one row for each episode, tokens in list columns.

Token columns are list arrays over the arrays of the payload. They are not copied if the batch has
one payload, and concatenated if it has several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaydb import checks, escapes
from replaydb.analysis.columns import TIME
from replaydb.batch.stored import StoredGroup
from replaydb.episodes import Episode
from replaydb.episodes.arrays import Array, bits, dtype_name
from replaydb.episodes.context import GroupContext
from replaydb.episodes.flat import NO_VERSION, FlatEpisodes, flatten
from replaydb.errors import InvalidInputError, NotSupportedError

_INT, _FLOAT, _TEXT = pa.int64(), pa.float64(), pa.string()

#: Approximate size of the rows of a batch; a single row may be larger.
BATCH_BYTES = 64 << 20
#: Maximum size of a column of a batch: its offsets have 32 bits.
MAX_COLUMN_BYTES = 2**31 - 1
#: Size of a token: id, mask, logprob, version and reward; and maximum size of a character.
TOKEN_BYTES, CHARACTER_BYTES = 17, 4

#: Columns of the group, with their types.
_GROUP = {
    "group_id": _INT, "buffer_name": _TEXT, "run_name": _TEXT, "run_lineage": _TEXT,
    "task_name": _TEXT, "group_uid": _TEXT, "prompt_uid": _TEXT, "group_status": _TEXT,
    "leased_from": _TEXT, "status_reason": _TEXT, "staleness": _INT, "priority": _FLOAT,
    "tags": _TEXT, "num_episodes": _INT, "expected_episodes": _INT, "reward_mean": _FLOAT,
    "reward_std": _FLOAT, "times_sampled": _INT, "created_at": TIME, "completed_at": TIME,
    "prompt": _TEXT,
}  # fmt: skip
_EPISODE = {
    "position": _INT, "reward": _FLOAT, "advantage": _FLOAT, "finish_reason": _TEXT,
    "num_tokens": _INT, "num_loss_tokens": _INT, "num_turns": _INT, "prompt_length": _INT,
    "policy_version": _INT, "min_policy_version": _INT, "max_policy_version": _INT,
    "metadata": _TEXT, "text": _TEXT,
}  # fmt: skip
_TOKENS = {
    "token_ids": pa.int32(), "loss_mask": pa.bool_(), "logprobs": pa.float32(),
    "token_versions": pa.int32(), "token_rewards": pa.float32(),
}  # fmt: skip
#: Numpy dtypes by Arrow type. The function of Arrow for this would import pandas.
_DTYPES = {pa.from_numpy_dtype(np.dtype(code)): np.dtype(code) for code in "?bBhHiIlLefd"}
ARRAY = pa.struct(
    {"name": _TEXT, "dtype": _TEXT, "shape": pa.list_(_INT), "data": pa.binary()}.items()
)
TURN = pa.struct(
    {
        "num_tokens": _INT, "prompt_length": _INT, "reward": _FLOAT, "policy_version": _INT,
        "token_versions": pa.list_(pa.int32()), "has_logprobs": pa.bool_(),
        "has_token_rewards": pa.bool_(), "finish_reason": _TEXT, "metadata": _TEXT,
        "token_extras": pa.list_(_TEXT),
    }.items()
)  # fmt: skip
_LISTS = {
    "turns": TURN, "token_extras": ARRAY, "extras": ARRAY,
    "group_prompt_ids": pa.int32(), "group_extras": ARRAY,
}  # fmt: skip


def episode_schema(extras: Mapping[str, str] | None = None) -> pa.Schema:
    """Return the schema of rows of episodes; requested extras are its last columns.

    Raises:
        InvalidInputError: `extras` is not a mapping of names to dtypes, or a name is taken.
    """
    lists = {name: pa.list_(kind) for name, kind in (_TOKENS | _LISTS).items()}
    known = _GROUP | _EPISODE | lists
    if not isinstance(extras, Mapping | None):
        raise InvalidInputError("extras", "a mapping of names to dtypes", repr(extras))
    for name, dtype in (extras or {}).items():
        if checks.name("extras", name) in known:
            raise InvalidInputError("extras", "names that differ from other columns", repr(name))
        try:
            kind = pa.from_numpy_dtype(np.dtype(dtype))
        except (TypeError, pa.ArrowNotImplementedError):
            kind = None
        if kind not in _DTYPES:
            expected = "the name of a numeric numpy dtype"
            raise InvalidInputError(f"extras[{name!r}]", expected, repr(dtype))
        known[name] = pa.list_(kind)
    return pa.schema(known.items())


def extra_fields(schema: pa.Schema) -> list[pa.Field]:
    """Return the columns of requested extras."""
    return list(schema)[len(_GROUP) + len(_EPISODE) + len(_TOKENS) + len(_LISTS) :]


#: Values of a part, their number for each episode, and which episodes have values (None: all).
Column = tuple[NDArray[Any] | None, NDArray[np.int64], NDArray[np.bool_] | None]


@dataclass(frozen=True)
class EpisodePart:
    """A part of a payload with episodes.

    Attributes:
        start: Position of its first episode.
        flat: The episodes.
        texts: Their texts.
    """

    start: int
    flat: FlatEpisodes
    texts: Sequence[str | None]

    @cached_property
    def metadata(self) -> list[str]:
        """Metadata of the episodes, as JSON."""
        return _metadata(self.flat.metadata)

    @cached_property
    def turn_metadata(self) -> list[str]:
        """Metadata of the turns, as JSON."""
        return [] if self.flat.turns is None else _metadata(self.flat.turns.metadata)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Size of the row of each episode, without the columns of the group. An upper bound."""
        flat = self.flat
        per_token = TOKEN_BYTES + _num_bytes(flat.token_extras) // max(1, flat.num_tokens)
        texts = zip(self.texts, self.metadata, strict=True)
        lengths = [len(text or "") + len(metadata) for text, metadata in texts]
        sizes = flat.lengths * per_token + np.array(lengths, np.int64) * CHARACTER_BYTES
        sizes += _num_bytes(flat.extras) // max(1, flat.num_episodes)
        for each in (flat.each_token_extras, flat.each_extras):
            for i, arrays in each.items():
                sizes[i] += _num_bytes(arrays)
        if flat.turns is not None:
            lengths = [len(metadata) for metadata in self.turn_metadata]
            before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            ends = np.cumsum(flat.turns.counts)
            sizes += (before[ends] - before[ends - flat.turns.counts]) * CHARACTER_BYTES
        return sizes

    def cut(self, begin: int, end: int) -> EpisodePart:
        """Return the episodes from index `begin` to `end`."""
        flat = flatten(self.flat.episodes()[begin:end])
        return EpisodePart(self.start + begin, flat, self.texts[begin:end])


@dataclass(frozen=True)
class DecodedGroup:
    """Rows of a decoded group.

    Attributes:
        facts: The row of the group.
        group: The group.
        parts: Its parts with episodes, or some of the episodes.
        is_first: Whether the rows include the first one of the group.
    """

    facts: Mapping[str, Any]
    group: StoredGroup
    parts: Sequence[EpisodePart]
    is_first: bool = True

    @classmethod
    def of(cls, facts: Mapping[str, Any], group: StoredGroup, numbers: Sequence[int]) -> Self:
        """Build it from the numbers of all its parts, in order."""
        texts = iter(group.texts)
        parts = [
            EpisodePart(start, flat, list(islice(texts, flat.num_episodes)))
            for start, flat in zip(numbers, group.parts, strict=True)
            if flat.num_episodes
        ]
        return cls(facts, group, parts)

    @cached_property
    def row(self) -> tuple[Any, ...]:
        """Values of the group columns."""
        prompt = self.group.prompt
        more = {
            "group_id": self.group.id,
            "tags": _to_json(self.group.tags),
            "prompt": None if prompt is None else _to_json(prompt),
        }
        return tuple([more[name] if name in more else self.facts[name] for name in _GROUP])

    @property
    def num_episodes(self) -> int:
        """Number of episodes in these rows."""
        return sum(part.flat.num_episodes for part in self.parts)

    @cached_property
    def num_bytes(self) -> int:
        """Size of these rows. An upper bound."""
        sizes = sum(int(part.sizes.sum()) for part in self.parts)
        return sizes + max(1, self.num_episodes) * self._num_shared + self._num_context

    @property
    def _num_shared(self) -> int:
        """Size of the columns that each row of the group has."""
        return CHARACTER_BYTES * sum(len(value) for value in self.row if isinstance(value, str))

    @property
    def _num_context(self) -> int:
        """Size of the columns that only the first row of the group has."""
        context = self.context
        ids = context.prompt_ids
        return _num_bytes(context.extras) + (0 if ids is None else ids.nbytes)

    @property
    def context(self) -> GroupContext:
        """Prompt ids and extras of the group, in its first row."""
        return self.group.context if self.is_first else GroupContext()

    def split(self) -> Iterator[DecodedGroup]:
        """Split these rows so that each result has at most `BATCH_BYTES`, or one row.

        Raises:
            NotSupportedError: A value is larger than a column can be.
        """
        if self.num_bytes <= BATCH_BYTES:
            yield self
            return
        for one in self._cut() if self.num_episodes > 1 else [self]:
            if one.num_bytes > MAX_COLUMN_BYTES:
                one._check_columns()
            yield one

    def _cut(self) -> Iterator[DecodedGroup]:
        is_first = self.is_first
        for part in self.parts:
            sizes = (part.sizes + self._num_shared).tolist()
            begin, total = 0, self._num_context if is_first else 0
            for i, size in enumerate([*sizes, BATCH_BYTES]):
                total += size
                if total > BATCH_BYTES and i > begin:
                    yield replace(self, parts=[part.cut(begin, i)], is_first=is_first)
                    begin, total, is_first = i, size, False

    def _check_columns(self) -> None:
        """Raise if a value of these rows, of one episode or none, exceeds the size of a column."""
        texts = {
            name: value for name, value in zip(_GROUP, self.row, strict=True)
            if isinstance(value, str)
        }  # fmt: skip
        sizes = {"group_extras": _num_bytes(self.context.extras)}
        where = f"group {self.group.id}"
        for part in self.parts:
            where += f", episode {part.start}"
            [episode] = part.flat.episodes(part.texts)
            texts |= {
                "text": escapes.escape(episode.text or ""),
                "metadata": part.metadata[0],
                "turns": "".join(part.turn_metadata),
            }
            sizes["token_extras"] = _num_bytes(episode.token_extras)
            sizes["extras"] = _num_bytes(episode.extras)
        sizes |= {name: len(text.encode()) for name, text in texts.items()}
        for name, size in sizes.items():
            if size > MAX_COLUMN_BYTES:
                raise NotSupportedError(
                    f"{where}: {name} has {size} bytes, and a column of an Arrow batch at most "
                    f"{MAX_COLUMN_BYTES}. Read this group with Buffer.get, and exclude it here."
                )


def in_batches(groups: Iterable[DecodedGroup]) -> Iterator[list[DecodedGroup]]:
    """Yield the rows of each batch.

    Raises:
        NotSupportedError: A value is larger than a column can be.
    """
    several: list[DecodedGroup] = []
    size = 0
    for group in groups:
        for one in group.split():
            if several and size + one.num_bytes > BATCH_BYTES:
                yield several
                several, size = [], 0
            several.append(one)
            size += one.num_bytes
    if several:
        yield several


def _num_bytes(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _to_json(value: Any) -> str:
    return escapes.to_json(value, ensure_ascii=False, separators=(",", ":"))


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
    episodes = _Episodes(flats)
    columns += [
        _arrays(episodes.of(lambda one: one.token_extras, "token_extras", "each_token_extras")),
        _arrays(episodes.of(lambda one: one.extras, "extras", "each_extras")),
        *_context_columns(groups, counts),
    ]
    columns += [_extra_column(episodes, field) for field in extra_fields(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def batch_of_empty(schema: pa.Schema, groups: Sequence[DecodedGroup]) -> pa.RecordBatch:
    """Return one row for each group; the groups have no episodes."""
    columns = dict(zip(_GROUP, _group_columns(groups), strict=True))
    context = _context_columns(groups, [1] * len(groups))
    columns |= dict(zip(("group_prompt_ids", "group_extras"), context, strict=True))
    arrays = [columns.get(one.name, pa.nulls(len(groups), one.type)) for one in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _group_columns(groups: Sequence[DecodedGroup]) -> list[pa.Array]:
    rows = zip(*(one.row for one in groups), strict=True)
    return [pa.array(column, kind) for column, kind in zip(rows, _GROUP.values(), strict=True)]


def _episode_columns(parts: Sequence[EpisodePart]) -> list[pa.Array]:
    flats = [part.flat for part in parts]
    positions = [np.arange(part.start, part.start + part.flat.num_episodes) for part in parts]
    turns = [
        np.ones(flat.num_episodes, np.int64) if flat.turns is None else flat.turns.counts.clip(1)
        for flat in flats
    ]
    columns = {
        "position": pa.array(np.concatenate(positions)),
        "reward": _floats([flat.rewards for flat in flats]),
        "advantage": _floats([flat.advantages for flat in flats]),
        "finish_reason": pa.array([one for flat in flats for one in flat.finish_reasons], _TEXT),
        "num_tokens": pa.array(np.concatenate([flat.lengths for flat in flats])),
        "num_loss_tokens": pa.array(np.concatenate([_loss_tokens(flat) for flat in flats])),
        "num_turns": pa.array(np.concatenate(turns)),
        "prompt_length": pa.array(np.concatenate([flat.prompt_lengths for flat in flats])),
        "policy_version": _versions([flat.versions for flat in flats]),
        "min_policy_version": _versions([flat.min_policy_versions for flat in flats]),
        "max_policy_version": _versions([flat.max_policy_versions for flat in flats]),
        "metadata": pa.array([one for part in parts for one in part.metadata], _TEXT),
        "text": pa.array(
            [
                None if text is None else escapes.escape(text)
                for part in parts
                for text in part.texts
            ],
            _TEXT,
        ),
    }
    return [columns[name] for name in _EPISODE]


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
    return [_list(columns[name], kind) for name, kind in _TOKENS.items()]


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
    offsets = np.zeros(sum(map(len, sizes)) + 1, np.int32)
    np.cumsum(np.concatenate(sizes), out=offsets[1:])
    joined = values[0] if len(values) == 1 else np.concatenate([np.empty(0, _dtype(kind)), *values])
    missing = ~np.concatenate(present)
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(joined, kind), mask=mask)


def _dtype(kind: pa.DataType) -> np.dtype[Any]:
    return _DTYPES[kind]


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
        "finish_reason": pa.array([one for part in known for one in part.finish_reasons], _TEXT),
        "metadata": pa.array([one for part in parts for one in part.turn_metadata], _TEXT),
        "token_extras": pa.array(
            [list(names) for part in known for names in part.token_extras], pa.list_(_TEXT)
        ),
    }
    for name in ("has_logprobs", "has_token_rewards"):
        columns[name] = pa.array(np.concatenate([getattr(part, name) for part in known]))
    structs = pa.StructArray.from_arrays([columns[one.name] for one in TURN], fields=list(TURN))
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    mask = pa.array(sizes == 0) if (sizes == 0).any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), structs, mask=mask)


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


def _metadata(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [_to_json(row) if row else "{}" for row in rows]


class _Episodes:
    """Episodes of parts, built only for parts whose episodes have extras."""

    def __init__(self, flats: Sequence[FlatEpisodes]) -> None:
        self.flats = flats
        self._made: dict[int, list[Episode]] = {}

    def of(
        self, extras: Callable[[Episode], Mapping[str, Array]], *fields: str
    ) -> list[Mapping[str, Array]]:
        """Return the extras of each episode; a part without any of `fields` has none."""
        found: list[Mapping[str, Array]] = []
        for i, flat in enumerate(self.flats):
            if any(getattr(flat, name) for name in fields):
                if i not in self._made:
                    self._made[i] = flat.episodes()
                found += map(extras, self._made[i])
            else:
                found += [{}] * flat.num_episodes
        return found


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


def _extra_column(episodes: _Episodes, field: pa.Field) -> pa.Array:
    """Return the column of one extra, of tokens or of episodes."""
    dtype = _dtype(field.type.value_type)
    rows = episodes.of(
        lambda one: one.token_extras | one.extras,
        "token_extras",
        "extras",
        "each_token_extras",
        "each_extras",
    )
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
