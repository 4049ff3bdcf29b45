"""Payload codec: episodes to bytes and back, as flat columns in a safetensors frame."""

from replaydb.codec.payload import VERSION, checksum_of, decode, encode, mismatch

__all__ = ["VERSION", "checksum_of", "decode", "encode", "mismatch"]
