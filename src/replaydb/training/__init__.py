"""Training utilities: advantages, importance ratios, priorities, datasets and metrics.

advantages   GRPO, Dr.GRPO, RLOO, pass@k and batch-normalised advantages of ragged groups
critics      token-level advantages from a value function (GAE), for PPO
importance   importance ratios, staleness masks, off-policy statistics of a step
priorities   scores for `Buffer.put(priority=...)` and `Buffer.update_priorities`
replacement  replacement of zero-variance groups by replay
balancing    division of groups among ranks
dataset      a `torch.utils.data.IterableDataset`; not imported here, as it imports torch
prometheus   Prometheus collectors (extra `replaydb[prometheus]`); not imported here
"""

from replaydb.batch import PackedBatch, PaddedBatch, SplitBatch, TreeBatch
from replaydb.batch.balancing import balanced
from replaydb.buffer.replacement import Replacement, replace_uninformative
from replaydb.domain.episodes.merging import MergedRow, MergeReport, merge_turns
from replaydb.training import advantages, importance, priorities
from replaydb.training.critics import gae, terminal_rewards
from replaydb.util.publishing import publish

__all__ = [
    "MergeReport",
    "MergedRow",
    "PackedBatch",
    "PaddedBatch",
    "Replacement",
    "SplitBatch",
    "TreeBatch",
    "advantages",
    "balanced",
    "gae",
    "importance",
    "merge_turns",
    "priorities",
    "replace_uninformative",
    "terminal_rewards",
]

publish(__name__, __all__)
del publish
