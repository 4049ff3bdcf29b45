"""The parent's part: start the processes, watch them, kill two of them halfway."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import replaydb as rdb
from examples.grpo_digits.child import Child
from examples.grpo_digits.display import Display
from examples.grpo_digits.job import Job, Journal, acknowledged_path, journal_path
from examples.grpo_digits.tally import Tally

NUM_WORKERS = 2


class Supervisor:
    """Runs one job from its first step to its last.

    Attributes:
        tally: What the trainer has reported.
        recovered: Whether the trainer was killed and has trained again since.
    """

    def __init__(self, job: Job, folder: Path, url: str, seconds: float, display: Display) -> None:
        self.tally = Tally()
        self.recovered = False
        self._job = job
        self._folder = folder
        self._seconds = seconds
        self._display = display
        self._journal = Journal(journal_path(folder))
        self._trainer = Child("trainer", folder, url=url)
        self._workers = [Child("rollout", folder, str(n), url=url) for n in range(NUM_WORKERS)]
        self._killed = False
        self._resumed_at: float | None = None

    async def run(self, buffer: rdb.Buffer) -> None:
        """Train, with a kill halfway, until the steps are done or the time is up.

        Raises:
            ChildFailedError: A process ended on its own with an error.
        """
        children = [self._trainer, *self._workers]
        earlier = await buffer.count()
        async with AsyncExitStack() as running:
            for child in children:
                await running.enter_async_context(child)
            while self._trainer.exit_code is None:
                await asyncio.sleep(0.1)
                self._read_journal()
                self._display.update(self.tally, await buffer.count() - earlier)
                for child in children:
                    child.check()
                if not self._killed and self._progress() >= 0.5:
                    await self._kill_and_start_again()
                elif self.recovered and self._time_used() >= 1:
                    self._trainer.ask_to_stop()
        self._read_journal()
        self._display.update(self.tally, await buffer.count() - earlier)

    def group_uids_acknowledged(self) -> set[str]:
        """Every group whose `put` returned, as the workers noted them."""
        paths = [acknowledged_path(self._folder, str(number)) for number in range(NUM_WORKERS)]
        events = (event for path in paths for event in Journal(path).unread())
        return {uid for event in events for uid in event["group_uids"]}

    def _progress(self) -> float:
        """From 0 to 1, in steps or in time, whichever is further."""
        return max(self.tally.step / self._job.num_steps, self._time_used())

    def _time_used(self) -> float:
        started_at = self.tally.first_step_at
        return 0.0 if started_at is None else (time.time() - started_at) / self._seconds

    async def _kill_and_start_again(self) -> None:
        victims = [self._trainer, self._workers[0]]
        for victim in victims:
            await victim.kill()
        self._read_journal()
        names = " and ".join(victim.name for victim in victims)
        self._display.say(f"[bold red]kill -9[/]  {names}, after step {self.tally.step}")
        self._killed = True
        for victim in victims:
            await victim.start()

    def _read_journal(self) -> None:
        for event in self._journal.unread():
            self.tally.take(event)
            self._announce(event)

    def _announce(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "started" if self._killed:
                self._resumed_at = event["at"]
                self._display.say(
                    f"[bold green]resumed[/]  trainer, at step {event['step']} of its checkpoint; "
                    f"{event['groups_ready']} groups are ready in the buffer"
                )
            case "step" if self._resumed_at is not None and not self.recovered:
                milliseconds = (event["at"] - self._resumed_at) * 1000
                self.recovered = True
                self._display.say(
                    f"[bold green]training[/] again, first step after {milliseconds:.0f} ms, "
                    "on stored groups"
                )
            case "evaluated":
                self._display.say(
                    f"[bold]held out[/] reward {event['reward']:.2f}, "
                    f"for example {event['example']}"
                )
