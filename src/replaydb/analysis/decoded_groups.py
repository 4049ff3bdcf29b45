"""Decoded groups, and their division into batches of limited size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from replaydb.analysis.episode_columns import GROUP
from replaydb.batch.stored import StoredGroup
from replaydb.domain.episodes import Episode
from replaydb.domain.episodes.arrays import Array
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.flat import FlatEpisodes, flatten
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
class EpisodePart:
    """Some episodes of a group.

    Attributes:
        positions: Their positions.
        episodes: The episodes.
    """

    positions: Sequence[int]
    episodes: Sequence[Episode]

    @cached_property
    def flat(self) -> FlatEpisodes:
        """Their columns."""
        return flatten(self.episodes)

    @property
    def texts(self) -> list[str | None]:
        """Their texts."""
        return [episode.text for episode in self.episodes]

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
        return EpisodePart(self.positions[begin:end], self.episodes[begin:end])


@dataclass(frozen=True)
class DecodedGroup:
    """Rows of a decoded group.

    Attributes:
        facts: The row of the group.
        group: The group.
        parts: Its episodes, or some of them; empty if there are none.
        is_first: Whether the rows include the first one of the group.
    """

    facts: Mapping[str, Any]
    group: StoredGroup
    parts: Sequence[EpisodePart]
    is_first: bool = True

    @classmethod
    def of(cls, facts: Mapping[str, Any], group: StoredGroup) -> Self:
        """Return all rows of a group."""
        parts = [EpisodePart(group.positions, group.episodes)] if group.episodes else []
        return cls(facts, group, parts)

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

    @property
    def num_episodes(self) -> int:
        """Number of episodes in these rows."""
        return sum(len(part.episodes) for part in self.parts)

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
            sizes = part.sizes + self._num_shared
            sizes[0] += self._num_context if is_first else 0
            for rows in chunks(range(len(sizes)), sizes.tolist().__getitem__, BATCH_BYTES):
                some = part.cut(rows[0], rows[-1] + 1)
                yield replace(self, parts=[some], is_first=is_first)
                is_first = False

    def _check_columns(self) -> None:
        """Raise if a value of these rows, of one episode or none, exceeds the size of a column."""
        texts = {
            name: value for name, value in zip(GROUP, self.row, strict=True)
            if isinstance(value, str)
        }  # fmt: skip
        sizes = {"group_extras": _num_bytes(self.context.extras)}
        where = f"group {self.group.id}"
        for part in self.parts:
            where += f", episode {part.positions[0]}"
            [episode] = part.episodes
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
    """Return the rows of each batch.

    Raises:
        NotSupportedError: A value is larger than a column can be.
    """
    rows = (one for group in groups for one in group.split())
    return chunks(rows, lambda one: one.num_bytes, BATCH_BYTES)


def _num_bytes(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _to_json(value: Any) -> str:
    return escapes.to_json(value, ensure_ascii=False, separators=(",", ":"))


def _metadata(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [_to_json(row) if row else "{}" for row in rows]
