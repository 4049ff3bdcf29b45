"""Trinity-RFT: its SQL experience storage, on SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from trinity.buffer.storage.sql import SQLExperienceStorage
from trinity.common.config import ReplayBufferConfig, StorageConfig
from trinity.common.experience import EID, Experience

from benchmarks.peers.groups import Group, Shape, number_of


class Adapter:
    """A row with a blob for each experience, committed when the write returns.

    There are no groups: the episodes of a group are written together, and read independently.
    Reading returns the least used experiences, then the newest, and counts their use. It does not
    record the consumer.
    """

    POLICIES = ("order",)
    ONE_STORE = True
    NONE: ClassVar[dict[str, str]] = {
        "uniform": "none: the least used, then the newest",
        "priority": "none: the least used, then the newest",
        "update_priorities": "none",
        "checkpoint": "none needed: a write is committed when it returns",
    }

    def __init__(self, folder: Path, policy: str, capacity: int, shape: Shape) -> None:
        self._episodes = shape.episodes
        self._loop = asyncio.new_event_loop()
        config = StorageConfig(
            name="bench",
            storage_type="sql",
            path=f"sqlite:///{folder}/trinity.db",
            schema_type="experience",
            replay_buffer=ReplayBufferConfig(enable=True),
            max_read_timeout=10,
        )
        self._storage = SQLExperienceStorage(config)
        self._run(self._storage.prepare())

    def put(self, groups: Sequence[Group]) -> None:
        self._run(self._storage.write([one for group in groups for one in _experiences(group)]))

    def sample(self, policy: str, n: int) -> list[Experience]:
        return self._run(self._storage.read(n * self._episodes))

    def parts(self, sample: list[Experience]) -> list[Group]:
        return [
            {
                "token_ids": one.tokens.numpy()[None],
                "mask": one.action_mask.numpy()[None],
                "logprobs": one.logprobs.numpy()[None],
                "reward": torch.tensor([one.reward]).numpy(),
                "row": torch.tensor([int(one.eid.task) * self._episodes + one.eid.run]).numpy(),
            }
            for one in sample
        ]

    def count(self) -> int:
        return self._run(self._storage.count()) // self._episodes

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._run(self._storage.engine.dispose())
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


def _experiences(group: Group) -> list[Experience]:
    return [
        Experience(
            eid=EID(task=number_of(group), run=i),
            tokens=torch.from_numpy(group["token_ids"][i]),
            action_mask=torch.from_numpy(group["mask"][i]),
            logprobs=torch.from_numpy(group["logprobs"][i]),
            reward=float(group["reward"][i]),
        )
        for i in range(len(group["row"]))
    ]
