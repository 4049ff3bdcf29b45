"""Which tokens of a segment are those of another segment of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replaydb.domain.episodes import Episode
from replaydb.domain.episodes.prefixes import Node, PrefixTree
from replaydb.domain.episodes.ragged import Values
from replaydb.domain.episodes.segments import EXTRA, Segment

#: Shorter prefixes are not shared. A segment that shares none is read without a copy.
LEAST_SHARED = 32
#: Factors of 8 consecutive tokens in a hash, by which `repetition` recognizes tokens.
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, i, 2**64) for i in range(1, 9)], np.uint64)
#: Number of hashes that are computed together.
_BLOCK = 1 << 16


class Share(NamedTuple):
    """The beginning of a segment.

    Attributes:
        parent: Index of the segment that has these tokens, -1 for none.
        shared: Number of tokens.
    """

    parent: int = -1
    shared: int = 0


def shares(episodes: Sequence[Episode]) -> list[Share]:
    """Return for each segment of some episodes, in order, with which one before it begins equally.

    That is the first one that has the last of these tokens itself.
    """
    tree = PrefixTree()
    index: dict[int, int] = {}
    nodes: list[Node] = []
    found: list[Share] = []
    for episode in episodes:
        first = len(nodes)
        for segment, above in zip(episode.segments, episode.forest.continues, strict=True):
            node, matched = tree.add(segment, nodes[first + above] if above >= 0 else None)
            shared = min(matched, segment.prompt_length)
            best = Share()
            if shared >= LEAST_SHARED:
                best = Share(index[id(node.above(shared).segment)], shared)
            found.append(best)
            index.setdefault(id(segment), len(nodes))
            nodes.append(node)
    return found


def repetition(episodes: Sequence[Episode]) -> float:
    """Return how often a token is stored on average, 1.0 if each one is stored once.

    Tokens are stored again if they do not follow the same tokens from the beginning. Here they are
    recognized by the tokens right before them.
    """
    segments = [segment for episode in episodes for segment in episode.segments]
    runs = [
        segment.tokens(max(share.shared - len(_FACTORS) + 1, 0), segment.length)
        for segment, share in zip(segments, shares(episodes), strict=True)
    ]
    sizes = [max(len(run) - len(_FACTORS) + 1, 0) for run in runs]
    hashes = np.zeros(sum(sizes), np.uint64)
    end = 0
    for run, size in zip(runs, sizes, strict=True):
        begin, end = end, end + size
        _add_hashes(run, hashes[begin:end])
    hashes.sort()
    distinct = np.count_nonzero(hashes[1:] != hashes[:-1]) + 1
    return len(hashes) / distinct if len(hashes) else 1.0


def _add_hashes(tokens: NDArray[np.int32], hashes: NDArray[np.uint64]) -> None:
    """Add a hash of each token and those right after it to zeros, some at a time."""
    for begin in range(0, len(hashes), _BLOCK):
        target = hashes[begin : begin + _BLOCK]
        block = tokens[begin : begin + len(target) + len(_FACTORS)].astype(np.uint64)
        for i, factor in enumerate(_FACTORS):
            target += block[i : i + len(target)] * factor


def repeated_bytes(episodes: Iterable[Episode]) -> dict[str, int]:
    """Return the bytes of token extras, by name, of tokens that segments share with their parents.

    A shared token has one value of an extra if the values of both segments are equal. Otherwise
    each segment has its own. Extras without such values are left out. The episodes are those of a
    payload: before they are written, it is unknown which tokens their segments share.
    """
    found: Counter[str] = Counter()
    for episode in episodes:
        for segment in episode.segments:
            for name, column in segment.columns.items():
                if segment.parent is not None and name.startswith(EXTRA):
                    at, values = column.pieces[0]
                    size = bytes_of_shared(name, segment.parent, segment.shared, at, values)
                    found[name.removeprefix(EXTRA)] += size
        found += joint_bytes_of_shared(episode, [one.shared for one in episode.segments])
    return dict(+found)


def bytes_of_shared(name: str, parent: Segment, shared: int, at: int, values: Values) -> int:
    """Return the bytes of an extra of a segment for tokens of which its parent has values, too.

    Args:
        name: Name of the column.
        parent: The parent of the segment.
        shared: Number of tokens that the segment shares with it.
        at: The first token of the segment that has a value of its own.
        values: Its values of this token and those after it.
    """
    theirs = parent.columns.get(name)
    known = 0 if theirs is None else min(shared, theirs.end)
    return int(values[: known - at].nbytes) if at < known else 0


def joint_bytes_of_shared(episode: Episode, shared: Sequence[int]) -> Mapping[str, int]:
    """Return the bytes of arrays over the tokens of all turns for those that turns share.

    `shared`: the number of tokens that each turn shares with another one.
    """
    found: Counter[str] = Counter()
    for name, values in episode.joint_extras.items():
        start = 0
        for segment, count in zip(episode.segments, shared, strict=True):
            found[name] += int(values[start : start + count].nbytes) if count else 0
            start += segment.length
    return found
