"""A radix tree of the tokens of segments: which of them begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

from replaydb.domain.episodes.segments import Segment


class Node:
    """Consecutive tokens, which follow those of the parent.

    Attributes:
        segment: The first segment that has these tokens; None in the root, which has none.
        begin: Position of the first token in the segment.
        end: Position after the last token.
        parent: The node with the tokens before; None in the root.
        children: The nodes with the tokens after, by their first token.
    """

    __slots__ = ("begin", "children", "end", "parent", "segment")

    def __init__(self, segment: Segment | None, begin: int, end: int, parent: Node | None) -> None:
        self.segment = segment
        self.begin = begin
        self.end = end
        self.parent = parent
        self.children: dict[int, Node] = {}

    @property
    def lineage(self) -> Iterator[Node]:
        """The node and those above it, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def above(self, position: int) -> Node:
        """Return the node of this lineage that has the token before a position, or the root."""
        node = self
        while node.parent is not None and node.begin >= position:
            node = node.parent
        return node


class PrefixTree:
    """Tokens of segments, each prefix once. Every segment ends at the end of a node.

    Adding a segment takes time linear in its tokens, without those that it is known to share.
    """

    def __init__(self) -> None:
        self.root = Node(None, 0, 0, None)
        # For segments, and those that they have tokens of: a node, and how many of the tokens that
        # lead there are the first ones of the segment.
        self._known: dict[int, tuple[Node, int]] = {}
        self._added: list[Segment] = []  # which keeps the ids of segments

    def add(self, segment: Segment, after: Node | None = None) -> tuple[Node, int]:
        """Add a segment.

        Args:
            segment: The segment.
            after: The end of a segment with all of whose tokens it is known to begin.

        Returns:
            The node at whose end it ends, and how many of its tokens were in the tree before.
        """
        node, matched = self._known_prefix(segment)
        if after is not None and after.end > matched:
            node, matched = after, after.end
        node, matched = _descend(segment, node, matched)
        if matched < node.end:
            node = _split(node, matched)
        if matched < segment.length:
            first = int(segment.tokens(matched, matched + 1)[0])
            node.children[first] = node = Node(segment, matched, segment.length, node)
        self._register(segment, node)
        return node, matched

    def _known_prefix(self, segment: Segment) -> tuple[Node, int]:
        """Return a node and the number of tokens until there that are those of a segment."""
        one: Segment | None = segment
        shared = segment.length
        while one is not None:
            if (known := self._known.get(id(one))) is not None:
                shared = min(shared, known[1])
                return known[0].above(shared), shared
            shared = min(shared, one.shared)
            one = one.parent
        return self.root, 0

    def _register(self, segment: Segment, node: Node) -> None:
        self._added.append(segment)
        one: Segment | None = segment
        shared = segment.length
        while one is not None and self._known.get(id(one), (node, -1))[1] < shared:
            self._known[id(one)] = node, shared
            shared = min(shared, one.shared)
            one = one.parent


def _descend(segment: Segment, node: Node, matched: int) -> tuple[Node, int]:
    """Follow the tokens of a segment from a node on, as far as they are in the tree."""
    own = segment.tokens(matched, segment.length)
    at = 0
    while True:
        if node.segment is not None and matched + at < node.end:
            theirs = node.segment.tokens(matched + at, node.end)[: len(own) - at]
            differ = theirs != own[at : at + len(theirs)]
            first = int(differ.argmax()) if len(differ) else 0
            at += first if len(differ) and differ[first] else len(theirs)
        if matched + at < node.end or at == len(own):
            return node, matched + at
        child = node.children.get(int(own[at]))
        if child is None:
            return node, matched + at
        node = child


def _split(node: Node, position: int) -> Node:
    """Divide a node in two. It keeps its last tokens; return a new one with the first."""
    assert node.segment is not None and node.parent is not None  # noqa: S101, PT018 - not the root
    first = node.segment.tokens(node.begin, position + 1)
    upper = Node(node.segment, node.begin, position, node.parent)
    node.parent.children[int(first[0])] = upper
    upper.children[int(first[-1])] = node
    node.parent, node.begin = upper, position
    return upper
