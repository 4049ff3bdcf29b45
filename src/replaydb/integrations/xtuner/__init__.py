"""XTuner v1: its replay buffer, stored in a database."""

from replaydb.integrations.xtuner.buffer import SqlReplayBuffer, SqlReplayBufferConfig, load_dump
from replaydb.integrations.xtuner.storage import SqlReplayPolicy, SqlStorage

__all__ = [
    "SqlReplayBuffer",
    "SqlReplayBufferConfig",
    "SqlReplayPolicy",
    "SqlStorage",
    "load_dump",
]
