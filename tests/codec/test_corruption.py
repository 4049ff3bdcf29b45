"""Bytes that are not a payload always raise `CorruptPayloadError` with the reason."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replaydb import codec
from replaydb.codec import framing
from replaydb.domain.episodes import Episode
from replaydb.domain.episodes.context import GroupContext
from replaydb.errors import ClientTooOldError, CorruptPayloadError
from support import payloads
from support.examples import examples
from support.samples import arrays, episode, sample_episodes


def blob(version: object = "1", **changes: Any) -> bytes:
    """Return a small payload of two episodes. Tensors can be replaced, added, or (None) removed."""
    tensors = {
        "lengths": np.array([1, 2]),
        "prompt_lengths": np.array([0, 1]),
        "rewards": np.array([0.0, np.nan]),
        "advantages": np.array([0.0, np.nan]),
        "versions": np.array([1, -(2**63)]),
        "token_ids": np.array([7, 8, 9], np.int32),
        "loss_mask": np.array([True, False, True]),
    }
    tensors |= {name.replace("__", "/"): array for name, array in changes.items()}
    kept = {name: array for name, array in tensors.items() if array is not None}
    return safetensors.numpy.save(kept, {"replaydb": version} if version else None)  # type: ignore[dict-item]


def as_json(value: object) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def turns(**changes: Any) -> dict[str, Any]:
    columns = {
        "turn__counts": np.array([0, 2]),
        "turn__lengths": np.array([1, 1]),
        "turn__prompt_lengths": np.array([0, 1]),
        "turn__rewards": np.array([1.0, np.nan]),
        "turn__versions": np.array([1, 2]),
        "turn__has_logprobs": np.array([False, False]),
        "turn__has_token_versions": np.array([False, False]),
    }
    columns |= {f"turn__{name}": array for name, array in changes.items()}
    return columns | {"rewards": np.array([0.0, 1.0])}


def with_names(*names: object) -> bytes:
    """Return a payload whose turns have token extras of these names; its second episode has b."""
    b = np.zeros(2)
    return blob(**turns(), each__1__token__b=b, json=as_json({"turn_token_extras": names}))


def test_the_unchanged_blob_is_valid() -> None:
    assert [e.token_ids.tolist() for e in payloads.decode(blob()).episodes] == [[7], [8, 9]]
    assert len(payloads.decode(blob(**turns())).episodes[1].turns) == 2
    [_, named] = payloads.decode(with_names(["b"], None)).episodes
    assert [list(turn.token_extras) for turn in named.turns] == [["b"], []]
    whole = turns(token_rewards=np.zeros(3, np.float32), rewards=np.zeros(2))
    assert payloads.decode(blob(**whole)).episodes[1].turns[0].token_rewards is not None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "foreign or truncated: 0 bytes"),
        (b"1234567", "foreign or truncated"),
        (b"\x80\x04\x95pickled..", "foreign or truncated"),
        (b"\2\0\0\0\0\0\0\0[]", "foreign: not a JSON object"),
        (b"\3\0\0\0\0\0\0\0{}}", "foreign or altered: Extra data"),
        (b"\1\0\0\0\0\0\0\0\xff", "foreign or altered: 'utf-8'"),
        (b"\xa0\x86\1\0\0\0\0\0" + b"[" * 100_000, "foreign or altered: maximum recursion"),
        (blob(version=None), "foreign: safetensors, but not of replaydb"),
        (blob(version="one"), "foreign: safetensors, but not of replaydb"),
        (blob(version="0"), "written in payload format 0"),
        (blob() + b"\0", "bytes, where the header describes"),
        (blob(lengths=None), "there is no lengths"),
        (blob(rewards=None), "there is no rewards"),
        (blob(rewards=np.zeros(2, np.float32)), r"rewards is F32 \[2\], not F64 \[2\]"),
        (blob(rewards=np.zeros(3)), r"rewards is F64 \[3\], not F64 \[2\]"),
        (blob(rewards=np.zeros((2, 1))), r"rewards is F64 \[2, 1\], not F64 \[2\]"),
        (blob(rewards=np.array([np.inf, 0])), "a reward is beyond float32"),
        (blob(rewards=np.array([0, -1e39])), "a reward is beyond float32"),
        (blob(advantages=np.array([-np.inf, 0])), "an advantage is beyond float32"),
        (blob(advantages=np.array([np.nan, 1e39])), "an advantage is beyond float32"),
        (blob(logprobs=np.array([0, -np.inf, 0], np.float32)), "a logprob is infinite"),
        (blob(lengths=np.array([1, 1])), r"lengths \[1, 1\] do not add up to 3 tokens"),
        (blob(lengths=np.array([-1, 4])), r"lengths \[-1, 4\] do not add up"),
        (blob(prompt_lengths=np.array([2, 0])), r"prompt lengths \[2, 0\] do not fit"),
        (blob(prompt_lengths=np.array([-1, 0])), r"prompt lengths \[-1, 0\] do not fit"),
        (blob(versions=np.array([2**31, 0])), "are not 32-bit"),
        (blob(loss_mask=np.zeros(2, bool)), r"loss_mask is BOOL \[2\], not BOOL \[3\]"),
        (blob(logprobs=np.zeros(2, np.float32)), r"logprobs is F32 \[2\], not F32 \[3\]"),
        (blob(has_logprobs=np.ones(2, bool)), r"unknown sections \['has_logprobs'\]"),
        (blob(other=np.zeros(1)), r"unknown sections \['other'\]"),
        (blob(token__a=np.zeros(2)), r"token/a is \[2\], not \[3, ...\]"),
        (blob(token__a=np.zeros(())), r"token/a is \[\], not \[3, ...\]"),
        (blob(episode__a=np.zeros(3)), r"episode/a is \[3\], not \[2, ...\]"),
        (blob(each__2__token__a=np.zeros(1)), "belongs to none of 2 episodes"),
        (blob(each__1__token__a=np.zeros(1)), r"is \[1\], not \[2, ...\]"),
        (blob(each__01__token__a=np.zeros(2)), "unknown sections"),
        (blob(episode__a=np.zeros(2), token__a=np.zeros(3)), "have duplicate or reserved names"),
        (
            blob(episode__a=np.zeros(2), each__0__episode__a=np.zeros(3)),
            "have duplicate or reserved names",
        ),
        (blob(episode__reward=np.zeros(2)), "have duplicate or reserved names"),
        (blob(**{"episode/" + "x" * 256: np.zeros(2)}), "expected 1 to 255 characters"),
        (blob(json=np.zeros(2, np.uint8)), "foreign or altered"),
        (blob(json=as_json({"finish_reasons": ["a"]})), "finish_reasons is not a list of 2"),
        (blob(json=as_json({"finish_reasons": [1, None]})), "finish_reasons: expected a str"),
        (blob(json=as_json({"metadata": {}})), "metadata is not a list of 2"),
        (blob(json=as_json({"metadata": [[], {}]})), "metadata: expected a mapping"),
        (blob(json=as_json({"metadata": [{"a": np.nan}, {}]})), "NaN is not JSON"),
        (blob(json=np.frombuffer(b'{"metadata":[{"a":1e999},{}]}', np.uint8)), "metadata.a"),
        (blob(json=as_json({"other": 1})), "unknown sections"),
        (blob(json=as_json({"a\u241b": json.loads("[" * 900 + "]" * 900)})), "maximum recursion"),
        (
            blob(
                token_versions=np.zeros(3, np.int32),
                has_token_versions=np.ones(2, bool),
                lengths=np.array([0, 3]),
            ),
            "versions per token are declared but missing",
        ),
        (blob(**turns(counts=np.array([-1, 3]))), r"turns of \[.*\] in an episode of 1 tokens"),
        (blob(**turns(counts=np.array([0, 1]))), r"turns of \[1\] in an episode of 2 tokens"),
        (blob(**turns(counts=np.array([0, 0]))), "0 turns counted, 2 described"),
        (blob(**turns(lengths=np.array([-1, 3]))), r"prompt lengths \[0, 1\] do not fit"),
        (blob(**turns(rewards=np.array([np.inf, 0]))), "a reward is beyond float32"),
        (blob(**turns(has_logprobs=np.ones(2, bool))), "logprobs are declared but missing"),
        (
            blob(**turns(has_token_versions=np.ones(2, bool))),
            "versions per token are declared but missing",
        ),
        (blob(**turns(counts=None)), "unknown sections"),
        (blob(**turns(token_rewards=np.zeros(2, np.float32))), r"is F32 \[2\], not F32 \[3\]"),
        (blob(**turns(token_rewards=np.full(3, np.nan, np.float32))), "a token is not finite"),
        (blob(**turns(token_rewards=np.zeros(3, np.float32))), "but no reward"),
        (blob(**turns(has_token_rewards=np.zeros(2, bool))), "unknown sections"),
        (
            blob(**turns(token_rewards=np.ones(3, np.float32), rewards=np.zeros(2))),
            "reward: expected the sum of token_rewards, 1, got 0.0",
        ),
        (
            blob(
                **turns(has_logprobs=np.ones(2, bool)),
                logprobs=np.zeros(3, np.float32),
                has_logprobs=np.zeros(2, bool),
            ),
            "logprobs of turns, which their episode does not have",
        ),
        (
            blob(
                **turns(has_token_versions=np.array([False, True])),
                token_versions=np.zeros(3, np.int32),
                has_token_versions=np.zeros(2, bool),
            ),
            "a turn without a response has versions per token",
        ),
        (blob(**turns() | {"rewards": np.full(2, np.nan)}), "or no reward in their episode"),
        (blob(**turns(), token__token_rewards=np.zeros(3)), "an extra token_rewards"),
        (blob(**turns(), each__1__episode__token_rewards=np.zeros(3)), "an extra token_rewards"),
        (blob(token__token_rewards=np.full(3, 1e39)), "numbers in the range of float32"),
        (with_names(["token_rewards"], []), "reserved token extras"),
        (with_names(["a"], []), r"token extras \['a'\] of turns"),
        (with_names("a", []), "are not names of token extras"),
        (with_names(["b", "b"], []), "of one turn"),
        (with_names([1], []), "token_extras: expected a str"),
        (blob(prompt_ids=np.zeros(2)), r"prompt_ids is F64 \[2\], not I32 \[any\]"),
        (blob(prompt_ids=np.zeros((2, 1), np.int32)), r"prompt_ids is I32 \[2, 1\]"),
        (blob(**{"group/": np.zeros(2)}), "group/: expected 1 to 255 characters"),
        (blob(json=as_json({"prompt": 1})), "prompt: expected text or a sequence"),
        (blob(json=as_json({"prompt": [{}, 1]})), "prompt: expected text or a sequence"),
        (blob(json=as_json({"prompt": [{"a\0": 1}]})), "key: expected no NUL"),
    ],
)
def test_the_error_has_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptPayloadError, match=reason):
        payloads.decode(data)


def test_a_newer_format_is_not_damage() -> None:
    with pytest.raises(ClientTooOldError, match=r"payload format 3, .* reads up to 2"):
        payloads.decode(blob(version="3"))


def with_header(change: Any) -> bytes:
    """Return the small payload with its safetensors header edited by `change`."""
    data = blob()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["rewards"].update(shape=[True, 2]),
        lambda header: header["rewards"].update(shape=[-1, -2]),
        lambda header: header["rewards"].update(shape=[0, 2**70]),
        lambda header: header["rewards"].update(shape=[1] * 70 + [2]),
        lambda header: header["rewards"].update(shape="xx"),
        lambda header: header["rewards"].update(shape=["x", 10**12]),
        lambda header: header["rewards"].update(shape=[2**1000] * 10**5),
        lambda header: header["rewards"].update(shape=None),
        lambda header: header["rewards"].update(dtype=["F64"]),
        lambda header: header["rewards"].update(dtype="F4"),
        lambda header: header["rewards"].update(data_offsets=[0, 16]),
        lambda header: header["rewards"].update(data_offsets=[0]),
        lambda header: header["loss_mask"]["data_offsets"].append(0),
        lambda header: header["loss_mask"]["data_offsets"].__setitem__(1, 0),
        lambda header: header["loss_mask"]["data_offsets"].__setitem__(1, 10**30),
        lambda header: header["rewards"].update(shape=[2.0]),
        lambda header: header["rewards"].pop("dtype"),
        lambda header: header.update(rewards=[]),
        lambda header: header.update(__metadata__=["replaydb"]),
        lambda header: header.update(__metadata__={"replaydb": 1}),
        lambda header: header.update(__metadata__={"replaydb": "9" * 5000}),
    ],
)
def test_inconsistent_headers(change: Any) -> None:
    with pytest.raises(CorruptPayloadError):
        payloads.decode(with_header(change))


def test_a_mask_holds_only_true_and_false() -> None:
    data = bytearray(blob())
    data[-1] = 2
    with pytest.raises(CorruptPayloadError, match="neither true nor false"):
        payloads.decode(bytes(data))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_truncation_and_every_flipped_bit_of_the_sample(compression: Any) -> None:
    context = GroupContext.of([{"role": "user"}], [1, 2], {"image": np.arange(3)})
    data = payloads.encode(sample_episodes(), context, compression=compression)
    known = codec.checksum_of(data)
    for end in range(len(data)):
        for check in (None, known):
            with pytest.raises(CorruptPayloadError):
                payloads.decode(data[:end], check)
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        with pytest.raises(CorruptPayloadError, match="checksum is"):
            payloads.decode(bytes(altered), known)
        decodes_or_is_corrupt(bytes(altered))


def decodes_or_is_corrupt(data: bytes) -> None:
    try:
        found = payloads.decode(data)
    except (ClientTooOldError, CorruptPayloadError):
        return
    assert payloads.decode(payloads.encode(*found)) == found
    assert codec.decode([part.data for part in codec.encode(*found)]) == found
    for one in found.episodes:
        assert one.num_loss_tokens <= one.num_tokens
        assert one.prompt_length <= one.num_tokens
        assert one.min_policy_version is None or isinstance(one.min_policy_version, int)
        assert not one.turns or sum(turn.num_tokens for turn in one.turns) == len(one.token_ids)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(episode(), min_size=1, max_size=3), st.data())
def test_fuzz_altered_bytes(episodes: list[Episode], data: st.DataObject) -> None:
    raw = bytearray(payloads.encode(episodes))
    edits = st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(edits, min_size=1, max_size=4)):
        raw[position] = value
    decodes_or_is_corrupt(bytes(raw))


@settings(max_examples=examples(300), deadline=None)
@given(
    st.binary(max_size=200), st.sampled_from([b"", b"\x28\xb5\x2f\xfd", b"\x10" + bytes(7) + b"{"])
)
@example(b"", b"\x28\xb5\x2f\xfd")
def test_fuzz_random_bytes(data: bytes, start: bytes) -> None:
    with pytest.raises(CorruptPayloadError):
        payloads.decode(start + data)


PLAIN = ["lengths", "token_ids", "prompt_ids", "loss_mask", "logprobs", "rewards", "json", "x"]
NESTED = ["turn/counts", "turn/lengths", "token/a", "episode/a", "each/0/token/a", "group/a"]
NAMES = st.sampled_from([*PLAIN, *NESTED])


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(NAMES, arrays(None).filter(lambda array: isinstance(array, np.ndarray))))
def test_fuzz_foreign_tensors(tensors: dict[str, NDArray[Any]]) -> None:
    shown = {name.replace("/", "__"): array for name, array in tensors.items()}
    decodes_or_is_corrupt(blob(**shown))


def test_zstd_frames_that_claim_too_much_or_nothing() -> None:
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little") + b"\1\0\0"
    with pytest.raises(CorruptPayloadError, match="claim to hold 1099511627776"):
        payloads.decode(bomb)
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(blob())
    with pytest.raises(CorruptPayloadError, match="claim to hold"):
        payloads.decode(unknown)
    with pytest.raises(CorruptPayloadError):
        payloads.decode(bytes(payloads.encode([], compression="zstd")) + b"\0")


def test_a_sound_zstd_frame_may_not_expand_without_limit() -> None:
    """3 KB that really contain more than 64 MiB of zeros are refused before memory is allocated."""
    size = framing.FREE_EXPANSION_BYTES + 2**17
    blocks = [((2**17 << 3) | 1 << 1).to_bytes(3, "little") + b"\0"] * (size // 2**17 - 1)
    last = ((2**17 << 3) | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    bomb = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"".join(blocks) + last
    assert len(zstandard.ZstdDecompressor().decompress(bomb)) == size
    tracemalloc.start()
    with pytest.raises(CorruptPayloadError, match=f"claim to hold {size}"):
        payloads.decode(bomb)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_payload_that_would_expand_too_much_is_not_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "FREE_EXPANSION_BYTES", 2**10)
    zeros = Episode(token_ids=[0] * 100_000, loss_mask=[True] * 100_000)
    data = payloads.encode([zeros], compression="zstd")
    assert data == payloads.encode([zeros])
    assert payloads.decode(data).episodes[0].num_tokens == 100_000
