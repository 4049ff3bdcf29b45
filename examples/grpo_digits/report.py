"""The closing table: what was put, drawn and lost, and what was learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.table import Table

from examples.grpo_digits.database import Database
from examples.grpo_digits.job import BUFFER_NAME, GROUPS_PER_STEP
from examples.grpo_digits.tally import Tally

REWARD_TO_GAIN = 0.3

STORED_WITH_PAYLOAD = """
    SELECT group_uid FROM group_overview
    WHERE group_id IN (SELECT group_id FROM payload)
"""
DRAWS = """
    SELECT run_name, step, draw_id, outcome, count(*) FROM training_history
    GROUP BY run_name, step, draw_id, outcome ORDER BY draw_id
"""
LEARNING_CURVE = (
    "SELECT run_name, min_policy_version / 50 * 50 AS from_version, count(*) AS num_groups, "
    "avg(reward_mean) AS reward FROM group_overview GROUP BY 1, 2 ORDER BY 1, 2"
)

KILLED_STEPS = (
    "SELECT run_name, step, draw_id, outcome, count(*) AS num_groups FROM training_history "
    "WHERE (run_name, step) IN (SELECT run_name, step FROM training_history "
    "WHERE outcome <> 'acked') GROUP BY 1, 2, 3, 4 ORDER BY 3"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What plain SQL finds in the database afterwards, beside what the processes noted.

    Attributes:
        num_acknowledged: Groups whose `put` returned.
        num_lost: Those of them that are not there, with their payload.
        trained: Draws of which every group was acked, by step.
        untrained: Other draws, by step, each with what became of its groups.
    """

    num_acknowledged: int
    num_lost: int
    trained: dict[int, list[int]]
    untrained: dict[int, dict[int, str]]

    @classmethod
    async def of(cls, run: str, acknowledged: set[str], database: Database) -> Self:
        """Count."""
        stored = {uid for (uid,) in await database.query(STORED_WITH_PAYLOAD)}
        trained: dict[int, list[int]] = {}
        untrained: dict[int, dict[int, str]] = {}
        for run_name, step, draw_id, outcome, num_groups in await database.query(DRAWS):
            if run_name == run and (outcome, num_groups) == ("acked", GROUPS_PER_STEP):
                trained.setdefault(step, []).append(draw_id)
            elif run_name == run:
                untrained.setdefault(step, {})[draw_id] = outcome
        return cls(len(acknowledged), len(acknowledged - stored), trained, untrained)

    def attempts(self) -> list[str]:
        """Of every step that was begun more than once: each draw, and whether it trained."""
        return [
            ", ".join(
                [
                    f"step {step}",
                    *(f"draw {draw_id} {outcome}" for draw_id, outcome in draws.items()),
                    *(f"draw {draw_id} acked" for draw_id in self.trained.get(step, [])),
                ]
            )
            for step, draws in self.untrained.items()
        ]


def failures(outcome: Outcome, tally: Tally, *, expect_learning: bool) -> list[str]:
    """What did not come out as it must; empty when all is well."""
    found = []
    if outcome.num_lost:
        found.append(f"{outcome.num_lost} groups were acknowledged, but are not in the database")
    if not outcome.num_acknowledged:
        found.append("no group was put")
    wrong = [step for step in range(tally.step) if len(outcome.trained.get(step, [])) != 1]
    if wrong or len(outcome.trained) != tally.step:
        found.append(
            f"{tally.step} steps, {len(outcome.trained)} with an acked batch; not one: {wrong}"
        )
    gain = tally.evaluations[-1]["reward"] - tally.evaluations[0]["reward"]
    if expect_learning and gain < REWARD_TO_GAIN:
        found.append(f"the reward rose by {gain:.2f} only, not by {REWARD_TO_GAIN}")
    return found


def print_report(console: Console, database: Database, outcome: Outcome, tally: Tally) -> None:
    """The table, and where to look next."""
    before, after = tally.evaluations[0], tally.evaluations[-1]
    table = Table(show_header=False, title="GRPO through kill -9", title_justify="left")
    table.add_row("groups put", f"{outcome.num_acknowledged:,} acknowledged to the workers")
    table.add_row("groups sampled", f"{tally.groups_sampled:,} in {len(tally.rewards):,} draws")
    table.add_row("groups lost", f"[bold]{outcome.num_lost}[/]")
    table.add_row("steps trained", f"{len(outcome.trained)}, each by one acked batch")
    for attempt in outcome.attempts():
        table.add_row("killed in between", attempt)
    table.add_row("staleness sampled", tally.staleness_spread)
    table.add_row("reward while training", tally.curve())
    table.add_row("reward, held out", f"[bold]{before['reward']:.2f} -> {after['reward']:.2f}[/]")
    table.add_row(
        "sorted all 8 right", f"{before['share_right']:.0%} -> {after['share_right']:.0%}"
    )
    table.add_row("for example, before", before["example"])
    table.add_row("after", after["example"])
    console.print()
    console.print(table)
    console.print("[bold]The database[/]", database.location, soft_wrap=True, highlight=False)
    console.print("[bold]Look at it[/]")
    for command in (
        *([database.start_command] if database.start_command else []),
        f'replaydb stats {BUFFER_NAME} --url "{database.shown_url}"',
        database.shell_command(LEARNING_CURVE),
        database.shell_command(KILLED_STEPS),
    ):
        console.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)
