"""Payloads of one part, in format 1 unless another one is named."""

from __future__ import annotations

from typing import Any

from replaydb import codec
from replaydb.codec import Contents
from replaydb.errors import CorruptPayloadError


def encode(*given: Any, version: int = 1, **options: Any) -> bytes | memoryview:
    """Return episodes, and perhaps a context, as the only part of a payload."""
    [part] = codec.encode(*given, version=version, **options)
    return part.data


def decode(data: bytes | memoryview, checksum: int | None = None) -> Contents:
    """Return what a payload of one part has, if it has this checksum."""
    if checksum is not None and (wrong := codec.mismatch(data, checksum)):
        raise CorruptPayloadError(wrong)
    return codec.decode([data])
