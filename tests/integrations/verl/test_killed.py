"""A trainer is killed with its queue and its Ray, and another goes on."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from integrations.verl import trainer
from integrations.verl.trainer import Trainer, configuration, forget, numbers
from replaydb import Store


class _Job:
    """A trainer in a process of its own."""

    def __init__(self, mode: str, url: str, folder: Path) -> None:
        folder.mkdir()
        self.mode, self.url, self.folder, self.log = mode, url, folder, folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", trainer.__file__, mode, url, str(folder), "14"],
            stdout=(folder / "output").open("w"),
            stderr=subprocess.STDOUT,
        )

    async def kill_at(self, count: int) -> None:
        """Kill all of it when so many groups are stored; the trainer has taken some already."""
        end = time.monotonic() + 200
        async with Store.open(self.url) as store:
            buffer = await store.buffer("grpo")
            while await buffer.count() < count:
                assert self.process.poll() is None, (self.folder / "output").read_text()
                assert time.monotonic() < end, (self.folder / "output").read_text()
                await asyncio.sleep(0.2)
        family = psutil.Process(self.process.pid).children(recursive=True)
        assert any("ray::TransferQueueController" in one.cmdline()[0] for one in family)
        for one in (psutil.Process(self.process.pid), *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, 20)
        assert self.process.wait(20) == -9

    def go_on(self) -> list[int]:
        """Three steps more, with an empty queue; what the model has been trained on."""
        forget()
        life = Trainer(configuration(self.mode, self.url, self.folder), self.log)
        assert life.verl.global_steps == 3
        for _ in range(3):
            life.step()
        life.leave()
        return life.model.trained


async def test_nothing_is_generated_twice_or_lost(
    sqlite_url: str, postgresql_url: str, tmp_path: Path, queue: None
) -> None:
    jobs = [
        _Job("sync", sqlite_url, tmp_path / "sync"),
        _Job("colocate_async", postgresql_url, tmp_path / "async"),
    ]
    for job in jobs:  # which wait for the fifteenth, in the second step after a checkpoint
        await job.kill_at(14)
        assert numbers(job.log) == list(range(14))
    for job in jobs:
        assert sorted(job.go_on()) == list(range(20))
        generated = numbers(job.log)
        assert len(generated) == len(set(generated))
        assert set(range(20)) <= set(generated)
