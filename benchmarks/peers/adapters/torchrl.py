"""TorchRL: `LazyMemmapStorage`, groups drawn by `PromptGroupSampler`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import PromptGroupSampler

from benchmarks.peers.groups import Group, Shape, concatenated


class Adapter:
    """Groups are copied into memory-mapped files of fixed shape; in-process.

    An item is an episode. The sampler finds the episodes of a group by key, in an index that it
    rebuilds after each put. The files survive a kill, but their length is not stored: a new buffer
    on them has length 0. `dumps` copies all data to a folder.
    """

    POLICIES = ("uniform",)
    ONE_STORE = True
    NONE: ClassVar[dict[str, str]] = {
        "priority": "not measured: PrioritizedSampler draws items, not groups, and its compiled "
        "part loads only with the torch it was built with, which is not the pinned CPU build",
        "order": "not measured: SamplerWithoutReplacement draws items, not groups",
        "update_priorities": "not measured: as priority",
    }

    def __init__(self, folder: Path, policy: str, capacity: int, shape: Shape) -> None:
        self._dump = folder / "dump"
        self._fields, self._episodes = tuple(shape.fields), shape.episodes
        self._buffer = ReplayBuffer(
            storage=LazyMemmapStorage(
                capacity * shape.episodes, scratch_dir=folder / "storage", existsok=True
            ),
            sampler=PromptGroupSampler(samples_per_group=shape.episodes, group_key="group"),
        )
        if self._dump.exists():
            self._buffer.loads(self._dump)

    def put(self, groups: Sequence[Group]) -> None:
        rows = {name: torch.from_numpy(array) for name, array in concatenated(groups).items()}
        rows["group"] = rows["row"] // self._episodes
        self._buffer.extend(TensorDict(rows, batch_size=[len(groups) * self._episodes]))

    def sample(self, policy: str, n: int) -> TensorDict:
        return self._buffer.sample(n * self._episodes)

    def parts(self, sample: TensorDict) -> list[Group]:
        return [{name: sample[name].numpy() for name in self._fields}]

    def checkpoint(self) -> None:
        self._buffer.dumps(self._dump)

    def count(self) -> int:
        return len(self._buffer) // self._episodes

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._buffer.empty()
