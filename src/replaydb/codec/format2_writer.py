"""Writer of payload format 2: each token of a group once, in columns that can be read alone.

`docs/payload.md` describes it. A payload has a core part, and a part for each large extra.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb.codec.framing import Joined, Tensor
from replaydb.codec.sections import EPISODE, GROUP, JOINT
from replaydb.codec.sharing import Share, bytes_of_shared, joint_bytes_of_shared, shares
from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.episodes.arrays import Array, bits, dtype_name, from_bits
from replaydb.domain.episodes.building import mask_column, version_column
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.flat import NO_VERSION
from replaydb.domain.episodes.ragged import Ragged, Values
from replaydb.domain.episodes.segments import (
    EXTRA,
    LOSS_MASK,
    TOKEN_IDS,
    TOKEN_VERSIONS,
    Column,
    Segment,
    column_of,
)
from replaydb.domain.episodes.turns import parents_of
from replaydb.util import escapes

#: An extra of more bytes than both, for each value and in total, is in a part of its own.
LIGHT_BYTES_PER_TOKEN, LIGHT_BYTES = 8, 64 << 10
#: Up to this size it is faster to join arrays before they are written, and not while they are.
JOINED_BYTES = 1 << 20

Tensors = dict[str, Tensor]


class Parts(NamedTuple):
    """What a payload is written from.

    Attributes:
        tensors: The tensors of each part: None, the core, and heavy extras by name.
        repeated: Of token extras, the bytes of values that a segment has itself for tokens that it
            shares with its parent. Without those of which there are none.
    """

    tensors: dict[str | None, Tensors]
    repeated: Mapping[str, int]


def parts_of(episodes: Sequence[Episode], context: GroupContext) -> Parts:
    """Return the parts of a payload."""
    segments = [segment for episode in episodes for segment in episode.segments]
    several = shares(episodes)
    core = _structure(segments, several)
    parts: dict[str | None, Tensors] = {None: core}
    repeated = _repeated_jointly(episodes, several)
    for name in dict.fromkeys(name for one in segments for name in one.columns):
        entries = [] if name == TOKEN_IDS else _entries(name, segments, several)
        count = sum(len(entry.values) for entry in entries)
        _add(parts, name, _columns(name, entries, len(segments)), count)
        if name.startswith(EXTRA):
            repeated[name.removeprefix(EXTRA)] += _repeated(name, entries, segments, several)
    for name, rows in _extras(episodes).items():
        count = sum(len(array) for _, array in rows) if name.startswith(JOINT) else len(rows)
        _add(parts, name, _stacked(name, rows, len(episodes)), count)
    for name, array in context.extras.items():
        section = GROUP + name
        _add(parts, section, [(section, {section: array})], 1)
    core |= _of_episodes(episodes, context, [name for name in parts if name is not None])
    return Parts(parts, +repeated)


#: Index of the parent of a segment that is in another part.
ELSEWHERE = -2


def tensors_of_turn(turn: Turn, follows: str | None, begins_with: str | None) -> Tensors:
    """Return the tensors of a part with one turn, whose parents are in other parts.

    Args:
        turn: The turn.
        follows: Uid of the turn that it follows.
        begins_with: Uid of the turn that has the last of the tokens that it shares.
    """
    segment = turn.segment
    share = Share() if begins_with is None else Share(ELSEWHERE, segment.shared)
    tensors = _structure([segment], [share])
    for name in segment.columns:
        entries = [] if name == TOKEN_IDS else _entries(name, [segment], [share])
        for _, column in _columns(name, entries, 1):
            tensors |= column
    names = {"follows": follows, "begins_with": begins_with}
    facts = {name: uid for name, uid in names.items() if uid is not None}
    return tensors | _of_turns([turn]) | _json(_texts_of_turns([turn]), facts)


def _add(
    parts: dict[str | None, Tensors],
    name: str,
    variants: Iterable[tuple[str, Tensors]],
    count: int,
) -> None:
    """Add a column of `count` values to the core, or to a part of its own.

    One variant can continue values of another one, so all of them are in the same part.
    """
    found = list(variants)
    size = sum(tensors[stored].nbytes for stored, tensors in found)
    heavy = size > LIGHT_BYTES and size > LIGHT_BYTES_PER_TOKEN * count
    for _, tensors in found:
        parts.setdefault(name.partition("/")[2] if heavy else None, {}).update(tensors)


def _structure(segments: Sequence[Segment], several: Sequence[Share]) -> Tensors:
    rows = [
        (
            share.parent,
            share.shared,
            one.prompt_length - share.shared,
            one.length - one.prompt_length,
        )
        for one, share in zip(segments, several, strict=True)
    ]
    own = [
        one.tokens(share.shared, one.length) for one, share in zip(segments, several, strict=True)
    ]
    return {
        "segments": np.array(rows, np.int64).reshape(-1, 4),
        TOKEN_IDS: _joined(own) if own else np.empty(0, np.int32),
    }


class _Entry(NamedTuple):
    """Values of a column of one segment.

    Attributes:
        segment: Index of the segment.
        begin: Number of tokens that have the values of the parent. None: only the response has
            values, and the context has the value 0 (of versions: the lowest of the response).
        values: The values of the other tokens, or of the response.
        missing: Number of last tokens without a value, 0 or 1.
    """

    segment: int
    begin: int | None
    values: Values
    missing: int


def _entries(name: str, segments: Sequence[Segment], several: Sequence[Share]) -> list[_Entry]:
    """Return the values of a column, of the segments that have it."""
    found = [
        _entry(i, one, name, _parent(one, share, segments))
        for i, (one, share) in enumerate(zip(segments, several, strict=True))
        if name in one.columns
    ]
    return [entry for entry in found if entry is not None]


def _repeated(
    name: str, entries: Iterable[_Entry], segments: Sequence[Segment], several: Sequence[Share]
) -> int:
    """Return the bytes of values for tokens of which the parent has other values."""
    return sum(
        bytes_of_shared(name, segments[share.parent], share.shared, entry.begin, entry.values)
        for entry in entries
        if entry.begin is not None and (share := several[entry.segment]).parent >= 0
    )


def _repeated_jointly(episodes: Sequence[Episode], several: Sequence[Share]) -> Counter[str]:
    """Return the bytes of values of shared tokens in arrays over the tokens of all turns."""
    found: Counter[str] = Counter()
    if not any([episode.joint_extras for episode in episodes]):
        return found
    first = 0
    for episode in episodes:
        last = first + len(episode.segments)
        found += joint_bytes_of_shared(episode, [one.shared for one in several[first:last]])
        first = last
    return found


def _parent(one: Segment, share: Share, segments: Sequence[Segment]) -> Segment | None:
    """Return the segment with whose tokens one begins."""
    if share.parent == ELSEWHERE:
        return one.parent
    return segments[share.parent] if share.parent >= 0 else None


def _entry(i: int, one: Segment, name: str, parent: Segment | None) -> _Entry | None:
    column = one.columns[name]
    if not _covers_response(column, one):
        if column.inherits and one.parent is not None and parent is one.parent:
            return _Entry(i, column.begin, column.pieces[0][1], one.length - column.end)
        if name == TOKEN_VERSIONS:
            column = version_column(one.versions(0, one.length), one.prompt_length)
        else:
            known = None if name == LOSS_MASK else parent
            values = one.values(name, 0, column.end)
            column = column_of(values, one.length, one.prompt_length, name, known)
    values = column.pieces[0][1]
    if not _covers_response(column, one):
        return _Entry(i, column.begin, values, one.length - column.end)
    if name == LOSS_MASK and mask_column(values, one.length, one.prompt_length) is None:  # type: ignore[arg-type]
        return None
    return _Entry(i, None, values, 0)


def _covers_response(column: Column, one: Segment) -> bool:
    """Whether exactly the tokens of the response have values."""
    [(at, values), *others] = column.pieces
    whole = at == one.prompt_length and at + len(values) == one.length == column.end
    return whole and not others and not column.inherits


def _columns(
    name: str, entries: Iterable[_Entry], num_segments: int
) -> Iterator[tuple[str, Tensors]]:
    """Yield the tensors of a column, once for each dtype, shape and coverage of its values."""
    kinds: dict[tuple[Any, ...], list[_Entry]] = {}
    for entry in entries:
        kind = (entry.begin is None, dtype_name(entry.values), *entry.values.shape[1:])
        kinds.setdefault(kind, []).append(entry)
    for number, mine in enumerate(kinds.values()):
        stored = _variant(name, number)
        several = [entry.values for entry in mine]
        if name == LOSS_MASK:
            several = [np.packbits(np.concatenate(several))]
        tensors = _tensors(stored, several)
        if len(mine) < num_segments:
            tensors["rows/" + stored] = _integers([entry.segment for entry in mine])
        if mine[0].begin is not None:
            tensors["begins/" + stored] = _integers([entry.begin or 0 for entry in mine])
            if any(entry.missing for entry in mine):
                tensors["missing/" + stored] = _integers([entry.missing for entry in mine])
        yield stored, tensors


def _extras(episodes: Sequence[Episode]) -> dict[str, list[tuple[int, Values]]]:
    """Return the extras of episodes, and arrays of the tokens of their turns, by section."""
    found: dict[str, list[tuple[int, Values]]] = {}
    for i, episode in enumerate(episodes):
        joint: dict[str, Values] = dict(episode.joint_extras)
        if isinstance(episode.version, np.ndarray):
            joint["policy_version"] = episode.version
        for prefix, arrays in ((EPISODE, episode.extras), (JOINT, joint)):
            for name, array in arrays.items():
                found.setdefault(prefix + name, []).append((i, array))
    return found


def _stacked(
    name: str, rows: Sequence[tuple[int, Values]], num_episodes: int
) -> Iterator[tuple[str, Tensors]]:
    """Yield the tensors of an extra of episodes, once for each dtype and shape."""
    kinds: dict[tuple[Any, ...], list[tuple[int, Values]]] = {}
    for row in rows:
        kinds.setdefault((dtype_name(row[1]), *row[1].shape), []).append(row)
    for number, mine in enumerate(kinds.values()):
        stored = _variant(name, number)
        several = [one if isinstance(one, Ragged) else one[None] for _, one in mine]
        tensors = _tensors(stored, several)
        if len(mine) < num_episodes:
            tensors["rows/" + stored] = _integers([i for i, _ in mine])
        yield stored, tensors


def _of_episodes(
    episodes: Sequence[Episode], context: GroupContext, large_extras: Sequence[str]
) -> Tensors:
    """Return the values of episodes and of their turns, as far as there are any."""
    turns = [turn for episode in episodes for turn in episode.turns]
    tensors = _numbers(
        {
            "rewards": [one.reward for one in episodes],
            "advantages": [one.advantage for one in episodes],
            "versions": [one.version for one in episodes],
        }
    )
    if turns:
        tensors["turns"] = _integers([len(one.turns) for one in episodes])
        parents = [parent for episode in episodes for parent in parents_of(episode.turns)]
        if any(parent >= 0 for parent in parents):
            tensors["turn/parents"] = _integers(parents)
        tensors |= _of_turns(turns)
    if context.prompt_ids is not None:
        tensors["prompt_ids"] = context.prompt_ids
    texts: dict[str, list[Any]] = {
        "finish_reasons": [one.finish_reason for one in episodes],
        "metadata": [one.metadata for one in episodes],
    }
    facts: dict[str, Any] = {} if context.prompt is None else {"prompt": context.prompt}
    facts |= {"large_extras": sorted(large_extras)} if large_extras else {}
    return tensors | _json(texts | _texts_of_turns(turns), facts)


def _of_turns(turns: Sequence[Turn]) -> Tensors:
    """Return the values of turns, as far as there are any."""
    tensors = _numbers(
        {
            "turn/rewards": [one.reward for one in turns],
            "turn/versions": [one.version for one in turns],
        }
    )
    if any(one.is_discarded for one in turns):
        tensors["turn/discarded"] = np.array([one.is_discarded for one in turns])
    return tensors


def _texts_of_turns(turns: Sequence[Turn]) -> dict[str, list[Any]]:
    return {
        "turn_finish_reasons": [one.finish_reason for one in turns],
        "turn_metadata": [one.metadata for one in turns],
        "turn_uids": [one.uid for one in turns],
        "turn_agents": [one.agent for one in turns],
        "turn_states": [one.state for one in turns],
    }


def _numbers(columns: Mapping[str, Sequence[Any]]) -> Tensors:
    """Return the tensors of rewards and versions, without those that have no values."""
    tensors: Tensors = {}
    for name, values in columns.items():
        if name.endswith("versions"):
            known = [value if isinstance(value, int) else NO_VERSION for value in values]
            if known != [NO_VERSION] * len(known):
                tensors[name] = np.array(known, np.int64)
        elif any(value is not None for value in values):
            tensors[name] = np.array(values, np.float64)  # None becomes NaN
    return tensors


def _json(texts: Mapping[str, Sequence[Any]], facts: Mapping[str, Any]) -> Tensors:
    """Return the tensor with the JSON object, if it is not empty."""
    found = {
        name: values
        for name, values in texts.items()
        if any(value is not None and value != {} for value in values)
    }
    if not found and not facts:
        return {}
    text = escapes.to_json({**found, **facts}, separators=(",", ":"))
    return {"json": np.frombuffer(text.encode(), np.uint8)}


def _tensors(stored: str, several: Sequence[Values]) -> Tensors:
    """Return the tensors of the values of a column."""
    ragged = [one for one in several if isinstance(one, Ragged)]
    if not ragged:
        return {stored: _joined(several)}  # type: ignore[arg-type]
    return {
        stored: _joined([one.values for one in ragged]),
        "counts/" + stored: _joined([one.counts for one in ragged]),
    }


def _variant(name: str, number: int) -> str:
    return name if not number else f"~{number}/{name}"


def _integers(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def _joined(arrays: Sequence[Array]) -> Tensor:
    if sum(array.nbytes for array in arrays) > JOINED_BYTES:
        return Joined(arrays)
    return from_bits(np.concatenate([bits(one) for one in arrays]), dtype_name(arrays[0]))
