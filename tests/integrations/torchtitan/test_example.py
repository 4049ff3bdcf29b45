"""The example runs across its restart."""

from __future__ import annotations

from examples import torchtitan_restart as example


async def test_nothing_is_generated_twice(url: str) -> None:
    first = await example.run_controller(url, 5)
    second = await example.run_controller(url, example.PROMPTS - 5)
    everything = list(range(example.PROMPTS))
    assert sorted(first[1] + second[1]) == everything
    assert set(first[0] + second[0]) == set(everything)
    # Groups that the two workers had in flight when the first process closed are generated now.
    assert len(set(first[0]) & set(second[0])) <= 2
