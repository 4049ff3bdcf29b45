"""SkyRL: durable generator, and conversion of its outputs to groups with turns.

StoredGenerator        a generator whose outputs are stored when they are generated, and served
                       again after a restart
CheckpointedGroups     a mixin for trainers that settles the groups of complete checkpoints
to_groups              converts a `GeneratorOutput` to groups; `to_generator_output` converts back
merge_stepwise_output  merges turns to rows by SkyRL's rule, and returns its metrics; raises
                       UnmergeableOutputError

See `docs/integrations/skyrl.md` for usage.
"""

from replaydb.integrations.skyrl.generator import CheckpointedGroups, StoredGenerator
from replaydb.integrations.skyrl.outputs import (
    UnmergeableOutputError,
    merge_stepwise_output,
    to_generator_output,
    to_groups,
)

__all__ = [
    "CheckpointedGroups",
    "StoredGenerator",
    "UnmergeableOutputError",
    "merge_stepwise_output",
    "to_generator_output",
    "to_groups",
]
