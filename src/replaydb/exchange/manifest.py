"""What an export has written so far: kept beside its files, and read by whoever goes on."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from replaydb.errors import InvalidInputError, PayloadsUnavailableError
from replaydb.exchange.files import Files

#: Hidden, so that what reads all files of a folder does not take it for data.
NAME = ".replaydb-export.json"
VERSION = 1
#: Names of files that an export has written.
PART = re.compile(r"buffer=[^/]+/task=[^/]+/part-\d{5,}-[0-9a-f]{8}\.(parquet|jsonl)")


@dataclass(frozen=True, slots=True)
class Part:
    """A file that is whole.

    Attributes:
        name: Its name.
        buffer: Of which buffer its groups are.
        task: Of which task.
        num_groups: How many groups.
        num_episodes: How many episodes.
        num_bytes: Its size.
        sha256: Of its bytes.
        ids: Ids of its groups, see `packed`.
    """

    name: str
    buffer: str
    task: str
    num_groups: int
    num_episodes: int
    num_bytes: int
    sha256: str
    ids: str


@dataclass(slots=True)
class Manifest:
    """What there is.

    Attributes:
        wanted: Format, filters, and the buffers with the times they were made, which tells stores
            apart.
        parts: Files that are whole.
        complete: Whether that is all that was there when the export ended.
        writer: Names the export that goes on here: of several only the last to begin.
    """

    wanted: dict[str, Any]
    parts: list[Part] = field(default_factory=list)
    complete: bool = False
    writer: str = field(default_factory=lambda: uuid4().hex)

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
            _check_kinds("wanted, buffers, parts, complete, writer", [
                (facts["wanted"], dict), (facts["wanted"]["buffers"], dict),
                (facts["parts"], list), (facts["complete"], bool), (facts["writer"], str),
            ])  # fmt: skip
            parts = [_part(one) for one in facts["parts"]]
            if len({part.name for part in parts}) < len(parts):
                raise ValueError("a file twice")
            return cls(facts["wanted"], parts, facts["complete"], facts["writer"])
        except (ValueError, TypeError, KeyError, RecursionError, zlib.error) as error:
            raise InvalidInputError(
                NAME,
                "a record of an export by this version (delete it to start a new export)",
                error,
            ) from error

    def begin(self, files: Files) -> None:
        """Take the place over from whoever writes there, without what was not noted."""
        self.complete = False
        self.writer = uuid4().hex
        self._write(files)
        self.parts = [part for part in self.parts if files.size(part.name) == part.num_bytes]
        for name in self.strays(files):
            files.remove(name)

    def strays(self, files: Files) -> list[str]:
        """Files that an export has written, of which there is no record."""
        noted = {part.name for part in self.parts}
        return [name for name in files.names() if name not in noted and PART.fullmatch(name)]

    def keep(self, files: Files) -> None:
        """Write it in the place of the one before.

        Raises:
            InvalidInputError: Another export has begun to write there.
        """
        found = Manifest.found(files)
        if found is None or found.writer != self.writer:
            expected = "a place where no other export has begun to write"
            raise InvalidInputError("destination", expected, files.url)
        self._write(files)

    def _write(self, files: Files) -> None:
        facts = {"version": VERSION, **asdict(self)}
        content = json.dumps(facts, indent=1, ensure_ascii=False).encode()
        files.put(NAME, content)
        if files.get(NAME) != content:  # such as an endpoint that leads to several services
            raise PayloadsUnavailableError(files.url, f"{NAME} cannot be read as it was written")

    def ids(self, buffer: str, task: str) -> NDArray[np.int64]:
        """Groups of a task that are in files, ascending."""
        mine = [part for part in self.parts if (part.buffer, part.task) == (buffer, task)]
        return np.sort(np.concatenate([np.empty(0, np.int64), *map(_unpacked, mine)]))


def _part(facts: Mapping[str, Any]) -> Part:
    """A part whose name stays within the place: it is read from where that says.

    Raises:
        ValueError: It is none.
    """
    part = Part(**facts)
    kinds = {"str": str, "int": int}
    _check_kinds(
        "a part", [(getattr(part, one.name), kinds[str(one.type)]) for one in fields(Part)]
    )
    if not PART.fullmatch(part.name):
        raise ValueError(f"a part named {part.name!r:.80}")
    if len(_unpacked(part)) != part.num_groups:
        raise ValueError(f"other ids than of {part.num_groups} groups in {part.name}")
    return part


def _check_kinds(what: str, found: Iterable[tuple[object, type]]) -> None:
    for value, kind in found:
        if type(value) is not kind:
            raise ValueError(f"{value!r:.80} where {what} should have a {kind.__name__}")


def packed(ids: Collection[int]) -> str:
    """Ids as text: how far each is from the one before, 8 bytes, deflated, in base64."""
    steps = np.diff(np.sort(np.fromiter(ids, np.int64)), prepend=np.int64(0))
    return base64.b64encode(zlib.compress(steps.astype("<i8").tobytes())).decode("ascii")


def _unpacked(part: Part) -> NDArray[np.int64]:
    # Consecutive ids deflate to a thousandth, so what is inflated is bounded by what is claimed.
    limit = 8 * max(part.num_groups, 0) + 8
    ids = zlib.decompressobj().decompress(base64.b64decode(part.ids), limit)
    return np.cumsum(np.frombuffer(ids, "<i8"), dtype=np.int64)
