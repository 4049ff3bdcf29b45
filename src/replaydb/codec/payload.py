"""Payloads: the episodes of a group, and its context, to bytes and back."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import xxhash

from replaydb import limits
from replaydb.codec import compaction, format1, format2_reader, format2_writer, framing
from replaydb.codec.framing import corrupt
from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.episodes.arrays import same
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.segments import EXTRA
from replaydb.domain.episodes.turns import set_fields
from replaydb.errors import CorruptPayloadError, InvalidInputError

#: The newest version of the format. All older ones can be read.
VERSION = 2


class Contents(NamedTuple):
    """What a payload has.

    Attributes:
        episodes: The episodes, without texts.
        context: Prompt and extras of their group, in its first part.
    """

    episodes: list[Episode]
    context: GroupContext


class Part(NamedTuple):
    """A part of a payload.

    Attributes:
        field: The name of the extra that it holds; None: the episodes without heavy extras.
        data: The bytes.
        expanded_bytes: Size of its tensors in memory; None in format 1.
        repeated: In the part of the episodes, the bytes of token extras by name that segments have
            for tokens which they share; see `sharing.repeated_bytes`. None in format 1.
    """

    field: str | None
    data: bytes | memoryview
    expanded_bytes: int | None
    repeated: Mapping[str, int] | None = None


def encode(
    episodes: Sequence[Episode],
    context: GroupContext | None = None,
    *,
    compression: Literal["zstd"] | None = None,
    version: int = VERSION,
) -> list[Part]:
    """Return the parts of a payload in a version of the format, that of the episodes first.

    The same episodes give the same bytes.

    Raises:
        InvalidInputError: The episodes have something that this version cannot hold, or a part is
            larger than `replaydb.limits.MAX_PART_BYTES`.
        NotSupportedError: `compression` is "zstd" and zstandard is not installed.
    """
    given = GroupContext() if context is None else context
    if version > 1:
        parts, repeated = format2_writer.parts_of(episodes, given)
        sizes = {field: sum(one.nbytes for one in parts[field].values()) for field in parts}
        limits.check_part(max(sizes.values()))
        return [
            Part(
                field,
                compaction.write(tensors, version, compression),
                sizes[field],
                None if field else repeated,
            )
            for field, tensors in parts.items()
        ]
    blob = framing.write(format1.tensors_of(episodes, given), version)
    return [Part(None, blob if compression is None else framing.compress(blob), None)]


def decode(
    parts: Sequence[bytes | memoryview],
    sizes: Sequence[int | None] | None = None,
    fields: Collection[str] | None = None,
) -> Contents:
    """Return what is in some parts of a payload, the core first.

    Arrays are read-only views of the parts unless they are compressed. Altered bytes may decode to
    different episodes, but never to invalid ones.

    Args:
        parts: The bytes of each part.
        sizes: `expanded_bytes` of each part. Default: unknown.
        fields: Names of the extras to keep. Default: all.

    Raises:
        CorruptPayloadError: The bytes are truncated, altered or foreign.
        ClientTooOldError: They are of a newer version of the format.
        NotSupportedError: They are compressed and zstandard is not installed.
    """
    blobs = []
    for data in parts:
        view = memoryview(data).toreadonly()
        plain = framing.decompress(view)
        blobs.append(framing.read(plain, VERSION))
        if blobs[-1].version > 1 and plain is not view:
            corrupt("one zstd frame, where format 2 has one for each tensor")
    versions = {blob.version for blob in blobs}
    if len(versions) != 1 or (versions == {1} and len(blobs) > 1):
        corrupt(f"one payload has {len(blobs)} parts of the formats {sorted(versions)}")
    try:
        if versions == {1}:
            contents = Contents(*format1.read(blobs[0].tensors))
        else:
            known = [None] * len(blobs) if sizes is None else sizes
            found = [compaction.expanded(*one) for one in zip(blobs, known, strict=True)]
            contents = Contents(*format2_reader.read(found, fields))
    except (InvalidInputError, RecursionError) as error:
        raise CorruptPayloadError(str(error)) from error
    return contents if fields is None else _selected(contents, fields)


def encode_turn(
    turn: Turn,
    follows: str | None = None,
    begins_with: str | None = None,
    *,
    compression: Literal["zstd"] | None = None,
) -> Part:
    """Return a part with a turn of a trajectory that is not finished. The format is 2.

    Args:
        turn: The turn.
        follows: Uid of the turn that it follows.
        begins_with: Uid of the turn that has the last of the tokens that it shares.
        compression: As for `encode`.

    Raises:
        InvalidInputError: The part is larger than `replaydb.limits.MAX_PART_BYTES`.
        NotSupportedError: `compression` is "zstd" and zstandard is not installed.
    """
    tensors = format2_writer.tensors_of_turn(turn, follows, begins_with)
    size = sum(one.nbytes for one in tensors.values())
    limits.check_part(size)
    return Part(None, compaction.write(tensors, VERSION, compression), size)


def decode_turn(
    data: bytes | memoryview, expanded_bytes: int | None, known: Mapping[str, Turn]
) -> Turn:
    """Return the turn in a part that `encode_turn` returned.

    Args:
        data: The bytes.
        expanded_bytes: Size of the tensors.
        known: Turns of the same trajectory before it, by uid.

    Raises:
        CorruptPayloadError: As `decode`, or a turn that it follows is missing.
    """
    try:
        return format2_reader.read_turn(_tensors_of(data, expanded_bytes), known)
    except (InvalidInputError, RecursionError) as error:
        raise CorruptPayloadError(str(error)) from error


def same_content(one: bytes | memoryview, other: bytes | memoryview) -> bool:
    """Whether two parts of format 2 have the same content, compressed or not.

    The order of the names in JSON objects does not matter.
    """
    first, second = _tensors_of(one, None), _tensors_of(other, None)
    return _json_of(first) == _json_of(second) and same(first, second)


def _json_of(tensors: framing.Tensors) -> str:
    """Remove the JSON object of a part, and return it with sorted names."""
    found = tensors.pop("json", None)
    values = {} if found is None else framing.parse_json(found[1].tobytes())
    return json.dumps(values, sort_keys=True)


def _tensors_of(data: bytes | memoryview, expanded_bytes: int | None) -> framing.Tensors:
    blob = framing.read(memoryview(data).toreadonly(), VERSION)
    if blob.version != VERSION:
        corrupt(f"a turn in format {blob.version}")
    return compaction.expanded(blob, expanded_bytes)


def _selected(contents: Contents, fields: Collection[str]) -> Contents:
    """Remove all extras but some from what was decoded, and return it."""
    extras: list[dict[str, Any]] = [contents.context.extras]
    for episode in contents.episodes:
        set_fields(episode, is_whole=False)
        extras += [episode.extras, episode.joint_extras]
        for segment in episode.segments:
            for column in [name for name in segment.columns if name.startswith(EXTRA)]:
                if column.removeprefix(EXTRA) not in fields:
                    del segment.columns[column]
    for arrays in extras:
        for name in arrays.keys() - set(fields):
            del arrays[name]
    return contents


def checksum_of(data: bytes | memoryview) -> int:
    """Return XXH3 of the bytes as a signed 64-bit number. It detects accidents, not tampering."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)


def mismatch(data: bytes | memoryview, checksum: int) -> str | None:
    """Return what is wrong with the checksum of the bytes, or None."""
    actual = checksum_of(data)
    return None if actual == checksum else f"checksum is {actual}, not {checksum}"
