"""A fixture for exports with small files."""

from __future__ import annotations

import pytest

from replaydb.analysis import decoded
from replaydb.exchange import exporting


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file for every two groups."""
    monkeypatch.setattr(decoded, "CHUNK_GROUPS", 2)
    monkeypatch.setattr(exporting, "PART_BYTES", 1)
