"""What an export has written so far: kept beside its files, and read by whoever goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from replaydb.errors import InvalidInputError
from replaydb.exchange.files import Files

#: Hidden, so that what reads all files of a folder does not take it for data.
NAME = ".replaydb-export.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A file that is whole.

    Attributes:
        name: Its name.
        buffer: Of which buffer its groups are.
        task: Of which task.
        last_id: The last of them; there is none of the same task before it that is not in a file.
        num_groups: How many groups.
        num_episodes: How many episodes.
        num_bytes: Its size.
    """

    name: str
    buffer: str
    task: str
    last_id: int
    num_groups: int
    num_episodes: int
    num_bytes: int


@dataclass(slots=True)
class Manifest:
    """What there is.

    Attributes:
        wanted: Format, filters, and the buffers with the times they were made, which tells stores
            apart.
        parts: Files that are whole.
        complete: Whether that is all that was there when the export ended.
    """

    wanted: dict[str, Any]
    parts: list[Part] = field(default_factory=list)
    complete: bool = False

    @classmethod
    def found(cls, files: Files) -> Self | None:
        """That of an export; None where there is none.

        Raises:
            InvalidInputError: What is there is not one of ours.
        """
        content = files.get(NAME)
        if content is None:
            return None
        try:
            facts = json.loads(content)
            if facts["version"] != VERSION:
                raise ValueError(f"version {facts['version']}")
            parts = [Part(**part) for part in facts["parts"]]
            return cls(facts["wanted"], parts, bool(facts["complete"]))
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInputError(NAME, "what an export of this version wrote", error) from error

    def keep(self, files: Files) -> None:
        """Write it in the place of the one before."""
        facts = {"version": VERSION, **asdict(self)}
        files.put(NAME, json.dumps(facts, indent=1, ensure_ascii=False).encode())

    def last_id(self, buffer: str, task: str) -> int:
        """The last group of a task that is in a file."""
        mine = (part.last_id for part in self.parts if (part.buffer, part.task) == (buffer, task))
        return max(mine, default=0)
