"""torchtitan (`torchtitan.experiments.rl`): its work buffer, and its rollouts, in a store.

RolloutGroupWorkBuffer    the controller's buffer; work of every state survives a restart
to_group                  a `RolloutGroup` as an `EpisodeGroup`; `to_rollout_group` is the way back
to_training_samples       the rows that a trainer takes, of a stored group
to_training_sample        one row; `from_training_sample` is the way back

`docs/integrations/torchtitan.md` has the lines to change.
"""

from replaydb.integrations.torchtitan.buffer import RolloutGroupWorkBuffer
from replaydb.integrations.torchtitan.rollouts import (
    from_training_sample,
    to_group,
    to_rollout_group,
    to_training_sample,
    to_training_samples,
)

__all__ = [
    "RolloutGroupWorkBuffer",
    "from_training_sample",
    "to_group",
    "to_rollout_group",
    "to_training_sample",
    "to_training_samples",
]
