"""Buffer: where groups are put and drawn from."""

from __future__ import annotations

from replaydb.buffer.feeding import Feeding
from replaydb.buffer.lease import Lease
from replaydb.buffer.loader import Loader
from replaydb.buffer.managing import Managing
from replaydb.buffer.pacing import Pacing
from replaydb.buffer.putting import Putting
from replaydb.tracing import traced

__all__ = ["Buffer", "Lease", "Loader"]


@traced
class Buffer(Putting, Feeding, Managing, Pacing):
    """A named collection of episode groups; got from `Store.buffer`.

    Every call is one transaction: it happens whole or not at all, also when it is cancelled.
    Calls may run concurrently, in any number of tasks and processes.
    """
