"""One safetensors file holds weights, optimizer state, step and policy version, all of one moment.

It comes into being by one rename, so a reader, or a trainer that was killed, finds a whole one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Position:
    """How far training has come: optimizer steps made, and the version these weights carry."""

    step: int
    policy_version: int


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position
) -> None:
    """Write the checkpoint, in the place of one that did not come to count."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in state.items()}
    metadata = {"step": str(position.step), "policy_version": str(position.policy_version)}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata)
    os.replace(unfinished, path)


def load_weights(path: Path, model: nn.Module) -> Position:
    """Load the weights only, as a rollout worker does."""
    with safe_open(path, framework="pt") as file:
        model.load_state_dict(_part(file, "model/"))
        return _position(file)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
    """Load weights and optimizer, as a trainer that resumes does."""
    with safe_open(path, framework="pt") as file:
        model.load_state_dict(_part(file, "model/"))
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in _part(file, "optimizer/").items():
            index, name = key.split("/")
            state.setdefault(int(index), {})[name] = tensor
        param_groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": param_groups})
        return _position(file)


def _part(file: safe_open, prefix: str) -> dict[str, Tensor]:
    keys = (key for key in file.keys() if key.startswith(prefix))  # noqa: SIM118 - not a mapping
    return {key.removeprefix(prefix): file.get_tensor(key) for key in keys}


def _position(file: safe_open) -> Position:
    metadata = file.metadata()
    return Position(int(metadata["step"]), int(metadata["policy_version"]))
