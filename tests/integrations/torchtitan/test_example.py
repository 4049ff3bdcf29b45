"""The example goes over its restart."""

from __future__ import annotations

from examples import torchtitan_restart as example


async def test_nothing_is_generated_twice(url: str) -> None:
    first = await example.live(url, 5)
    second = await example.live(url, example.PROMPTS - 5)
    everything = list(range(example.PROMPTS))
    assert sorted(first[1] + second[1]) == everything
    assert set(first[0] + second[0]) == set(everything)
    # What the first life had in hand when it closed, by two workers at most, is generated now.
    assert len(set(first[0]) & set(second[0])) <= 2
