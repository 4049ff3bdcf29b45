"""What trainers compute from stored groups.

advantages   GRPO, Dr.GRPO, RLOO, pass@k and batch-normalised, over ragged groups
critics      advantages of tokens from a value function, for PPO
importance   ratios to the behaviour policy, staleness masks, how far off-policy a step was
priorities   scores for `Buffer.put(priority=...)` and `Buffer.update_priorities`
replacement  replay in the place of groups that teach nothing
dataset      a `torch.utils.data.IterableDataset`; not imported here, as it imports torch
prometheus   metrics for a scraper (extra `replaydb[prometheus]`); not imported here
"""

from replaydb.batch import PackedBatch, PaddedBatch, SplitBatch
from replaydb.episodes.merging import MergedRow, MergeReport, merge_turns
from replaydb.publishing import publish
from replaydb.replacement import Replacement, replace_uninformative
from replaydb.training import advantages, importance, priorities
from replaydb.training.critics import gae, terminal_rewards

__all__ = [
    "MergeReport",
    "MergedRow",
    "PackedBatch",
    "PaddedBatch",
    "Replacement",
    "SplitBatch",
    "advantages",
    "gae",
    "importance",
    "merge_turns",
    "priorities",
    "replace_uninformative",
    "terminal_rewards",
]

publish(__name__, __all__)
del publish
