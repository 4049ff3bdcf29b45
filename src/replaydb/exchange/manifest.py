"""Manifest of an export: the files written so far, to resume an interrupted export."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self
from urllib.parse import quote
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from replaydb.errors import InvalidInputError, PayloadsUnavailableError
from replaydb.exchange.files import Files

#: Hidden, so that programs that read all files of a folder skip it.
NAME = ".replaydb-export.json"
VERSION = 1
#: Maximum length of an escaped name; file systems allow 255 bytes.
MAX_FOLDER = 128
#: Pattern of the names of files that an export writes.
PART = re.compile(r"buffer=[^/]+/task=[^/]+/part-\d{5,}-[0-9a-f]{8}\.(parquet|jsonl)")


@dataclass(frozen=True, slots=True)
class Part:
    """A complete file of an export.

    Attributes:
        name: Relative path of the file.
        buffer: Buffer of its groups.
        task: Task of its groups.
        num_groups: Number of groups.
        num_episodes: Number of episodes.
        num_bytes: Size of the file in bytes.
        sha256: SHA-256 of the file, in hex.
        ids: Ids of its groups, encoded by `packed`.
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
    """State of an export.

    Attributes:
        wanted: Format, filters, and the buffers with their creation times, which identify a store.
        parts: Complete files.
        complete: Whether the export is finished.
        writer: Id of the export that may write; of concurrent exports, the last one to begin.
    """

    wanted: dict[str, Any]
    parts: list[Part] = field(default_factory=list)
    complete: bool = False
    writer: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def load(cls, files: Files) -> Self | None:
        """Read the manifest; None if there is none.

        Raises:
            InvalidInputError: The manifest is invalid.
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
                raise ValueError("a repeated file")
            return cls(facts["wanted"], parts, facts["complete"], facts["writer"])
        except (ValueError, TypeError, KeyError, RecursionError, zlib.error) as error:
            raise InvalidInputError(
                NAME,
                "the manifest of an export by this version (delete it to start a new export)",
                error,
            ) from error

    def begin(self, files: Files) -> None:
        """Take over the location from other writers, and delete files without a record."""
        self.complete = False
        self.writer = uuid4().hex
        self._write(files)
        self.parts = [part for part in self.parts if files.size(part.name) == part.num_bytes]
        for name in self.unrecorded(files):
            files.remove(name)

    def unrecorded(self, files: Files) -> list[str]:
        """Return files written by an export that the manifest does not record."""
        recorded = {part.name for part in self.parts}
        return [name for name in files.names() if name not in recorded and PART.fullmatch(name)]

    def save(self, files: Files) -> None:
        """Write the manifest, replacing the one before.

        Raises:
            InvalidInputError: Another export has begun to write there.
        """
        found = Manifest.load(files)
        if found is None or found.writer != self.writer:
            expected = "a location where no other export has begun to write"
            raise InvalidInputError("destination", expected, files.url)
        self._write(files)

    def _write(self, files: Files) -> None:
        facts = {"version": VERSION, **asdict(self)}
        content = json.dumps(facts, indent=1, ensure_ascii=False).encode()
        files.put(NAME, content)
        if files.get(NAME) != content:  # for example, an endpoint that leads to several services
            raise PayloadsUnavailableError(files.url, f"{NAME} cannot be read as it was written")

    def folder(self, buffer: str, task: str) -> str:
        """Return the folder of a task: the folder of its files so far, or a new one."""
        of_buffers = {part.buffer: part.name.split("/")[0] for part in self.parts}
        of_tasks = {
            part.task: part.name.split("/")[1] for part in self.parts if part.buffer == buffer
        }
        return f"{_component('buffer', buffer, of_buffers)}/{_component('task', task, of_tasks)}"

    def ids(self, buffer: str, task: str) -> NDArray[np.int64]:
        """Return the ids of groups of a task that are in files, ascending."""
        mine = [part for part in self.parts if (part.buffer, part.task) == (buffer, task)]
        return np.sort(np.concatenate([np.empty(0, np.int64), *map(_unpacked, mine)]))


def _part(facts: Mapping[str, Any]) -> Part:
    """Build and check a part; its name must not lead outside the location.

    Raises:
        ValueError: The part is invalid.
    """
    part = Part(**facts)
    kinds = {"str": str, "int": int}
    _check_kinds(
        "a part", [(getattr(part, one.name), kinds[str(one.type)]) for one in fields(Part)]
    )
    if not PART.fullmatch(part.name):
        raise ValueError(f"a part named {part.name!r:.80}")
    if len(_unpacked(part)) != part.num_groups:
        raise ValueError(f"ids that are not of {part.num_groups} groups in {part.name}")
    return part


def _check_kinds(what: str, found: Iterable[tuple[object, type]]) -> None:
    for value, kind in found:
        if type(value) is not kind:
            raise ValueError(f"{value!r:.80} in {what}, expected a {kind.__name__}")


def _component(kind: str, name: str, known: Mapping[str, str]) -> str:
    """Return the name of a folder: `known` has those of other names, and maybe of this one.

    Names are escaped as Hive does, so that every system accepts them, and readers get the original
    name back. macOS and Windows do not distinguish names that differ only in case. Of these, all
    but the first end with a hash, and so do names that are too long. In other names the comma
    before the hash is escaped.
    """
    others = {folder.lower() for other, folder in known.items() if other != name}
    if name in known and known[name].lower() not in others:
        return known[name]
    quoted = quote(name, safe=" ")
    if quoted.endswith((" ", ".")):  # Windows removes them
        quoted = f"{quoted[:-1]}%{ord(quoted[-1]):02X}"
    if len(quoted) > MAX_FOLDER or f"{kind}={quoted}".lower() in others:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        start = name.encode()[:40].decode(errors="ignore")  # readers refuse a part of a character
        quoted = f"{quote(start, safe=' ')},{digest}"
    return f"{kind}={quoted}"


def packed(ids: Collection[int]) -> str:
    """Encode ids as text: 8-byte differences of sorted ids, deflated, in base64."""
    steps = np.diff(np.sort(np.fromiter(ids, np.int64)), prepend=np.int64(0))
    return base64.b64encode(zlib.compress(steps.astype("<i8").tobytes())).decode("ascii")


def _unpacked(part: Part) -> NDArray[np.int64]:
    # Deflate can expand a thousandfold, so the output is bounded by the claimed number of groups.
    limit = 8 * max(part.num_groups, 0) + 8
    ids = zlib.decompressobj().decompress(base64.b64decode(part.ids), limit)
    return np.cumsum(np.frombuffer(ids, "<i8"), dtype=np.int64)
