"""Payloads outside the database: immutable objects, *packs*, in a folder or an object store.

Knows no tables: which pack holds what, and which of them anybody still needs, is the database's to
say.
"""

from replaydb.packs.place import Place
from replaydb.packs.protocol import Listed, PackDamage, Range

__all__ = ["Listed", "PackDamage", "Place", "Range"]
