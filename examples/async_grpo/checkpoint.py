"""Checkpoints in `FOLDER/step-N`, of which every rank writes its part.

A trainer that was killed may leave an incomplete checkpoint, or a complete one that was not acked.
Only the cursor of the buffer decides which one is valid, so nothing here has to be atomic.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def save(folder: Path, step: int, policy: nn.Module, optimizer: Optimizer) -> None:
    """Write a checkpoint. All ranks call this."""
    dcp.save(_state(policy, optimizer), checkpoint_id=_path(folder, step))


def load(folder: Path, step: int, policy: nn.Module, optimizer: Optimizer) -> None:
    """Load a checkpoint, which any number of ranks has written. All ranks call this."""
    state = _state(policy, optimizer)
    dcp.load(state, checkpoint_id=_path(folder, step))
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def load_weights(folder: Path, step: int, policy: nn.Module) -> None:
    """Load the weights into a policy that is not sharded, in a process that is not a rank."""
    with warnings.catch_warnings(action="ignore"):  # that there are no other ranks
        dcp.load({"model": policy.state_dict()}, checkpoint_id=_path(folder, step), no_dist=True)


def keep_only(folder: Path, step: int) -> None:
    """Delete older checkpoints, and one that was never acked."""
    for path in folder.glob("step-*"):
        if path != _path(folder, step):
            shutil.rmtree(path)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def _state(policy: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model, of_optimizer = get_state_dict(policy, optimizer)
    return {"model": model, "optimizer": of_optimizer}
