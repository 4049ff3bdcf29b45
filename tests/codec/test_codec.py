"""Codec: episodes to bytes and back, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaydb import codec
from replaydb.domain.episodes import Episode
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.episodes.flat import flatten
from replaydb.errors import NotSupportedError
from support.examples import examples
from support.samples import DTYPES, array_of, contexts, episode, sample_episodes

DATA = Path(__file__).parent.parent / "data"


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(episode(), max_size=4), st.just(GroupContext()) | contexts, st.booleans())
def test_round_trip(episodes: list[Episode], context: GroupContext, zstd: bool) -> None:
    flat = flatten(episodes, context)
    data = codec.encode(flat, compression="zstd" if zstd else None)
    decoded = codec.decode(data, codec.checksum_of(data))
    assert decoded == flat
    assert decoded.context == context
    assert decoded.episodes() == flat.episodes() == episodes
    assert codec.encode(decoded, compression="zstd" if zstd else None) == data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 2), (2, 3)])
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = array_of(dtype, shape, seed=1)
    made = Episode(token_ids=[1], loss_mask=[1], extras={"x": array})
    other = Episode(token_ids=[1], loss_mask=[1])
    for episodes in ([made], [made, made], [made, other]):
        decoded = codec.decode(codec.encode(flatten(episodes))).episodes()
        assert decoded == episodes
        assert type(decoded[0].extras["x"]) is type(array)


def test_decoded_arrays_are_read_only_views_of_the_bytes() -> None:
    data = bytearray(codec.encode(flatten(sample_episodes())))
    for source in (bytes(data), memoryview(data)):
        flat = codec.decode(source)
        for array in (flat.token_ids, flat.logprobs, flat.lengths, flat.token_extras["values"]):
            assert isinstance(array, np.ndarray)
            assert not array.flags.writeable
            assert np.shares_memory(array, np.frombuffer(source, np.uint8))
    state = flat.each_extras[0]["state"]
    assert isinstance(state, torch.Tensor)
    state.add_(1)  # tensors cannot be read-only, so they are copies
    assert codec.decode(memoryview(data)).episodes() == sample_episodes()


def test_tensors_are_aligned_and_the_library_reads_them() -> None:
    flat = flatten(
        [Episode(token_ids=[1], loss_mask=[1], extras={"odd": np.ones(3, np.uint8)})] * 3
    )
    data = codec.encode(flat)
    decoded = codec.decode(data)
    assert all(
        array.flags.aligned for array in (decoded.lengths, decoded.rewards, decoded.token_ids)
    )
    by_library = safetensors.numpy.load(bytes(data))
    np.testing.assert_array_equal(by_library["episode/odd"], np.ones((3, 3), np.uint8))
    assert by_library["token_ids"].tolist() == [1, 1, 1]
    assert "json" not in by_library


def test_zstd_is_smaller_and_recognised() -> None:
    flat = flatten([Episode(token_ids=[5] * 1000, loss_mask=[1] * 1000)])
    plain, compressed = codec.encode(flat), codec.encode(flat, compression="zstd")
    assert len(compressed) < len(plain) / 4
    assert codec.decode(compressed) == codec.decode(plain) == flat


def test_zstd_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flatten([Episode(token_ids=[1], loss_mask=[1])])
    compressed = codec.encode(flat, compression="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(NotSupportedError, match=r"replaydb\[zstd\]"):
        codec.encode(flat, compression="zstd")
    with pytest.raises(NotSupportedError, match=r"replaydb\[zstd\]"):
        codec.decode(compressed)
    assert codec.decode(codec.encode(flat)) == flat


def tensors_of(blob: bytes | memoryview) -> dict[str, Any]:
    """Read tensors by the safetensors library, in any order."""
    return dict(safetensors.deserialize(bytes(blob)))  # type: ignore[no-untyped-call]


def write_samples() -> None:
    """Write tests/data, as it was once written with codec version 1. Needs the path `src:tests`."""
    flat = flatten(sample_episodes())
    (DATA / "payload_v1.safetensors").write_bytes(codec.encode(flat))
    (DATA / "payload_v1.safetensors.zst").write_bytes(codec.encode(flat, compression="zstd"))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("payload_v1.safetensors", 2794183668509945523),
        ("payload_v1.safetensors.zst", -9121468546171772210),
    ],
)
def test_version_1_still_decodes(name: str, known: int) -> None:
    assert codec.decode((DATA / name).read_bytes(), known).episodes() == sample_episodes()


def test_version_1_is_still_what_is_written() -> None:
    stored = (DATA / "payload_v1.safetensors").read_bytes()
    assert codec.VERSION == 1
    assert tensors_of(codec.encode(flatten(sample_episodes()))) == tensors_of(stored)
