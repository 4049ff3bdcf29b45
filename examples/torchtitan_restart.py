"""Restart of torchtitan's work buffer: finalized groups are stored, only the rest is generated.

A data loop, two rollout workers and a trainer process numbers as torchtitan's controller does. The
first run ends early, with unfinished rollouts. The second run starts its dataset from the
beginning, as the controller does, and generates only the missing groups.

    pip install torchtitan
    python -m examples.torchtitan_restart
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import dataclass

from torchtitan.experiments.rl.components.work_buffer import RolloutGroupWork
from torchtitan.experiments.rl.rollout import Rollout, RolloutGroup, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.types import RolloutTurnID

from replaydb.integrations.torchtitan import RolloutGroupWorkBuffer

PROMPTS, COMPLETIONS = 12, 4


@dataclass
class Sample:
    """A sample of the dataset: add one to a number."""

    number: int


def roll_out(group_id: int, sample: Sample) -> RolloutGroup:
    """Return completions of one prompt, with random answers instead of a model."""
    rollouts = []
    for i in range(COMPLETIONS):
        answer = sample.number + random.choice((1, 2))
        reward = float(answer == sample.number + 1)
        turn = RolloutTurn(
            rollout_id=RolloutTurnID(group_id, i, 0),
            prompt_token_ids=[sample.number],
            completion_token_ids=[answer],
            completion_logprobs=[-0.7],
            min_policy_version=0,
            max_policy_version=0,
            prompt_messages=[{"role": "user", "content": f"{sample.number} + 1 ="}],
            completion_message={"role": "assistant", "content": str(answer)},
            env_messages=[],
            env_rewards={"exact": reward},
            metrics=[],
        )
        rollout = Rollout(
            group_id=group_id,
            rollout_id=i,
            turns=[turn],
            status=RolloutStatus.COMPLETED,
            reward=reward,
            advantage=reward - 0.5,
        )
        rollouts.append(rollout)
    return RolloutGroup(group_id=group_id, rollouts=rollouts)


async def run_controller(url: str, most: int) -> tuple[list[int], list[int]]:
    """Run the controller until `most` groups are trained. Return the ids generated and trained."""
    config = RolloutGroupWorkBuffer.Config(url=url, sample_type=Sample)
    buffer = config.build(max_active_rollout_groups=6, window_size=3)
    generated: list[int] = []
    trained: list[int] = []

    async def data_loop() -> None:
        for number in range(PROMPTS):  # from 0 in each run: known groups are skipped
            if await buffer.wait_for_slot():
                work = RolloutGroupWork(group_id=number, sample=Sample(number))
                await buffer.add_work(work)

    async def worker() -> None:
        while (work := await buffer.claim_next()) is not None:
            generated.append(work.group_id)
            await buffer.finalize_work(roll_out(work.group_id, work.sample))

    async def trainer() -> None:
        while len(trained) < most and (group := await buffer.take_finalized()) is not None:
            trained.append(group.group_id)  # the weights would be updated here
            await buffer.release_active_groups(1, reason="trained")
        await buffer.close()

    await asyncio.gather(data_loop(), worker(), worker(), trainer())
    return generated, trained


def main() -> None:
    """Run the controller twice on the same store."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/rollouts.db"
        for most in (5, PROMPTS - 5):
            generated, trained = asyncio.run(run_controller(url, most))
            print(f"generated {generated}, trained {trained}")


if __name__ == "__main__":
    main()
