"""How often tokens are stored that turns repeat, and extras of tokens that they share."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from replaydb import Episode, Ragged, Turn, codec
from replaydb.codec import sharing
from replaydb.codec.sharing import repeated_bytes, repetition


def repeated(*contexts: list[int]) -> float:
    """Return the result for an episode of turns without a response."""
    turns = [Turn(prompt_ids=context, response_ids=[]) for context in contexts]
    return repetition([Episode(turns=turns)])


A, B, C = (list(range(start, start + 1000)) for start in (1000, 2000, 3000))


@pytest.mark.parametrize(
    ("contexts", "times"),
    [
        ([A, A + B, A + B + C], 1),  # all shared
        ([A, B, C], 1),  # nothing in common
        ([A, A + B, A], 1),  # shortened
        ([A + B, [7, *A, *B], [8, *A, *B]], 3),
        ([A + B, A + C, A + B + C], 4 / 3),  # the last begins like the first, but C follows
        ([A, B, C, B], 1),  # the second branch again
        ([[1], [1], []], 1),  # too short to recognize
    ],
)
def test_repetition(contexts: list[list[int]], times: float) -> None:
    assert repeated(*contexts) == pytest.approx(times, rel=0.02)


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_repetition_is_computed_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = repeated(A + B, [7, *A, *B], [8, *A, *B])
    monkeypatch.setattr(sharing, "_BLOCK", block)
    assert repeated(A + B, [7, *A, *B], [8, *A, *B]) == expected
    assert repeated(A + B) == 1.0  # each token has other ones after it


def test_repetition_takes_few_bytes_for_each_token() -> None:
    tokens = np.arange(300_000)
    turns = [Turn(prompt_ids=tokens[i:], response_ids=[]) for i in range(4)]
    several = [Episode(turns=turns)]
    tracemalloc.start()
    try:
        assert repetition(several) == pytest.approx(4, rel=0.01)
        assert tracemalloc.get_traced_memory()[1] < 3 * sum(4 * turn.num_tokens for turn in turns)
    finally:
        tracemalloc.stop()


def test_repetition_of_nothing() -> None:
    assert repetition([]) == repetition([Episode(prompt_ids=[], response_ids=[])]) == 1.0


def test_prompts_that_episodes_share_are_no_repetition() -> None:
    episodes = [Episode(prompt_ids=A, response_ids=one) for one in (B, C)]
    assert repetition(episodes) == 1.0


def repeated_extra(*episodes: Episode) -> int:
    """Return the bytes of the extra "experts" that are stored again, from both sides."""
    core, *others = codec.encode(episodes)
    found = repeated_bytes(codec.decode([part.data for part in (core, *others)]).episodes)
    assert found == core.repeated
    assert not any(part.repeated for part in others)
    assert found.keys() <= {"experts"}
    return found.get("experts", 0)


def two_turns(first: Any, second: Any) -> Episode:
    """Return turns of 1,000 and 2,000 tokens, each with its extra."""
    return Episode(
        turns=[
            Turn(prompt_ids=A[:900], response_ids=A[900:], token_extras=first),
            Turn(prompt_ids=A + B[:900], response_ids=B[900:], token_extras=second),
        ]
    )


EXPERTS = np.random.default_rng(3).integers(0, 9, (2000, 4), np.uint8)
CHANGED = EXPERTS.copy()
CHANGED[700] += 1  # so the tokens 700 to 999 are stored again


@pytest.mark.parametrize(
    ("first", "second", "num_bytes"),
    [
        (EXPERTS[:1000], EXPERTS, 0),
        (EXPERTS[:999], EXPERTS[:1999], 0),  # the last token of the first turn has no value yet
        (EXPERTS[:1000], CHANGED, 300 * 4),
        (EXPERTS[:999], CHANGED[:1999], 299 * 4),
        (EXPERTS[:100], EXPERTS, 1000 * 4),  # of the response only, with zeros before
        (None, EXPERTS, 0),  # nothing to share
        (EXPERTS[:1000], EXPERTS[:100], 0),  # of the response
    ],
)
def test_repeated_bytes(first: Any, second: Any, num_bytes: int) -> None:
    extras = ({} if one is None else {"experts": one} for one in (first, second))
    assert repeated_extra(two_turns(*extras)) == num_bytes


def test_repeated_bytes_of_a_variable_number_of_values() -> None:
    counts = np.arange(2000) % 3
    values = np.arange(counts.sum(), dtype=np.int16)
    changed = values.copy()
    changed[counts[:700].sum()] += 1  # token 700 has values
    first = Ragged(values[: counts[:1000].sum()], counts[:1000])
    several = {"experts": first}, {"experts": Ragged(changed, counts)}
    size = int(counts[700:1000].sum()) * 2 + 301 * 8  # with their offsets
    assert repeated_extra(two_turns(*several)) == size


def test_arrays_over_the_tokens_of_all_turns_are_repeated() -> None:
    turns = two_turns({}, {}).turns
    extras = {"experts": np.concatenate([EXPERTS[:1000], EXPERTS])}
    assert repeated_extra(Episode(turns=turns, token_extras=extras)) == 1000 * 4


def test_prompts_of_episodes_have_an_extra_once() -> None:
    several = [
        Episode(prompt_ids=A, response_ids=one, token_extras={"experts": experts})
        for one, experts in ((B, EXPERTS), (C, EXPERTS), (C, CHANGED))
    ]
    assert repeated_extra(*several[:2]) == 0
    assert repeated_extra(*several) == 300 * 4


@pytest.mark.parametrize("other", [EXPERTS.astype(np.int16), EXPERTS[:, :2].astype(np.float32)])
def test_an_extra_of_another_type_is_repeated(other: Any) -> None:
    several = [
        Episode(prompt_ids=A, response_ids=B, token_extras={"experts": experts})
        for experts in (EXPERTS, other)
    ]
    assert repeated_extra(*several) == other[:1000].nbytes
