"""Buffers, leases and loaders: the public calls to put and draw groups."""

from __future__ import annotations

from replaydb.buffer.buffer import Buffer
from replaydb.buffer.lease import Lease
from replaydb.buffer.loader import Loader

__all__ = ["Buffer", "Lease", "Loader"]
