"""A stand-in for XTuner, which is not on an index, on the import path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))  # other processes inherit it

from replaydb.integrations.xtuner import SqlReplayBuffer, SqlReplayBufferConfig

Open = Callable[..., SqlReplayBuffer]


@pytest.fixture
def build(url: str) -> Iterator[Open]:
    """Opens buffers, which are closed at the end of the test."""
    with ExitStack() as opened:

        def made(**fields: Any) -> SqlReplayBuffer:
            buffer = SqlReplayBufferConfig(url=url, **fields).build()
            opened.callback(buffer._storage.close)
            return buffer

        yield made
