"""TRL: GRPO with stored generations, and replay in place of zero-variance groups.

grpo        `GRPOTrainer` with replay
outputs     conversion of its generation fields to groups, and back
async_grpo  a durable rollout buffer for `AsyncGRPOTrainer`, which is experimental in TRL; not
            imported here
samples     conversion of its samples to groups, and back
chats       chat completions in the metadata of episodes
"""

from replaydb.integrations.trl.grpo import ReplayGRPOTrainer, ReplayMixin

__all__ = ["ReplayGRPOTrainer", "ReplayMixin"]
