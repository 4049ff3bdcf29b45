"""Supervisor: starts the processes, monitors the buffer, and kills two processes halfway."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import replaydb as rdb
from examples.grpo_digits.child import Child
from examples.grpo_digits.display import Display
from examples.grpo_digits.job import STEP, acknowledged_path

NUM_WORKERS = 2


async def supervise(
    buffer: rdb.Buffer, folder: Path, url: str, num_steps: int, seconds: float, display: Display
) -> bool:
    """Train until the steps are done or the time is up, with a kill halfway.

    Returns:
        Whether the trainer was killed and has trained since then.

    Raises:
        ChildFailedError: A process exited with an error.
    """
    trainer = Child("trainer", folder, buffer.name, num_steps, log=folder / "trainer.log", url=url)
    workers = [
        Child("rollout", folder, buffer.name, n, log=folder / f"rollout-{n}.log", url=url)
        for n in range(NUM_WORKERS)
    ]
    began = killed_after = None
    recovered = False
    async with AsyncExitStack() as running:
        for child in (trainer, *workers):
            await running.enter_async_context(child)
        while trainer.exit_code is None:
            await asyncio.sleep(0.1)
            for child in (trainer, *workers):
                child.check()
            step = await buffer.cursor(STEP)
            await display.update(buffer, step)
            if step == 0:
                continue
            began = began or time.monotonic()
            time_used = (time.monotonic() - began) / seconds
            is_due = killed_after is None and max(step / num_steps, time_used) >= 0.5
            if is_due and (leases := await buffer.leases()):  # in the middle of a step
                await trainer.kill()
                await workers[0].kill()
                killed_after = await buffer.cursor(STEP)
                display.log(
                    f"[bold red]kill -9[/]  trainer and rollout 0, after step {killed_after}; "
                    f"the trainer had leased {leases[0].num_groups} groups"
                )
                await trainer.start()
                await workers[0].start()
                restarted = time.monotonic()
            elif killed_after is not None and not recovered and step > killed_after:
                recovered = True
                display.log(
                    f"[bold green]resumed[/]  from the checkpoint of step {killed_after}, "
                    f"{time.monotonic() - restarted:.1f} s after the restart"
                )
            elif recovered and time_used >= 1:
                trainer.ask_to_stop()
    return recovered


def group_uids_acknowledged(folder: Path) -> set[str]:
    """Return the uids of groups whose `put` returned, as recorded by the workers."""
    paths = [acknowledged_path(folder, str(number)) for number in range(NUM_WORKERS)]
    return {uid for path in paths if path.exists() for uid in path.read_text().split()}
