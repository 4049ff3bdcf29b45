"""Episodes to bytes and back: flat columns in a safetensors frame."""

from replaydb.codec.payload import VERSION, checksum, decode, encode

__all__ = ["VERSION", "checksum", "decode", "encode"]
