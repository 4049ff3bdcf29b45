"""How often tokens are stored that turns repeat."""

from __future__ import annotations

import pytest

from replaydb import Episode, Turn
from replaydb.codec.sharing import repetition


def repeated(*contexts: list[int]) -> float:
    """Return the result for an episode of turns without a response."""
    turns = [Turn(prompt_ids=context, response_ids=[]) for context in contexts]
    return repetition([Episode(turns=turns).segments])


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


def test_repetition_of_nothing() -> None:
    assert repetition([]) == repetition([[]]) == 1.0


def test_prompts_that_episodes_share_are_no_repetition() -> None:
    episodes = [Episode(prompt_ids=A, response_ids=one) for one in (B, C)]
    assert repetition([one.segments for one in episodes]) == 1.0
