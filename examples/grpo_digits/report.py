"""The closing table: what was put, drawn and lost, by plain SQL, and what was learned."""

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
#: What became of the groups of every draw.
DRAWS = """
    SELECT step, draw_id, outcome, count(*), avg(reward_mean),
           min(staleness), avg(staleness), max(staleness)
    FROM training_history WHERE buffer_name = '{run}'
    GROUP BY step, draw_id, outcome ORDER BY draw_id
"""
#: What to ask the database next, for a person to run.
QUESTIONS = {
    "what was learned": """
        SELECT min_policy_version / 50 * 50 AS from_version,
        count(*) AS num_groups, avg(reward_mean) AS reward
        FROM group_overview WHERE buffer_name = '{run}' GROUP BY 1 ORDER BY 1
    """,
    "which prompts are hard": """
        SELECT tags ->> 'distinct_digits' AS distinct_digits,
        count(*) AS num_groups, avg(reward_mean) AS reward
        FROM group_overview WHERE buffer_name = '{run}' GROUP BY 1 ORDER BY 1
    """,
    "how completions ended": """
        SELECT min_policy_version / 50 * 50 AS from_version, finish_reason,
        count(*) AS num_episodes, avg(num_loss_tokens) AS mean_length
        FROM episode_overview WHERE buffer_name = '{run}' GROUP BY 1, 2 ORDER BY 1, 2
    """,
    "what the model wrote": """
        SELECT min_policy_version AS version, prompt_uid, text, reward
        FROM episode_overview JOIN transcript USING (group_id, position)
        WHERE buffer_name = '{run}' ORDER BY group_id DESC LIMIT 10
    """,
    "which batch trained the step that was killed": """
        SELECT step, draw_id, outcome, outcome_reason, count(*) AS num_groups
        FROM training_history WHERE buffer_name = '{run}' AND step IN
        (SELECT step FROM training_history WHERE buffer_name = '{run}' AND outcome <> 'acked')
        GROUP BY 1, 2, 3, 4 ORDER BY 2
    """,
}


@dataclass(frozen=True)
class Evaluation:
    """Greedy completions of held-out prompts.

    Attributes:
        reward: Their mean reward.
        share_right: How many are right in all eight places.
        example: One to look at.
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
    """The groups of a draw that came to the same end: a row of `DRAWS`."""

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
    """What plain SQL finds in the database, beside what the workers noted.

    Attributes:
        num_acknowledged: Groups whose `put` returned.
        num_lost: Those of them that are not there, with their payload.
        trained: Draws that were acked whole, in their order.
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
        whole = ("acked", GROUPS_PER_STEP)
        return cls(
            len(acknowledged),
            len(acknowledged - stored),
            [draw for draw in draws if (draw.outcome, draw.num_groups) == whole],
            [draw for draw in draws if (draw.outcome, draw.num_groups) != whole],
        )


def failures(
    outcome: Outcome, step: int, before: Evaluation, after: Evaluation, *, expect_learning: bool
) -> list[str]:
    """What did not come out as it must; empty when all is well."""
    found = []
    if not outcome.num_acknowledged:
        found.append("no group was put")
    if outcome.num_lost:
        found.append(f"{outcome.num_lost} groups were acknowledged, but are not in the database")
    if [draw.step for draw in outcome.trained] != list(range(step)):
        found.append(f"of {step} steps, not each has one acked batch: {outcome.trained}")
    gain = after.reward - before.reward
    if expect_learning and gain < REWARD_TO_GAIN:
        found.append(f"the reward rose by {gain:.2f} only, not by {REWARD_TO_GAIN}")
    return found


def print_report(
    console: Console,
    database: Database,
    run: str,
    outcome: Outcome,
    before: Evaluation,
    after: Evaluation,
) -> None:
    """The table, and where to look next."""
    draws = sorted(outcome.trained + outcome.untrained, key=lambda draw: draw.draw_id)
    table = Table(show_header=False, title="GRPO through kill -9", title_justify="left")
    table.add_row("groups put", f"{outcome.num_acknowledged:,} acknowledged to the workers")
    table.add_row(
        "groups drawn", f"{sum(draw.num_groups for draw in draws):,} in {len(draws):,} draws"
    )
    table.add_row("groups lost", f"[bold]{outcome.num_lost}[/]")
    table.add_row("steps trained", f"{len(outcome.trained)}, each by one acked batch")
    for step in {draw.step for draw in outcome.untrained}:
        attempts = [f"draw {draw.draw_id} {draw.outcome}" for draw in draws if draw.step == step]
        table.add_row("killed in between", f"step {step}: {', '.join(attempts)}")
    if outcome.trained:
        staleness = [float(draw.mean_staleness) for draw in outcome.trained]
        table.add_row(
            "staleness trained on",
            f"min {min(draw.least_stale for draw in outcome.trained)} · "
            f"mean {sum(staleness) / len(staleness):.2f} · "
            f"max {max(draw.most_stale for draw in outcome.trained)}",
        )
    table.add_row("reward while training", curve([draw.reward for draw in outcome.trained]))
    table.add_row("reward, held out", f"[bold]{before.reward:.2f} -> {after.reward:.2f}[/]")
    table.add_row("sorted all 8 right", f"{before.share_right:.0%} -> {after.share_right:.0%}")
    table.add_row("for example, before", before.example)
    table.add_row("after", after.example)
    console.print()
    console.print(table)

    def show(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    show(f"The database: {database.location}")
    if database.start_command:
        show(f"\n# start it again\n{database.start_command}")
    show(f'\n# what is in the buffer\nreplaydb buffers show {run} --url "{database.shown_url}"')
    for question, sql in QUESTIONS.items():
        show(f"\n# {question}\n{database.shell_command(' '.join(sql.format(run=run).split()))}")


def curve(rewards: list[float], width: int = 32) -> str:
    """The rewards from 0 to 1 as a line of bars."""
    edges = [round(column * len(rewards) / width) for column in range(width + 1)]
    parts = [rewards[a:b] for a, b in pairwise(edges) if b > a]
    means = [sum(part) / len(part) for part in parts]
    return "".join(BARS[min(int(mean * len(BARS)), len(BARS) - 1)] for mean in means)
