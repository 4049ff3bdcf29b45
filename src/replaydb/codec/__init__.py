"""Payload codec: episodes to bytes and back, as columns in a safetensors frame."""

from replaydb.codec.payload import (
    VERSION,
    Part,
    checksum_of,
    decode,
    decode_parts,
    encode,
    encode_parts,
    mismatch,
)

__all__ = [
    "VERSION",
    "Part",
    "checksum_of",
    "decode",
    "decode_parts",
    "encode",
    "encode_parts",
    "mismatch",
]
