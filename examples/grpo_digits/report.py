"""The closing table: what was put, drawn and lost, and what was learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.table import Table

from examples.grpo_digits.database import Database
from examples.grpo_digits.job import BUFFER_NAME
from examples.grpo_digits.tally import Tally

REWARD_TO_GAIN = 0.3

STORED_WITH_PAYLOAD = """
    SELECT group_uid FROM group_overview
    WHERE group_id IN (SELECT group_id FROM payload)
"""
TIMES_SAMPLED = """
    SELECT run_name, sum(times_sampled) FROM group_overview GROUP BY run_name
"""
LEARNING_CURVE = (
    "SELECT run_name, min_policy_version / 50 * 50 AS from_version, count(*) AS num_groups, "
    "avg(reward_mean) AS reward FROM group_overview GROUP BY 1, 2 ORDER BY 1, 2"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What plain SQL finds in the database afterwards, beside what the processes noted.

    Attributes:
        num_acknowledged: Groups whose `put` returned.
        num_lost: Those of them that are not there, with their payload.
        num_drawn: How often the groups of this run were sampled, as the store counted.
    """

    num_acknowledged: int
    num_lost: int
    num_drawn: int

    @classmethod
    async def of(cls, run: str, acknowledged: set[str], database: Database) -> Self:
        """Count."""
        stored = {uid for (uid,) in await database.query(STORED_WITH_PAYLOAD)}
        drawn: dict[str, int] = dict(await database.query(TIMES_SAMPLED))
        return cls(len(acknowledged), len(acknowledged - stored), int(drawn.get(run, 0)))


def failures(outcome: Outcome, tally: Tally, *, expect_learning: bool) -> list[str]:
    """What did not come out as it must; empty when all is well."""
    found = []
    if outcome.num_lost:
        found.append(f"{outcome.num_lost} groups were acknowledged, but are not in the database")
    if not outcome.num_acknowledged:
        found.append("no group was put")
    if outcome.num_drawn < tally.groups_sampled:
        found.append(f"{tally.groups_sampled} groups were sampled, {outcome.num_drawn} counted")
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
    ):
        console.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)
