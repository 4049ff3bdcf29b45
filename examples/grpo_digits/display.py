"""Progress display: a live bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import replaydb as rdb

FACTS = "reward {reward:.2f} · {put:,.0f} groups · staleness {staleness:.1f}"


class Display:
    """Progress of the demo. Use it as a context manager."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._interval = 1.0 if console.is_terminal else 5.0
        self._began = self._updated = time.monotonic()
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, facts="starting")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def log(self, text: str) -> None:
        """Print a permanent line."""
        elapsed = time.monotonic() - self._began
        self._console.print(f"[dim]{elapsed:5.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    async def update(self, buffer: rdb.Buffer, step: int) -> None:
        """Show the progress of training with metrics of the buffer, at most once per interval."""
        if time.monotonic() - self._updated < self._interval:
            return
        self._updated = time.monotonic()
        metrics = await buffer.metrics(draws=10)
        facts = FACTS.format(
            reward=metrics.get("train/reward_mean", 0.0),
            put=metrics["gen/groups"],
            staleness=metrics.get("train/staleness_mean", 0.0),
        )
        self._bar.update(self._task, completed=step, facts=facts)
        if not self._console.is_terminal:
            self.log(f"step {step}/{self._num_steps} · {facts}")
