"""Buffer: where groups are put and drawn from."""

from __future__ import annotations

from replaydb.buffer.buffer import Buffer
from replaydb.buffer.lease import Lease
from replaydb.buffer.loader import Loader

__all__ = ["Buffer", "Lease", "Loader"]
