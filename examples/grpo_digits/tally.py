"""What the demo has to show for itself, counted as it comes in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Tally:
    """What the trainer has reported so far.

    Attributes:
        step: Optimizer steps in the newest checkpoint.
        rewards: Mean reward of the groups of each step.
        staleness: How many groups were sampled at each staleness.
        evaluations: On held-out prompts, before the first step and after the last.
        first_step_at: Seconds since the epoch, or None.
    """

    step: int = 0
    rewards: list[float] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    first_step_at: float | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Count one event of the trainer's journal."""
        match event["event"]:
            case "step":
                self.step = event["step"]
                self.rewards.append(event["reward"])
                self.staleness.update(event["staleness"])
                self.first_step_at = self.first_step_at or event["at"]
            case "evaluated":
                self.evaluations.append(event)

    @property
    def groups_sampled(self) -> int:
        return self.staleness.total()

    @property
    def mean_staleness(self) -> float:
        total = sum(staleness * count for staleness, count in self.staleness.items())
        return total / self.groups_sampled if self.groups_sampled else 0.0

    @property
    def staleness_spread(self) -> str:
        if not self.staleness:
            return "nothing was sampled"
        least, most = min(self.staleness), max(self.staleness)
        return f"min {least} · mean {self.mean_staleness:.2f} · max {most}"

    @property
    def reward(self) -> float:
        """Mean over the last ten steps."""
        last = self.rewards[-10:]
        return sum(last) / len(last) if last else 0.0

    def curve(self, width: int = 32) -> str:
        """The rewards from 0 to 1 as a line of bars."""
        count = len(self.rewards)
        edges = [round(column * count / width) for column in range(width + 1)]
        parts = [self.rewards[a:b] for a, b in pairwise(edges) if b > a]
        means = (sum(part) / len(part) for part in parts)
        return "".join(BARS[min(int(mean * len(BARS)), len(BARS) - 1)] for mean in means)
