"""Checkpoints: weights and optimizer state in one safetensors file.

A checkpoint is written atomically, by a rename: a reader never finds an incomplete file, even if
the trainer was killed.
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer


def save(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a checkpoint. It replaces one of the same step that was never acknowledged."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in state.items()}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    os.replace(unfinished, path)


def load(path: Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load the weights, and the optimizer state if an optimizer is given."""
    tensors = load_file(path)
    model.load_state_dict(_under("model/", tensors))
    if optimizer is not None:
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in _under("optimizer/", tensors).items():
            index, name = key.split("/")
            state.setdefault(int(index), {})[name] = tensor
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key.removeprefix(prefix): tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }
