"""Final report: groups put, drawn and lost, queried with plain SQL, and the learning progress."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from examples.grpo_digits import task
from examples.grpo_digits.database import Database
from examples.grpo_digits.job import GROUPS_PER_STEP
from examples.grpo_digits.model import Policy, generate

REWARD_TO_GAIN = 0.3
HELD_OUT_PROMPTS = 500
BARS = "▁▂▃▄▅▆▇█"

STORED_WITH_PAYLOAD = """
    SELECT group_uid FROM group_overview
    WHERE buffer_name = '{run}' AND group_id IN (SELECT group_id FROM payload)
"""
#: Outcomes of the groups of every draw.
DRAWS = """
    SELECT step, draw_id, outcome, count(*), avg(reward_mean),
           min(staleness), avg(staleness), max(staleness)
    FROM training_history WHERE buffer_name = '{run}'
    GROUP BY step, draw_id, outcome ORDER BY draw_id
"""
#: Queries that the report suggests to users.
QUERIES = {
    "reward by policy version": """
        SELECT min_policy_version / 50 * 50 AS from_version,
        count(*) AS num_groups, avg(reward_mean) AS reward
        FROM group_overview WHERE buffer_name = '{run}' GROUP BY 1 ORDER BY 1
    """,
    "reward by number of distinct digits in the prompt": """
        SELECT tags ->> 'distinct_digits' AS distinct_digits,
        count(*) AS num_groups, avg(reward_mean) AS reward
        FROM group_overview WHERE buffer_name = '{run}' GROUP BY 1 ORDER BY 1
    """,
    "finish reasons by policy version": """
        SELECT min_policy_version / 50 * 50 AS from_version, finish_reason,
        count(*) AS num_episodes, avg(num_loss_tokens) AS mean_length
        FROM episode_overview WHERE buffer_name = '{run}' GROUP BY 1, 2 ORDER BY 1, 2
    """,
    "latest completions": """
        SELECT min_policy_version AS version, prompt_uid, text, reward
        FROM episode_overview JOIN transcript USING (group_id, position)
        WHERE buffer_name = '{run}' ORDER BY group_id DESC LIMIT 10
    """,
    "batches of the step that was killed": """
        SELECT step, draw_id, outcome, outcome_reason, count(*) AS num_groups
        FROM training_history WHERE buffer_name = '{run}' AND step IN
        (SELECT step FROM training_history WHERE buffer_name = '{run}' AND outcome <> 'acked')
        GROUP BY 1, 2, 3, 4 ORDER BY 2
    """,
}


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of greedy completions of held-out prompts.

    Attributes:
        reward: Mean reward.
        share_right: Share of completions with all eight digits right.
        example: One prompt with its completion.
    """

    reward: float
    share_right: float
    example: str

    @classmethod
    def of(cls, policy: Policy) -> Evaluation:
        prompts = task.held_out_prompts(HELD_OUT_PROMPTS)
        responses, _ = generate(policy, prompts)
        rewards = task.rewards_of(prompts, responses)
        return cls(
            rewards.mean().item(),
            (rewards == 1).float().mean().item(),
            task.to_text(prompts[0]) + task.to_text(responses[0]),
        )


class Draw(NamedTuple):
    """The groups of a draw with the same outcome: a row of `DRAWS`."""

    step: int
    draw_id: int
    outcome: str
    num_groups: int
    reward: float
    least_stale: int
    mean_staleness: float
    most_stale: int


@dataclass(frozen=True)
class Outcome:
    """Results of plain SQL queries, compared with the lists of the workers.

    Attributes:
        num_acknowledged: Number of groups whose `put` returned.
        num_lost: Number of these that are not in the database with their payload.
        trained: Draws of which all groups were acked, in order.
        untrained: Other draws.
    """

    num_acknowledged: int
    num_lost: int
    trained: list[Draw]
    untrained: list[Draw]

    @classmethod
    async def of(cls, run: str, acknowledged: set[str], database: Database) -> Outcome:
        stored = {uid for (uid,) in await database.query(STORED_WITH_PAYLOAD.format(run=run))}
        draws = [Draw(*row) for row in await database.query(DRAWS.format(run=run))]
        complete = ("acked", GROUPS_PER_STEP)
        return cls(
            len(acknowledged),
            len(acknowledged - stored),
            [draw for draw in draws if (draw.outcome, draw.num_groups) == complete],
            [draw for draw in draws if (draw.outcome, draw.num_groups) != complete],
        )


def failures(
    outcome: Outcome, step: int, before: Evaluation, after: Evaluation, *, expect_learning: bool
) -> list[str]:
    """Return descriptions of failed checks; empty if all passed."""
    found = []
    if not outcome.num_acknowledged:
        found.append("no group was put")
    if outcome.num_lost:
        found.append(f"{outcome.num_lost} groups were acknowledged, but are not in the database")
    if [draw.step for draw in outcome.trained] != list(range(step)):
        found.append(f"expected one acked batch for each of {step} steps, got {outcome.trained}")
    gain = after.reward - before.reward
    if expect_learning and gain < REWARD_TO_GAIN:
        found.append(f"expected a reward gain of at least {REWARD_TO_GAIN}, got {gain:.2f}")
    return found


def print_report(
    console: Console,
    database: Database,
    run: str,
    outcome: Outcome,
    before: Evaluation,
    after: Evaluation,
) -> None:
    """Print the table, and commands for further queries."""
    draws = sorted(outcome.trained + outcome.untrained, key=lambda draw: draw.draw_id)
    table = Table(show_header=False, title="GRPO through kill -9", title_justify="left")
    table.add_row("groups put", f"{outcome.num_acknowledged:,} acknowledged")
    table.add_row(
        "groups drawn", f"{sum(draw.num_groups for draw in draws):,} in {len(draws):,} draws"
    )
    table.add_row("groups lost", f"[bold]{outcome.num_lost}[/]")
    table.add_row("steps trained", f"{len(outcome.trained)}, each on one acked batch")
    for step in {draw.step for draw in outcome.untrained}:
        attempts = [f"draw {draw.draw_id} {draw.outcome}" for draw in draws if draw.step == step]
        table.add_row("interrupted by the kill", f"step {step}: {', '.join(attempts)}")
    if outcome.trained:
        staleness = [float(draw.mean_staleness) for draw in outcome.trained]
        table.add_row(
            "staleness when trained",
            f"min {min(draw.least_stale for draw in outcome.trained)} · "
            f"mean {sum(staleness) / len(staleness):.2f} · "
            f"max {max(draw.most_stale for draw in outcome.trained)}",
        )
    table.add_row("reward in training", curve([draw.reward for draw in outcome.trained]))
    table.add_row("reward, held out", f"[bold]{before.reward:.2f} -> {after.reward:.2f}[/]")
    table.add_row("all 8 digits right", f"{before.share_right:.0%} -> {after.share_right:.0%}")
    table.add_row("example, before", before.example)
    table.add_row("example, after", after.example)
    console.print()
    console.print(table)

    def show(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    show(f"Database: {database.location}")
    if database.start_command:
        show(f"\n# restart the server\n{database.start_command}")
    show(f'\n# show the buffer\nreplaydb buffers show {run} --url "{database.shown_url}"')
    for title, sql in QUERIES.items():
        show(f"\n# {title}\n{database.shell_command(' '.join(sql.format(run=run).split()))}")


def curve(rewards: list[float], width: int = 32) -> str:
    """Return rewards from 0 to 1 as a line of block characters."""
    edges = [round(column * len(rewards) / width) for column in range(width + 1)]
    parts = [rewards[a:b] for a, b in pairwise(edges) if b > a]
    means = [sum(part) / len(part) for part in parts]
    return "".join(BARS[min(int(mean * len(BARS)), len(BARS) - 1)] for mean in means)
