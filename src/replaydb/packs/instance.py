"""The instance of a database: the one of several copies that may write and remove packs.

A copy of a database refers to the same packs as the original, and each would remove packs that only
the other one uses. So the marker of a payload store names the instance that may write there, by
facts that a copy does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self


@dataclass(frozen=True, slots=True)
class Instance:
    """A database, as opposed to its copies.

    Attributes:
        facts: What distinguishes it, by name. Facts that could not be read are missing.
        timeline: Timeline of the server. A standby has a higher one after it was promoted. 0: the
            engine has none, or it could not be read.
        newest: In a marker, the highest timeline that has written.
    """

    facts: Mapping[str, int]
    timeline: int = 0
    newest: int = 0

    def __str__(self) -> str:
        facts = dict(self.facts) | ({"timeline": self.timeline} if self.timeline else {})
        return ", ".join(f"{name} {value}" for name, value in facts.items())

    def relation(self, owner: Instance) -> Literal["same", "promoted", "other"]:
        """Compare this instance with the owner of a payload store.

        Returns:
            `same`: it is the owner. `promoted`: it has taken over from the owner, on a timeline
            that has not written before. `other`: it is a copy, the original of the owner, or a
            server that was replaced.
        """
        if not self._has_facts_of(owner):
            return "other"
        if 0 in (self.timeline, owner.timeline) or self.timeline == owner.timeline:
            return "same"
        return "promoted" if self.timeline > owner.newest else "other"

    def after(self, owner: Instance | None) -> Instance:
        """Return this instance as the owner after another one, or as the first one."""
        earlier = owner.newest if owner is not None and self._has_facts_of(owner) else 0
        return replace(self, newest=max(self.timeline, earlier))

    def _has_facts_of(self, owner: Instance) -> bool:
        """Whether all facts that both have are equal, and there are some."""
        shared = self.facts.keys() & owner.facts.keys()
        return bool(shared) and all(self.facts[name] == owner.facts[name] for name in shared)

    def encoded(self) -> bytes:
        """Return it as a line of a marker."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decoded(cls, line: bytes) -> Self | None:
        """Return the instance in a line of a marker; None if it is empty.

        A line that cannot be read is an instance without facts, which is no other's.
        """
        if not line:
            return None
        try:
            found = json.loads(line)
            facts = {name: int(value) for name, value in found["facts"].items()}
            return cls(facts, int(found["timeline"]), int(found["newest"]))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return cls({})
