"""Payload codec: episodes to bytes and back, as columns in a safetensors frame."""

from replaydb.codec.payload import VERSION, Contents, Part, checksum_of, decode, encode, mismatch

__all__ = ["VERSION", "Contents", "Part", "checksum_of", "decode", "encode", "mismatch"]
