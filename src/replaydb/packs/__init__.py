"""Payloads outside the database: immutable objects, *packs*, in a folder or an object store.

This package knows no tables. The database records which pack holds which parts, and which packs are
still in use.
"""

from replaydb.packs.cache import BUCKET_BYTES, RangeCache
from replaydb.packs.instance import Instance
from replaydb.packs.protocol import Listed, PackDamage, Range
from replaydb.packs.store import PayloadStore

__all__ = [
    "BUCKET_BYTES",
    "Instance",
    "Listed",
    "PackDamage",
    "PayloadStore",
    "Range",
    "RangeCache",
]
