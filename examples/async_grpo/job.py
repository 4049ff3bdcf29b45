"""What all processes share: names, sizes, the dataset, and the points at which they can be killed.

Every process opens the buffer with the same settings, so that any of them can be the first.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch

from examples.grpo_digits import task

RUN = BUFFER = "async-grpo"
NUM_WORKERS = 2
GROUPS_PER_PUT = 4
GROUPS_PER_STEP = 8
MAX_STALENESS = 2
#: Cursor with the number of steps in the valid checkpoint, which is also the policy version.
STEP = "step"

#: Prompts in the order in which they are used, again from the first one after the last one.
DATASET = task.training_prompts(4096, torch.Generator().manual_seed(0))


def parser_of(module: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all commands have."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--url", required=True, help="URL of the database")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoints")
    return parser


def worker_cursor(worker: int) -> str:
    """Return the name of the cursor with the number of prompts that a worker has completed."""
    return f"worker-{worker}"


def phase(folder: Path, name: str) -> None:
    """Kill this process if a file requests it, once: `touch FOLDER/kill/NAME`."""
    try:
        (folder / "kill" / name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
