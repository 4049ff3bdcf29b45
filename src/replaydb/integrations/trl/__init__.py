"""TRL: GRPO whose generations are stored, and replayed where a group teaches nothing.

grpo        `GRPOTrainer` with replay
outputs     its fields of a generation as groups, and back
async_grpo  a durable rollout buffer for `AsyncGRPOTrainer`, which is experimental in TRL; not
            imported here
samples     its samples as groups, and back
chats       chat completions in the metadata of episodes
"""

from replaydb.integrations.trl.grpo import ReplayGRPOTrainer, ReplayMixin

__all__ = ["ReplayGRPOTrainer", "ReplayMixin"]
