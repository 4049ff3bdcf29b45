"""Decoded groups, and their division into batches of limited size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from replaydb.analysis.episode_columns import GROUP
from replaydb.batch.stored import StoredGroup
from replaydb.domain.episodes import Episode
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.ragged import Values, is_zero
from replaydb.domain.episodes.segments import EXTRA, common_prefix, own_memory
from replaydb.domain.episodes.unrepeated import Unrepeated
from replaydb.errors import NotSupportedError
from replaydb.util import escapes
from replaydb.util.chunks import chunks

#: Approximate size of the rows of a batch; a single row may be larger.
BATCH_BYTES = 64 << 20
#: Maximum size of a column of a batch: its offsets have 32 bits.
MAX_COLUMN_BYTES = 2**31 - 1
#: Size of a token: id, mask, logprob, version and reward; and maximum size of a character.
TOKEN_BYTES, CHARACTER_BYTES = 17, 4


@dataclass(frozen=True)
class EpisodeRow:
    """An episode of a group.

    Attributes:
        position: Its position.
        episode: The episode.
    """

    position: int
    episode: Episode

    @cached_property
    def tokens(self) -> Unrepeated:
        """Its tokens."""
        return Unrepeated(self.episode)

    @cached_property
    def metadata(self) -> str:
        """Its metadata, as JSON."""
        return _metadata(self.episode.metadata)

    @cached_property
    def turn_metadata(self) -> list[str]:
        """Metadata of its turns, as JSON."""
        return [_metadata(turn.metadata) for turn in self.episode.turns]

    @property
    def turn_states(self) -> list[str]:
        """References to states of the environment, "" for turns without one."""
        return [turn.state or "" for turn in self.episode.turns]

    @cached_property
    def context_extras(self) -> list[dict[str, Values]]:
        """For each turn, the values of extras for tokens that it has from its parent.

        The first of these tokens have the values of the parent, the others those of the array, as
        far as the extra covers them. An extra without an array has the value 0 there.
        """
        return [_context_extras(self.tokens, i) for i in range(len(self.episode.turns))]

    @cached_property
    def num_bytes(self) -> int:
        """Size of the row, without the columns of the group. An upper bound."""
        texts = [self.episode.text or "", self.metadata, *self.turn_metadata, *self.turn_states]
        size = self.tokens.num_tokens * TOKEN_BYTES + self.tokens.extra_bytes
        size += CHARACTER_BYTES * sum(map(len, texts)) + _num_bytes(self.episode.extras)
        return size + sum(map(_num_bytes, self.context_extras))


@dataclass(frozen=True)
class DecodedGroup:
    """Rows of a decoded group.

    Attributes:
        facts: The row of the group.
        group: The group.
        rows: Its episodes, or some of them; empty if there are none.
        is_first: Whether the rows include the first one of the group.
    """

    facts: Mapping[str, Any]
    group: StoredGroup
    rows: Sequence[EpisodeRow]
    is_first: bool = True

    @classmethod
    def of(cls, facts: Mapping[str, Any], group: StoredGroup) -> Self:
        """Return all rows of a group."""
        return cls(facts, group, list(map(EpisodeRow, group.positions, group.episodes)))

    @cached_property
    def row(self) -> tuple[Any, ...]:
        """Values of the group columns."""
        prompt = self.group.prompt
        more = {
            "group_id": self.group.id,
            "tags": json.dumps(self.group.tags, ensure_ascii=False, separators=(",", ":")),
            "prompt": None if prompt is None else _to_json(prompt),
        }
        return tuple([more[name] if name in more else self.facts[name] for name in GROUP])

    @cached_property
    def num_bytes(self) -> int:
        """Size of these rows. An upper bound."""
        sizes = sum(row.num_bytes for row in self.rows)
        return sizes + max(1, len(self.rows)) * self._num_shared + self._num_context

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
        for one in self._cut() if len(self.rows) > 1 else [self]:
            if one.num_bytes > MAX_COLUMN_BYTES:
                one._check_columns()
            yield one

    def _cut(self) -> Iterator[DecodedGroup]:
        sizes = [row.num_bytes + self._num_shared for row in self.rows]
        sizes[0] += self._num_context if self.is_first else 0
        for some in chunks(range(len(sizes)), sizes.__getitem__, BATCH_BYTES):
            rows = self.rows[some[0] : some[-1] + 1]
            yield replace(self, rows=rows, is_first=self.is_first and not some[0])

    def _check_columns(self) -> None:
        """Raise if a value of these rows, of one episode or none, exceeds the size of a column."""
        texts = {
            name: value for name, value in zip(GROUP, self.row, strict=True)
            if isinstance(value, str)
        }  # fmt: skip
        sizes = {"group_extras": _num_bytes(self.context.extras)}
        where = f"group {self.group.id}"
        for row in self.rows:
            where += f", episode {row.position}"
            texts |= {
                "text": escapes.escape(row.episode.text or ""),
                "metadata": row.metadata,
                "turns": "".join(row.turn_metadata),
                "turns.state": "".join(row.turn_states),
            }
            sizes["token_extras"] = row.tokens.extra_bytes
            sizes["turns.context_extras"] = sum(map(_num_bytes, row.context_extras))
            sizes["extras"] = _num_bytes(row.episode.extras)
        sizes |= {name: len(text.encode()) for name, text in texts.items()}
        for name, size in sizes.items():
            if size > MAX_COLUMN_BYTES:
                raise NotSupportedError(
                    f"{where}: {name} has {size} bytes, and a column of an Arrow batch at most "
                    f"{MAX_COLUMN_BYTES}. Read this group with Buffer.get, and exclude it here."
                )


def in_batches(groups: Iterable[DecodedGroup]) -> Iterator[list[DecodedGroup]]:
    """Return the rows of each batch.

    Raises:
        NotSupportedError: A value is larger than a column can be.
    """
    rows = (one for group in groups for one in group.split())
    return chunks(rows, lambda one: one.num_bytes, BATCH_BYTES)


def _num_bytes(arrays: Mapping[str, Values]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _to_json(value: Any) -> str:
    return escapes.to_json(value, ensure_ascii=False, separators=(",", ":"))


def _metadata(value: dict[str, Any]) -> str:
    return _to_json(value) if value else "{}"


def _context_extras(tokens: Unrepeated, i: int) -> dict[str, Values]:
    """Return an array for each extra of a turn that is not 0 on the tokens from the parent."""
    if not tokens.shared[i]:
        return {}
    own, theirs = tokens.segments[i], tokens.segments[tokens.parents[i]]
    found: dict[str, Values] = {}
    for name, column in own.columns.items():
        end = min(column.end, tokens.shared[i])
        if not name.startswith(EXTRA) or (column.begin >= end and not column.inherits):
            continue
        rest: Values | None
        if column.inherits and own.parent is theirs:
            rest = own.values(name, min(column.begin, end), end)
        else:
            known = min(end, theirs.columns[name].end) if name in theirs.columns else 0
            before = theirs.values(name, 0, known) if known else None
            rest = _beyond(own.values(name, 0, end), before)
        if rest is not None:
            found[name.removeprefix(EXTRA)] = rest
    joint = tokens.episode.joint_extras
    if isinstance(tokens.episode.version, np.ndarray):
        joint = joint | {"policy_version": tokens.episode.version}
    for name, values in joint.items():
        one, other = (tokens.joint(values, j, 0, tokens.shared[i]) for j in (i, tokens.parents[i]))
        if (rest := _beyond(one, other)) is not None:
            found[name] = rest
    return found


def _beyond(values: Values, before: Values | None) -> Values | None:
    """Return the values after those that are the parent's; None if all are 0."""
    if is_zero(values):
        return None
    same = 0 if before is None else common_prefix(values, before, min(len(values), len(before)))
    return own_memory(values[same:])
