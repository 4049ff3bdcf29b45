"""verl (V1 trainer): generated groups survive the trainer, its queue and its machine.

- `DurableReplayBuffer` and `DurableReplayBufferAsync` for `trainer.v1.sampler.custom_sampler`
- `DurableAgentLoopManager` for `actor_rollout_ref.rollout.agent.agent_loop_manager_class`
- `AckOnCheckpoint` for `trainer.checkpoint_callback_class`
- `to_tensordict`, `from_tensordict`, `to_dataproto`, `from_dataproto`

See `docs/integrations/verl.md` for the configuration.
"""

from replaydb.integrations.verl.generation import DurableAgentLoopManager, DurableGeneration
from replaydb.integrations.verl.sampler import (
    AckOnCheckpoint,
    DurableReplayBuffer,
    DurableReplayBufferAsync,
)
from replaydb.integrations.verl.tensors import (
    from_dataproto,
    from_tensordict,
    to_dataproto,
    to_tensordict,
)

__all__ = [
    "AckOnCheckpoint",
    "DurableAgentLoopManager",
    "DurableGeneration",
    "DurableReplayBuffer",
    "DurableReplayBufferAsync",
    "from_dataproto",
    "from_tensordict",
    "to_dataproto",
    "to_tensordict",
]
