"""Stores and their public calls: the names of `replaydb` that need SQLAlchemy."""

from replaydb.buffer.buffer import Buffer
from replaydb.buffer.claim import Claim
from replaydb.buffer.lease import Lease
from replaydb.buffer.loader import Loader, LoaderState
from replaydb.buffer.store import Store
from replaydb.database.filters.group_columns import col
from replaydb.database.repository.puts import OnDuplicate
from replaydb.database.runtime.protocol import Durability
from replaydb.util.publishing import publish

__all__ = [
    "Buffer",
    "Claim",
    "Durability",
    "Lease",
    "Loader",
    "LoaderState",
    "OnDuplicate",
    "Store",
    "col",
]

publish("replaydb", __all__, of=__name__)
del publish
