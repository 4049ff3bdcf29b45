"""The example runs across its restart."""

from __future__ import annotations

from examples import skyrl_restart as example


def test_only_missing_prompts_are_generated(url: str) -> None:
    assert example.run_trainer(url, ["1", "2", "3"], trains=["1"]) == ["1", "2", "3"]
    assert example.run_trainer(url, ["2", "3", "4"], trains=["2", "3", "4"]) == ["4"]
