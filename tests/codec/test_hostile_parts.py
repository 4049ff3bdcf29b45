"""Parts of format 2 that do not belong together, or are not what they claim, are refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from replaydb import codec, limits
from replaydb.codec import framing
from replaydb.domain.episodes import Episode
from replaydb.errors import ClientTooOldError, CorruptPayloadError
from support import payloads


def parts_of(*lengths: int) -> list[bytes]:
    """Return the core and the part with a large column, of episodes of these lengths."""
    episodes = [
        Episode(
            prompt_ids=[1],
            response_ids=[2] * (length - 1),
            token_extras={"hidden": np.ones((length, 16), np.float32)},
        )
        for length in lengths
    ]
    parts = [bytes(part.data) for part in codec.encode(episodes)]
    assert len(parts) == 2
    return parts


def test_parts_of_one_payload_in_any_order() -> None:
    core, column = parts_of(3000, 2000)
    assert codec.decode([core, column]) == codec.decode([column, core])
    assert [one.token_extras for one in codec.decode([core], fields=()).episodes] == [{}, {}]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (lambda core, column: [core, column, column], r"'token/hidden'\] in two parts"),
        (lambda core, column: [core, core], "'token_ids'] in two parts"),
        (
            lambda core, column: [payloads.altered(core, payloads.tensors_of(column)), column],
            r"'token/hidden'\] in two parts",
        ),
        # columns of other payloads
        (lambda core, column: [core, parts_of(5000)[1]], r"hidden is I64 \[1\], not I64 \[2\]"),
        (lambda core, column: [core, parts_of(3000, 1999)[1]], r"not \[5000, ...\]"),
        (lambda core, column: [core, parts_of(3000, 1, 9)[1]], r"is I64 \[3\], not I64 \[2\]"),
        (
            lambda core, column: [
                core,
                payloads.altered(column, {"rows/token/hidden": np.array([0, 2])}),
            ],
            r"token/hidden belongs to \[0, 2\] of 2",
        ),
        (lambda core, column: [column], "segments is"),
        (lambda core, column: [], "0 parts"),
        (lambda core, column: [core, payloads.encode([])], r"2 parts of the formats \[1, 2\]"),
        (lambda core, column: [payloads.encode([])] * 2, r"2 parts of the formats \[1\]"),
    ],
)
def test_parts_that_do_not_belong_together(parts: Any, reason: str) -> None:
    with pytest.raises(CorruptPayloadError, match=reason):
        codec.decode(parts(*parts_of(3000, 2000)))


def test_a_zstd_frame_around_a_part_of_format_2() -> None:
    for part in parts_of(3000, 2000):
        frame = zstandard.ZstdCompressor().compress(part)
        with pytest.raises(CorruptPayloadError, match="format 2 has one for each tensor"):
            codec.decode([frame])
    newer = bytes(framing.write({"rewards": np.zeros(200)}, 3))
    with pytest.raises(ClientTooOldError):
        codec.decode([zstandard.ZstdCompressor().compress(newer)])


def described(types: Any = None, frames: Any = None, **changes: Any) -> bytes:
    """Return a part with one segment of 1,000 tokens whose columns are described so."""
    tensors: dict[str, Any] = {
        "segments": np.array([[-1, 0, 0, 1000]]),
        "token_ids": np.ones(1000, np.uint8),
        **changes,
    }
    kept = {name: array for name, array in tensors.items() if array is not None}
    notes = {"types": {"token_ids": "I32"} if types is None else types}
    if frames is not None:
        notes["zstd"] = frames
    return bytes(framing.write(kept, 2, json.dumps(notes)))


def frame(content: bytes, extra: bytes = b"") -> NDArray[np.uint8]:
    return np.frombuffer(zstandard.ZstdCompressor().compress(content) + extra, np.uint8)


TOKENS = np.ones(1000, "<i4").tobytes()


def test_described_columns_are_expanded() -> None:
    given = payloads.decode(described()).episodes
    assert given[0].token_ids.tolist() == [1] * 1000
    compressed = described({}, {"token_ids": ["I32", [1000]]}, token_ids=frame(TOKENS))
    assert payloads.decode(compressed).episodes == given
    small = described(None, {"token_ids": ["U8", [1000]]}, token_ids=frame(TOKENS[::4]))
    assert payloads.decode(small).episodes == given


@pytest.mark.parametrize(
    ("types", "reason"),
    [
        ({}, r"token_ids is U8 \[1000\], not I32"),
        ({"token_ids": "U8"}, "token_ids is U8, and is described as U8"),
        ({"token_ids": "I64"}, r"token_ids is I64 \[1000\], not I32"),
        ({"token_ids": "F32"}, "token_ids is U8, and is described as F32"),
        ({"token_ids": "BOOL"}, "token_ids is U8, and is described as BOOL"),
        ({"token_ids": "I33"}, "token_ids is U8, and is described as I33"),
        ({"token_ids": "I32", "segments": "I32"}, "segments is I64, and is described as I32"),
        ({"token_ids": "I32", "segments": "U64"}, "segments is I64, and is described as U64"),
        ({"token_ids": "I32", "episode/x": "F64"}, "episode/x is F32, and is described as F64"),
        ({"token_ids": "I32", "episode/x": "F16"}, "episode/x is F32, and is described as F16"),
        ({"token_ids": "I32", "episode/y": "U64"}, "episode/y has integers beyond U64"),
        ({"token_ids": "I32", "episode/y": "U16"}, "episode/y has integers beyond U16"),
        ({"token_ids": "I32", "episode/z": "I64"}, "episode/z is BOOL, and is described as I64"),
        ({"token_ids": "I32", "other": "I64"}, "other is , and is described as I64"),
        ({"token_ids": 4}, "a type is not text"),
        ({"token_ids": ["I32"]}, "a type is not text"),
        (["token_ids"], "columns are not described by types and zstd"),
    ],
)
def test_types_that_lie(types: Any, reason: str) -> None:
    x, y = np.zeros((1, 2), np.float32), np.array([[-5]], np.int8)
    given = {"episode/x": x, "episode/y": y, "episode/z": np.array([True])}
    with pytest.raises(CorruptPayloadError, match=reason):
        payloads.decode(described(types, **given))


@pytest.mark.parametrize(
    ("described_as", "content", "reason"),
    [
        (["I32", [1001]], frame(TOKENS), "described with 4004 bytes, and its frame has another"),
        (["I32", [999]], frame(TOKENS), "described with 3996 bytes, and its frame has another"),
        (["I64", [1000]], frame(TOKENS), "described with 8000 bytes, and its frame has another"),
        (["F32", [1000]], frame(TOKENS), r"token_ids is F32 \[1000\], not I32"),
        (["I32", [10, 100]], frame(TOKENS), r"token_ids is I32 \[10, 100\], not I32"),
        (["I32", [2**62]], frame(TOKENS), "claim to hold"),
        (["I32", [-1, -1000]], frame(TOKENS), r"shape \[-1, -1000\]"),
        (["I32", [-1]], frame(TOKENS), r"shape \[-1\]"),
        (["I32", [1000.0]], frame(TOKENS), r"shape \[1000.0\]"),
        (["I32", [True, 1000]], frame(TOKENS), r"shape \[True, 1000\]"),
        (["I32", [1] * 65], frame(TOKENS), r"shape \[1, 1"),
        (["I32", "1000"], frame(TOKENS), "shape 1000"),
        (["I32", None], frame(TOKENS), "shape None"),
        (["I32"], frame(TOKENS), "not enough values to unpack"),
        (["I32", [1000], 1], frame(TOKENS), "too many values to unpack"),
        ("I32", frame(TOKENS), "too many values to unpack"),
        (None, frame(TOKENS), "cannot unpack"),
        ([["I32"], [1000]], frame(TOKENS), "unhashable"),
        (["I33", [1000]], frame(TOKENS), "KeyError"),
        (["BOOL", [4000]], frame(TOKENS[1:] + b"\2"), "neither true nor false"),
        (["I32", [1000]], frame(TOKENS)[:-1], "damaged zstd frame"),
        (["I32", [1000]], frame(TOKENS, b"\0"), "damaged zstd frame"),
        (["I32", [1000]], frame(TOKENS)[:3], "damaged zstd frame"),
        (["I32", [1000]], np.zeros(0, np.uint8), "damaged zstd frame"),
        (["I32", [1000]], np.frombuffer(TOKENS, np.uint8), "damaged zstd frame"),
        (["I32", [1000]], np.zeros(9, np.int8), "token_ids is no zstd frame"),
        (["I32", [1000]], frame(TOKENS)[None], "token_ids is no zstd frame"),
        (["I32", [1000]], None, "token_ids is no zstd frame"),
        (["I32", [0, 2**70]], frame(b""), r"shape \[0, 118"),
        (["I32", [10**4000] * 60], frame(TOKENS), r"shape \[10000"),
        (["I32", {}], frame(b"1234"), "shape {}"),
        (["I32", ""], frame(b"1234"), "shape '"),
        ({"I32": 1, "": 2}, frame(b"1234"), "shape '"),
        (["I32", [0]], frame(b"", b"more"), r"shape \[0\]"),
    ],
)
def test_frames_that_lie(described_as: Any, content: Any, reason: str) -> None:
    with pytest.raises(CorruptPayloadError, match=reason):
        payloads.decode(described({}, {"token_ids": described_as}, token_ids=content))
    wider = described({"token_ids": "I64"}, {"token_ids": described_as}, token_ids=content)
    with pytest.raises(CorruptPayloadError):
        payloads.decode(wider)


def test_a_frame_that_does_not_declare_its_size() -> None:
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(TOKENS)
    given = described({}, {"token_ids": ["I32", [1000]]}, token_ids=np.frombuffer(unknown, "u1"))
    with pytest.raises(CorruptPayloadError, match="frame has another size"):
        payloads.decode(given)


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Check that no more memory is allocated at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [[1, 2**40], [2**31, 2**31], [2**62, 2**62], [0, 2**62], [2**70]])
def test_no_memory_is_allocated_for_a_claim(shape: list[int]) -> None:
    """Of a shape in the header, or of the size in a frame."""
    claim = b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little") + b"\1\0\0"
    bomb = described(
        None, {"episode/x": ["U8", shape]}, **{"episode/x": np.frombuffer(claim, "u1")}
    )
    counts = described(**{"turns": np.array([2**62])})
    rows = described(**{"logprobs": np.ones(4, "f4"), "rows/logprobs": np.array([2**62])})
    with at_most(2**20):
        for data in (bomb, counts, rows):
            with pytest.raises(CorruptPayloadError):
                payloads.decode(data)


def test_frames_that_expand_much() -> None:
    """2 KB of a sound frame with 64 MiB of zeros, as integers of 8 times that size."""
    size = 2**26
    blocks = [((2**17 << 3) | 1 << 1).to_bytes(3, "little") + b"\0"] * (size // 2**17 - 1)
    last = ((2**17 << 3) | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    bomb = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"".join(blocks) + last
    data = described(
        {"token_ids": "I32", "episode/x": "I64"},
        {"episode/x": ["U8", [1, size]]},
        **{"episode/x": np.frombuffer(bomb, np.uint8)},
    )
    with (
        at_most(2**20),
        pytest.raises(CorruptPayloadError, match="of 536874944 bytes, where the database has 9"),
    ):
        codec.decode([data], [9999])


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("is_of_turns", [True, False])
def test_long_prefixes_are_not_copied(is_chain: bool, is_of_turns: bool) -> None:
    """1,000 segments that begin with the same million tokens, and have values for all of them."""
    shared, count = 10**6, 1000
    rows = [[i if is_chain else 0, shared + (i if is_chain else 0), 0, 1] for i in range(count)]
    tensors: dict[str, Any] = {
        "segments": np.array([[-1, 0, shared, 0], *rows]),
        "token_ids": np.arange(shared + count, dtype=np.int32),
        "token/x": np.ones(shared + count, np.int8),
        "begins/token/x": np.array([0, *(row[1] for row in rows)]),
    }
    if is_of_turns:
        tensors["turns"] = np.array([count + 1])
        tensors["joint/y"] = np.zeros((1, sum(row[1] + 1 for row in rows) + shared, 0), np.int8)
    data = bytes(framing.write(tensors, 2))
    with at_most(4 * 2**20):
        episodes = payloads.decode(data).episodes
        assert sum(part.length for one in episodes for part in one.segments) > 10**9
        assert sum(one.num_loss_tokens for one in episodes) == count
    last = episodes[-1].segments[-1]
    assert last.tokens(shared - 1, last.length)[[0, -1]].tolist() == [
        shared - 1,
        shared + count - 1,
    ]
    assert np.asarray(last.values("token/x", 0, last.length)).sum() == last.length


def test_columns_without_values_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no bytes, but memory for each segment."""
    count, names = 1000, 50
    tensors: dict[str, Any] = {
        "segments": np.array([[-1, 0, 0, 0]] * count),
        "token_ids": np.empty(0, np.int32),
    }
    tensors |= {f"token/x{i}": np.empty(0, np.int8) for i in range(names)}
    data = bytes(framing.write(tensors, 2))
    assert len(payloads.decode(data).episodes) == count
    monkeypatch.setattr(limits, "MAX_PART_BYTES", 20 * 2**20)
    refused = pytest.raises(CorruptPayloadError, match="50 columns of 1000 segments")
    with at_most(20 * 2**20), refused:
        payloads.decode(data)
