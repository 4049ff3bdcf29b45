"""Batches of groups, and tensors made from them."""

from replaydb.batch.batch import Batch
from replaydb.batch.stored import StoredGroup
from replaydb.batch.tensors import PackedBatch, PaddedBatch, SplitBatch, TreeBatch

__all__ = ["Batch", "PackedBatch", "PaddedBatch", "SplitBatch", "StoredGroup", "TreeBatch"]
