"""Format 2 of random forests of turns, with limits so small that every choice of it is made."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.mutations import mutants_of
from replaydb import codec
from replaydb.codec import compaction, format2_writer, sharing
from replaydb.domain.episodes import Episode, Turn
from replaydb.domain.episodes.context import GroupContext
from replaydb.domain.settings import Compression
from replaydb.errors import ClientTooOldError, CorruptPayloadError
from support.examples import examples
from support.payloads import rebuilt
from support.samples import contexts, forests

COMPRESSIONS = st.sampled_from([None, "zstd"])


@pytest.fixture(autouse=True, scope="module")
def small_limits() -> Iterator[None]:
    """Share single tokens, narrow and compress small columns, and write parts for small extras."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "LEAST_SHARED", 1)
        patch.setattr(compaction, "LEAST_BYTES", 1)
        patch.setattr(format2_writer, "JOINED_BYTES", 16)
        patch.setattr(format2_writer, "LIGHT_BYTES", 8)
        patch.setattr(format2_writer, "LIGHT_BYTES_PER_TOKEN", 4)
        yield


def encoded(*given: object, compression: Compression | None) -> list[bytes]:
    return [bytes(one.data) for one in codec.encode(*given, compression=compression)]  # type: ignore[arg-type]


@settings(max_examples=examples(90), deadline=None)
@given(forests, contexts, COMPRESSIONS)
def test_round_trip(
    episodes: list[Episode], context: GroupContext, compression: Compression | None
) -> None:
    core, *_ = given = codec.encode(episodes, context, compression=compression)
    parts = [bytes(one.data) for one in given]
    found = codec.decode(parts)
    assert found == codec.decode(parts[::-1]) == (episodes, context)
    assert sharing.repeated_bytes(found.episodes) == core.repeated
    assert codec.decode(parts[:1], fields=()) == codec.decode(parts, fields=())
    assert codec.decode(encoded(*found, compression=compression)) == found
    assert [rebuilt(one) for one in episodes] == episodes


@settings(max_examples=examples(90), deadline=None)
@given(forests, contexts, COMPRESSIONS, st.integers(0, 2**32))
def test_fuzz_altered_forests(
    episodes: list[Episode], context: GroupContext, compression: Compression | None, seed: int
) -> None:
    """What decodes can be created by the constructors, and encoded again."""
    parts = encoded(episodes, context, compression=compression)
    random = Random(seed)
    for _ in range(5):
        i = random.randrange(len(parts))
        altered = next(mutants_of("payload", [parts[i]], random))
        try:
            found = codec.decode([*parts[:i], altered, *parts[i + 1 :]])
        except (ClientTooOldError, CorruptPayloadError):
            continue
        assert [rebuilt(one) for one in found.episodes] == found.episodes
        assert codec.decode(encoded(*found, compression=compression)) == found


def test_a_turn_that_is_there_twice() -> None:
    """The parent of a turn is its first place."""
    first = Turn(prompt_ids=[1], response_ids=[2])
    second = Turn(parent=first, new_ids=[3], response_ids=[4])
    episodes = [Episode(turns=[first, second, first])]
    assert codec.decode([part.data for part in codec.encode(episodes)]).episodes == episodes
