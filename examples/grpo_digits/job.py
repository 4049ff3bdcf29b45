"""What the processes of one demo share: the job, the files they meet in, and when to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

BUFFER_NAME = "digits"
MAX_STALENESS = 4
GROUPS_PER_STEP = 32
URL_VARIABLE = "REPLAYDB_URL"


@dataclass(frozen=True, slots=True)
class Job:
    """One training job, as its processes read it from its folder.

    The URL of the database is not part of it: it may hold a password, and travels in the
    environment.
    """

    run: str
    num_steps: int
    seed: int
    first_version: int

    def save(self, folder: Path) -> None:
        (folder / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / "job.json").read_text()))


def checkpoint_path(folder: Path, step: int) -> Path:
    """The checkpoint after so many steps. It counts once the buffer's cursor of the run says so."""
    return folder / f"checkpoint-{step}.safetensors"


def journal_path(folder: Path) -> Path:
    """Where the trainer reports."""
    return folder / "training.jsonl"


def acknowledged_path(folder: Path, worker: str) -> Path:
    """Where a rollout worker notes the groups that were put."""
    return folder / f"acknowledged-{worker}.jsonl"


class Journal:
    """A file of JSON lines that survives its writer: every line is handed to the system at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0

    def write(self, event: str, **facts: Any) -> None:
        """Append one event."""
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "at": time.time()} | facts) + "\n")

    def unread(self) -> Iterator[dict[str, Any]]:
        """Events since the last call; a line that is still being written waits for the next."""
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._read_to)
            while (line := file.readline()).endswith("\n"):
                self._read_to = file.tell()
                yield json.loads(line)


class StopRequest:
    """Becomes true on SIGTERM, or when the process that started this one is gone."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._terminated = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated.set)

    def __bool__(self) -> bool:
        return self._terminated.is_set() or os.getppid() != self._parent
