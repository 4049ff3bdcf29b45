"""Configuration shared by the processes of the demo: names, sizes, files, and stop requests."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

GROUPS_PER_STEP = 32
MAX_STALENESS = 4
#: Environment variable with the database URL. The URL may contain a password, and command lines are
#: visible to all users.
URL_VARIABLE = "REPLAYDB_URL"
#: Name of the cursor with the number of trained steps, which determines the valid checkpoint.
STEP = "step"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps, valid once the cursor has that step."""
    return folder / f"checkpoint-{step}.safetensors"


def acknowledged_path(folder: Path, worker: str) -> Path:
    """Return the path of a rollout worker's list of uids of acknowledged groups, one per line."""
    return folder / f"acknowledged-{worker}.txt"


class StopRequest:
    """Becomes true on SIGTERM, or when the parent process has exited."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._terminated = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated.set)

    def __bool__(self) -> bool:
        return self._terminated.is_set() or os.getppid() != self._parent
