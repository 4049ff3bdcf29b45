"""Which turns of a trajectory continue each other: a forest, whose paths are the training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from replaydb.domain.episodes.prefixes import Node, PrefixTree
from replaydb.domain.episodes.segments import begins_with
from replaydb.domain.episodes.turns import Turn, parents_of

#: Number of branches with whose ends a context is compared first.
_MOST_COMPARED = 8


class Forest(NamedTuple):
    """How the turns of a trajectory continue each other, and which of them are trained on.

    A turn continues an earlier one if its context begins with all tokens of that turn. If it does
    with its parent (`Turn(parent=...)`), it continues this one. Otherwise it continues the longest
    such turn; of equal ones the last, but one that is trained on before one that is not. It does
    not continue a turn without a response that is not trained on, unless that is its parent.

    Attributes:
        continues: Index of the turn that each turn continues, -1 for none.
        is_trained: Whether each turn is trained on: neither it is discarded nor a turn above it, by
            parent or by continuation.
    """

    continues: tuple[int, ...]
    is_trained: tuple[bool, ...]

    @property
    def ends(self) -> list[int]:
        """Indices of the last turns of the paths of the turns that are trained on."""
        trained = [i for i, is_trained in enumerate(self.is_trained) if is_trained]
        inner = {self.continues[i] for i in trained}
        return [i for i in trained if i not in inner]


class Path(NamedTuple):
    """The turns of a training row: each one continues the one before.

    Attributes:
        turns: Their indices.
        num_shared: How many of the first of them are also in an earlier path, which has their loss.
    """

    turns: list[int]
    num_shared: int


def paths_of(continues: Sequence[int], is_trained: Sequence[bool]) -> list[Path]:
    """Return the paths from roots to leaves of a forest of the turns that are trained on.

    They are in the order of the first turns that no earlier path has. A path goes on with the first
    turn that continues its last one; others begin a path.
    """
    found: list[Path] = []
    open_paths: dict[int, list[int]] = {}  # by their last turn
    for i, above in enumerate(continues):
        if not is_trained[i]:
            continue
        path = open_paths.pop(above, None)
        if path is None:
            path = []
            while above >= 0:
                path.append(above)
                above = continues[above]
            path.reverse()
            found.append(Path(path, len(path)))
        path.append(i)
        open_paths[i] = path
    return found


def forest_of(turns: Sequence[Turn]) -> Forest:
    """Return the forest of the turns of a trajectory. Takes time linear in their tokens."""
    parents = parents_of(turns)
    if _is_chain(turns, parents):  # most are
        is_last_trained = not turns[-1].is_discarded
        return Forest(
            tuple(range(-1, len(turns) - 1)), (*[True] * (len(turns) - 1), is_last_trained)
        )
    tree = PrefixTree()
    nodes: list[Node] = []  # at whose end each turn ends
    last: dict[Node, int] = {}  # the turn that others can continue, of those that end at a node
    continues: list[int] = []
    is_trained: list[bool] = []
    ends: dict[int, None] = {}  # of the branches so far, the newest last
    for i, (turn, named) in enumerate(zip(turns, parents, strict=True)):
        segment = turn.segment
        after = None
        if segment.parent is None:
            # Comparing with whole turns is faster than going from node to node.
            few = islice(reversed(ends), _MOST_COMPARED)
            alike = [nodes[j] for j in few if begins_with(segment, turns[j].segment)]
            after = max(alike, key=attrgetter("end"), default=None)
        node, _ = tree.add(segment, after)
        above = _longest(node.above(segment.prompt_length), segment.prompt_length, last)
        if named >= 0 and nodes[named].end <= segment.prompt_length:
            above = named if node.above(nodes[named].end) is nodes[named] else above
        trained = not turn.is_discarded and all(is_trained[j] for j in (named, above) if j >= 0)
        continues.append(above)
        is_trained.append(trained)
        nodes.append(node)
        ends.pop(above, None)
        ends[i] = None
        if trained or (
            segment.prompt_length < segment.length and not is_trained[last.get(node, i)]
        ):
            last[node] = i
    return Forest(tuple(continues), tuple(is_trained))


def _is_chain(turns: Sequence[Turn], parents: Sequence[int]) -> bool:
    """Whether each turn continues the one before, which is trained on."""
    return all(
        parents[i] in (-1, i - 1)
        and not turns[i - 1].is_discarded
        and begins_with(turns[i].segment, turns[i - 1].segment)
        for i in range(1, len(turns))
    )


def _longest(node: Node, limit: int, last: Mapping[Node, int]) -> int:
    """Return the turn that ends at a node or above it, before a position; -1 for none."""
    found = (last[one] for one in node.lineage if one.end <= limit and one in last)
    return next(found, -1)
