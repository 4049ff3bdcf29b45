"""Payload codec: episodes to bytes and back, as columns in a safetensors frame."""

from replaydb.codec import late
from replaydb.codec.payload import (
    VERSION,
    Contents,
    Part,
    checksum_of,
    decode,
    decode_turn,
    encode,
    encode_turn,
    mismatch,
    same_content,
)

__all__ = [
    "VERSION",
    "Contents",
    "Part",
    "checksum_of",
    "decode",
    "decode_turn",
    "encode",
    "encode_turn",
    "late",
    "mismatch",
    "same_content",
]
