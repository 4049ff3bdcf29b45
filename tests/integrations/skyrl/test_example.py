"""The example goes over its restart."""

from __future__ import annotations

from examples import skyrl_restart as example


def test_only_what_is_missing_is_generated(url: str) -> None:
    assert example.live(url, ["1", "2", "3"], trains=["1"]) == ["1", "2", "3"]
    assert example.live(url, ["2", "3", "4"], trains=["2", "3", "4"]) == ["4"]
