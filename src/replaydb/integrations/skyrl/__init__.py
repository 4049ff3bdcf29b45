"""SkyRL: its generator made durable, and its outputs as groups, with their turns.

StoredGenerator        a generator whose outputs are stored as they are generated, and served again
                       after a restart
CheckpointedGroups     a mix-in for trainers: what was trained is settled when it is checkpointed
to_groups              a `GeneratorOutput` as groups; `to_generator_output` is the way back
merge_stepwise_output  turns as rows, with SkyRL's rule and the names of its metrics; raises
                       UnmergeableOutputError

`docs/integrations/skyrl.md` has the lines to change.
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
