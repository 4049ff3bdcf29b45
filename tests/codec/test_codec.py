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
from replaydb.codec import format2_writer
from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.settings import Compression
from replaydb.errors import CorruptPayloadError, NotSupportedError
from support import payloads
from support.examples import examples
from support.samples import (
    DTYPES,
    array_of,
    contexts,
    episode,
    sample_branches,
    sample_episodes,
    sample_trajectories,
)

DATA = Path(__file__).parent.parent / "data"


VERSIONS = pytest.mark.parametrize("version", range(1, codec.VERSION + 1))


def encoded(*given: Any, **options: Any) -> list[bytes]:
    """Return the parts of a payload."""
    return [bytes(part.data) for part in codec.encode(*given, **options)]


@VERSIONS
@settings(max_examples=examples(300), deadline=None)
@given(
    episodes=st.lists(episode(), max_size=4),
    context=st.just(GroupContext()) | contexts,
    compression=st.sampled_from([None, "zstd"]),
)
def test_round_trip(
    version: int, episodes: list[Episode], context: GroupContext, compression: str | None
) -> None:
    options = {"compression": compression, "version": version}
    parts = encoded(episodes, context, **options)
    decoded = codec.decode(parts)
    assert decoded == (episodes, context)
    assert encoded(*decoded, **options) == parts


@VERSIONS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 2), (2, 3)])
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...], version: int) -> None:
    array = array_of(dtype, shape, seed=1)
    made = Episode(token_ids=[1], loss_mask=[1], extras={"x": array})
    other = Episode(token_ids=[1], loss_mask=[1])
    for episodes in ([made], [made, made], [made, other]):
        decoded = codec.decode(encoded(episodes, version=version)).episodes
        assert decoded == episodes
        assert type(decoded[0].extras["x"]) is type(array)


@VERSIONS
def test_decoded_arrays_are_read_only_views_of_the_bytes(version: int) -> None:
    given = [Episode(prompt_ids=range(9), response_ids=[9, 2**20], logprobs=[0.5, 1.5])]
    given += sample_episodes()
    [data] = encoded(given, version=version)
    for source in (data, memoryview(bytearray(data))):
        decoded = codec.decode([source])
        first = decoded.episodes[0]
        for array in (first.token_ids, first.prompt_ids, first.response_ids):
            assert not array.flags.writeable
            assert np.shares_memory(array, np.frombuffer(source, np.uint8))
        assert first.logprobs is not None
        assert not first.logprobs.flags.writeable
    state = decoded.episodes[1].extras["state"]
    assert isinstance(state, torch.Tensor)
    state.add_(1)  # tensors cannot be read-only, so they are copies
    assert codec.decode([data]).episodes == given


@VERSIONS
def test_tensors_are_aligned_and_the_library_reads_them(version: int) -> None:
    one = Episode(token_ids=[2**20], loss_mask=[1], extras={"odd": np.ones(3, np.uint8)})
    [data] = encoded([one] * 3, version=version)
    assert all(one.token_ids.flags.aligned for one in codec.decode([data]).episodes)
    by_library = safetensors.numpy.load(data)
    np.testing.assert_array_equal(by_library["episode/odd"], np.ones((3, 3), np.uint8))
    assert by_library["token_ids"].tolist() == [2**20] * 3
    assert "json" not in by_library


@VERSIONS
def test_zstd_is_smaller_and_recognised(version: int) -> None:
    given = [Episode(token_ids=[5] * 1000, loss_mask=[1] * 1000)]
    [plain] = encoded(given, version=version)
    [compressed] = encoded(given, version=version, compression="zstd")
    assert len(compressed) < len(plain) / 2
    assert payloads.decode(compressed).episodes == payloads.decode(plain).episodes == given


@VERSIONS
def test_zstd_missing(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    given = [Episode(token_ids=[1] * 1000, loss_mask=[1] * 1000)]
    [compressed] = encoded(given, version=version, compression="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(NotSupportedError, match=r"replaydb\[zstd\]"):
        encoded(given, version=version, compression="zstd")
    with pytest.raises(NotSupportedError, match=r"replaydb\[zstd\]"):
        payloads.decode(compressed)
    assert codec.decode(encoded(given, version=version)).episodes == given


def test_an_extra_continues_values_in_the_same_part() -> None:
    """Also if only those that it continues are many."""
    hidden = np.ones((3000, 16), np.float32)
    first = Turn(prompt_ids=range(40), response_ids=[1] * 3000, token_extras={"hidden": hidden})
    whole = np.concatenate([first.token_extras["hidden"], hidden[:2]])
    second = Turn(parent=first, new_ids=[2], response_ids=[3], token_extras={"hidden": whole})
    core, column = codec.encode([Episode(turns=[first, second])])
    assert (core.field, column.field) == (None, "hidden")
    [one] = codec.decode([core.data], fields=()).episodes
    assert one.token_extras == {}
    [one] = codec.decode([core.data, column.data]).episodes
    assert [*one.turns] == [first, second]
    assert second.segment.columns["token/hidden"].inherits


def tensors_of(blob: bytes | memoryview) -> dict[str, Any]:
    """Read tensors by the safetensors library, in any order."""
    return dict(safetensors.deserialize(bytes(blob)))  # type: ignore[no-untyped-call]


def write_samples() -> None:
    """Write tests/data/payload_v2*, as it was once written. Never after a release with format 2.

    PYTHONPATH=tests python -c "from codec.test_codec import write_samples; write_samples()"

    The files of version 1 were written in the same way.
    """
    for path in DATA.glob("payload_v2*"):
        path.unlink()
    for compression in (None, "zstd"):
        for name, data in sample_files(compression).items():
            (DATA / name).write_bytes(data)


def sample_files(compression: Compression | None) -> dict[str, bytes]:
    """Return the files of the sample of version 2, which has extras in parts of their own."""
    stem = "payload_v2" if compression is None else "payload_v2_zstd"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format2_writer, "LIGHT_BYTES", 256)
        parts = codec.encode(*sample_of_version_2(), compression=compression)
    return {f"{stem}.{one.field or 'core'}.safetensors": bytes(one.data) for one in parts}


def sample_of_version_2() -> codec.Contents:
    prompt = [{"role": "user", "content": "1 + 1"}]
    context = GroupContext.of(prompt, [1, 2], {"image": np.arange(300.0)})
    return codec.Contents([*sample_episodes(), *sample_branches()], context)


@pytest.mark.parametrize("stem", ["payload_v2", "payload_v2_zstd"])
def test_version_2_still_decodes(stem: str) -> None:
    parts = {path.name: path.read_bytes() for path in DATA.glob(f"{stem}.*")}
    core = parts.pop(f"{stem}.core.safetensors")
    assert len(parts) == 2
    assert codec.decode([core, *parts.values()]) == sample_of_version_2()
    with pytest.raises(CorruptPayloadError, match=r"extra '[a-z]+' is missing"):
        codec.decode([core])
    without = codec.decode([core], fields=())
    assert [one.token_ids.tolist() for one in without.episodes] == [
        one.token_ids.tolist() for one in sample_of_version_2().episodes
    ]


def test_version_2_is_still_written_equally() -> None:
    stored = {path.name: path.read_bytes() for path in DATA.glob("payload_v2.*")}
    assert sample_files(None) == stored


def test_trajectories_are_still_written_and_read_equally() -> None:
    stored = (DATA / "payload_v2_trajectories.safetensors").read_bytes()
    assert payloads.decode(stored).episodes == sample_trajectories()
    assert payloads.encode(sample_trajectories(), version=2) == stored


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("payload_v1.safetensors", 2794183668509945523),
        ("payload_v1.safetensors.zst", -9121468546171772210),
    ],
)
def test_version_1_still_decodes(name: str, known: int) -> None:
    assert payloads.decode((DATA / name).read_bytes(), known).episodes == sample_episodes()


def test_version_1_is_still_written_equally() -> None:
    stored = (DATA / "payload_v1.safetensors").read_bytes()
    assert tensors_of(payloads.encode(sample_episodes())) == tensors_of(stored)
