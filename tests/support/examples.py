"""Numbers of generated examples: a third in `make test`, all of them with the nightly tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

#: The default of Hypothesis.
DEFAULT = 100
_is_nightly = True


def choose_number(config: pytest.Config) -> None:
    """Decide by the option `-m`. Call it before test modules are imported."""
    global _is_nightly
    _is_nightly = "not nightly" not in config.getoption("markexpr")
    settings.register_profile("replaydb", max_examples=examples(DEFAULT))
    settings.load_profile("replaydb")


def examples(most: int) -> int:
    """Return the number of examples of a test that has this many with the nightly tests."""
    return most if _is_nightly else max(1, most // 3)
