"""What the processes of the demo agree on: names, sizes, files, and when to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

GROUPS_PER_STEP = 32
MAX_STALENESS = 4
#: The environment has the database's URL, which may hold a password; command lines are seen by all.
URL_VARIABLE = "REPLAYDB_URL"
#: Name of the cursor that says how many steps were trained, and so which checkpoint counts.
STEP = "step"


def checkpoint_path(folder: Path, step: int) -> Path:
    """The checkpoint after so many steps. It counts once the cursor says so."""
    return folder / f"checkpoint-{step}.safetensors"


def acknowledged_path(folder: Path, worker: str) -> Path:
    """Where a rollout worker notes the uids of groups whose put has returned, one a line."""
    return folder / f"acknowledged-{worker}.txt"


class StopRequest:
    """Becomes true on SIGTERM, or when the process that started this one is gone."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._terminated = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated.set)

    def __bool__(self) -> bool:
        return self._terminated.is_set() or os.getppid() != self._parent
