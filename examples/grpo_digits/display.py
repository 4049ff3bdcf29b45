"""What the person sees: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.grpo_digits.tally import Tally

SECONDS_BETWEEN_LINES = 5.0
FACTS = "reward {reward:.2f} · {put:,} put · {sampled:,} sampled · {staleness:.1f} stale"


class Display:
    """Progress while the demo runs; use it as a context manager."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._started_at = time.monotonic()
        self._last_line_at = 0.0
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, facts="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        elapsed = time.monotonic() - self._started_at
        self._console.print(f"[dim]{elapsed:5.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    def update(self, tally: Tally, groups_put: int) -> None:
        """Show where the training is."""
        facts = FACTS.format(
            reward=tally.reward,
            put=groups_put,
            sampled=tally.groups_sampled,
            staleness=tally.mean_staleness,
        )
        self._bar.update(self._task, completed=tally.step, facts=facts)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line_at > SECONDS_BETWEEN_LINES:
            self._last_line_at = now
            self.say(f"step {tally.step}/{self._num_steps} · {facts}")
