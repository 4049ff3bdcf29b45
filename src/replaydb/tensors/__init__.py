"""Tensors of stored episodes: padded, split at the prompt, or packed."""

from replaydb.tensors.batches import PackedBatch, PaddedBatch, SplitBatch
from replaydb.tensors.columns import Columns
from replaydb.tensors.packing import packed
from replaydb.tensors.padding import padded, split

__all__ = [
    "Columns",
    "PackedBatch",
    "PaddedBatch",
    "SplitBatch",
    "packed",
    "padded",
    "split",
]
