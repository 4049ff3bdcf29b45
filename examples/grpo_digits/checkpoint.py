"""Weights and optimizer state of one moment, in one safetensors file.

It comes into being by one rename, so a reader, or a trainer that was killed, finds a whole one.
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer


def save(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write the checkpoint, in the place of one that did not come to count."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in state.items()}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    os.replace(unfinished, path)


def load(path: Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load the weights, and for a trainer that resumes its optimizer."""
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
