"""torchtitan (`torchtitan.experiments.rl`): durable work buffer, and conversion of rollouts.

RolloutGroupWorkBuffer    the controller's buffer; work in every state survives a restart
to_group                  converts a `RolloutGroup` to a group; `to_rollout_group` converts back
to_training_samples       returns the training rows of a stored group
to_training_sample        converts one episode to a row; `from_training_sample` converts back

See `docs/integrations/torchtitan.md` for usage.
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
