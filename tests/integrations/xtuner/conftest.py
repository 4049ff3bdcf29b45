"""XTuner is not on the index: the integration imports what stands in for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))  # also those of other processes

from replaydb.integrations.xtuner import SqlReplayBuffer, SqlReplayBufferConfig

Open = Callable[..., SqlReplayBuffer]


@pytest.fixture
def build(url: str) -> Iterator[Open]:
    """Opens buffers, which are closed when the test ends."""
    with ExitStack() as opened:

        def made(**fields: Any) -> SqlReplayBuffer:
            buffer = SqlReplayBufferConfig(url=url, **fields).build()
            opened.callback(buffer._storage.close)
            return buffer

        yield made
