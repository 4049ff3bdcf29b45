"""Agents whose turns are durable: workers are killed, and others continue their trajectories.

Each agent calls a tool, asks a sub-agent, shortens its context and answers. If its answer fails a
test, it goes back and tries again. Worker processes claim trajectories and append each turn when it
ends. Two workers are killed with SIGKILL, and a sandbox dies. Meanwhile a trainer leases complete
groups and updates the policy. At the end, SQL shows that each sampled token was in the loss once.

    python -m examples.agents --database sqlite

The inference engine is a fake: it samples random tokens, whatever the trainer has learned.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import replaydb as rdb
from examples.grpo_digits.database import Database, postgresql_server, sqlite_file
from replaydb.training import PaddedBatch, TreeBatch, advantages

VOCABULARY, WIDTH = 64, 32
WORKERS, GROUPS, EPISODES, GROUPS_PER_STEP = 4, 6, 4, 2
TTL = 3.0  # seconds until the trajectory of a killed worker can be claimed again
HANGING = {"task-0/0/3", "task-0/1/3"}  # group/position/turn: the first policy's engine hangs
DYING = "task-1/2/5"  # the sandbox is found dead
TokensInLoss: TypeAlias = Counter[tuple[int, int]]  # of trajectories, by group id and position


async def next_turn(claim: rdb.Claim, turns: list[rdb.Turn], version: int) -> rdb.Turn:
    """Take the next turn. It depends only on the stored turns, so any process can take it."""
    uid = f"{claim.group.group_uid}/{claim.positions[0]}/{len(turns)}"
    context: dict[str, Any]
    match len(turns):
        case 0:
            context = {"prompt_ids": claim.group.prompt_ids}
        case 1:
            context = {"parent": turns[0], "new_ids": tool(turns[0], uid)}
        case 2:  # the sub-agent has a context of its own: the question that it is asked
            context = {"parent": turns[1], "prompt_ids": turns[1].response_ids}
        case 3:  # the main agent continues its context with the answer of the sub-agent
            context = {"parent": turns[1], "new_ids": turns[2].response_ids}
        case 4:  # compaction: from now on the context is the prompt and what was sampled last
            short = [*turns[0].prompt_ids, *turns[3].response_ids]
            context = {"parent": turns[3], "prompt_ids": short}
        case _:  # an answer; if one failed, another one from the same turn
            context = {"parent": turns[4], "new_ids": tool(turns[4], uid)}
    response = await generate(uid, version)
    return rdb.Turn(
        **context,
        uid=uid,
        agent="sub" if len(turns) == 2 else "main",
        response_ids=response,
        logprobs=[-math.log(VOCABULARY)] * len(response),
        policy_version=version,
        state=f"snapshots/{uid}",  # from which another process could restore the sandbox
    )


async def generate(uid: str, version: int) -> list[int]:
    """Return 4 to 12 sampled tokens, in place of an inference engine."""
    await asyncio.sleep(60 if uid in HANGING and version == 0 else 0.01)
    sampler = random.Random(f"{uid} of version {version}")
    return sampler.choices(range(VOCABULARY), k=sampler.randint(4, 12))


def tool(call: rdb.Turn, uid: str) -> list[int]:
    """Return the output of the tool that a turn calls."""
    if uid == DYING:
        raise ConnectionError("the sandbox died")
    return sorted(call.response_ids.tolist())[:6]


def reward_of(answer: rdb.Turn) -> float:
    """Return the share of even tokens. An answer with less than a half fails the test."""
    return float((answer.response_ids % 2 == 0).mean())


async def work(url: str, parent: int) -> None:
    """Claim trajectories one after another until the parent process ends."""
    async with rdb.Store.open(url, run="agents") as store:
        buffer = await store.buffer("agents")
        while os.getppid() == parent:
            for claim in await buffer.claim(ttl=TTL, owner=f"{os.getpid()}", timeout=1):
                with contextlib.suppress(rdb.ClaimExpiredError):  # another worker continues it
                    async with claim:
                        await continue_trajectory(buffer, claim)


async def continue_trajectory(buffer: rdb.Buffer, claim: rdb.Claim) -> None:
    """Take the turns that a trajectory lacks, and finish it."""
    turns = list(claim.turns[claim.positions[0]])  # what earlier workers have stored
    try:
        while len(turns) < 6 or (len(turns) < 8 and reward_of(turns[-1]) < 0.5):
            turn = await next_turn(claim, turns, version=await buffer.refresh())
            await claim.append_turn(turn)  # durable when it returns
            turns.append(turn)
    except ConnectionError as error:
        await claim.fail_episode(str(error))  # the group is completed without it
    else:
        lost = [f"{answer.uid}" for answer in turns[5:-1]]  # kept, but not trained on
        await claim.finish_episode(reward=reward_of(turns[-1]), discarded=lost)


async def kill_hanging(buffer: rdb.Buffer) -> None:
    """Kill the workers that wait for an answer of the engine, when all of them do."""
    owners: dict[str, str | None] = {}
    while not owners.keys() >= HANGING:
        await asyncio.sleep(0.01)
        found = await buffer.trajectories()
        owners = {f"{x.group_uid}/{x.position}/{x.num_turns}": x.claimed_by for x in found}
    for uid in HANGING:
        os.kill(int(owners[uid] or 0), signal.SIGKILL)
    print(f"killed {len(HANGING)} workers in the middle of their trajectories")


class Model(nn.Module):
    """One layer of attention. The mask [A, B, B] states which tokens each token attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, token_ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.tokens(token_ids) + self.positions(position_ids)
        query, key, value = self.projection(hidden).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return torch.log_softmax((hidden + attended) @ self.tokens.weight.T, dim=-1)


def tree_loss(model: Model, tree: TreeBatch, gain: Tensor) -> Tensor:
    """Return the loss of a policy gradient, in which each shared prefix is computed once."""
    logprobs = tree.before(model(tree.token_ids, tree.position_ids, tree.tree_mask))
    sampled: Tensor = logprobs.gather(-1, tree.token_ids[..., None])[..., 0]
    return -(sampled * tree.per_token(gain[tree.episode_index]))[tree.predicted].sum()


def rows_loss(model: Model, rows: PaddedBatch, gain: Tensor) -> Tensor:
    """Return the same loss, in which each path through a tree is a row of its own."""
    causal = torch.ones(2 * rows.token_ids.shape[1:], dtype=torch.bool).tril()
    logprobs = model(rows.token_ids, rows.position_ids, causal & rows.attention_mask[:, None])
    sampled: Tensor = logprobs.gather(-1, rows.labels.clamp(min=0)[..., None])[..., 0]
    return -(sampled * rows.per_token(gain[rows.episode_index]))[rows.labels >= 0].sum()


def take_step(model: Model, batch: rdb.Batch) -> TokensInLoss:
    """Train on trees, and check that padded rows would have had the same gradients."""
    gain = torch.as_tensor(advantages.grpo(batch.rewards, batch.group_index)).double()
    tree, rows = batch.trees(pad_token_id=0), batch.padded(pad_token_id=0)
    gradients = torch.autograd.grad(tree_loss(model, tree, gain), [*model.parameters()])
    others = torch.autograd.grad(rows_loss(model, rows, gain), [*model.parameters()])
    torch.testing.assert_close(gradients, others)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight.data -= 0.01 * gradient
    sizes = [int(one.attention_mask.sum()) for one in (tree, rows)]
    print(f"trained on {sizes[0]} tokens of trees, {sizes[1]} in padded rows")
    trajectories = [(group.id, position) for group in batch for position in group.positions]
    sequences = tree.sequence_index[tree.predicted]
    return Counter(trajectories[i] for i in tree.episode_index[sequences].tolist())


async def open_groups(url: str) -> None:
    """Create the tables, and a group for each prompt."""
    async with rdb.Store.open(url, run="agents", migrate=True) as store:
        buffer = await store.buffer("agents")
        for i in range(GROUPS):
            ids = range(i, i + 32)  # the prompt
            await buffer.open_group("agents", f"task-{i}", EPISODES, min_episodes=3, prompt_ids=ids)


async def train(url: str) -> TokensInLoss:
    """Train on each group when it is complete."""
    model, in_loss = Model().double(), TokensInLoss()  # float64, to compare gradients
    async with rdb.Store.open(url, run="agents") as store:
        buffer = await store.buffer("agents")
        for step in range(GROUPS // GROUPS_PER_STEP):
            async with buffer.lease(GROUPS_PER_STEP, ttl=30, step=step, timeout=60) as lease:
                in_loss += take_step(model, lease.batch)
            if step == 0:
                await kill_hanging(buffer)
            await buffer.advance_policy(step + 1)  # the next turns are sampled by the new policy
    return in_loss


#: Turns by agent. Those that lost to a retry or whose trajectory is unusable are not in a loss.
TURNS = """
    SELECT agent, CASE WHEN e.reward IS NULL THEN 'unusable' WHEN is_discarded THEN 'discarded'
           ELSE 'in the loss' END AS part, count(*), sum(t.num_loss_tokens)
    FROM turn_overview t LEFT JOIN episode_overview e USING (group_id, position)
    GROUP BY agent, part ORDER BY agent, part
"""
#: Usable trajectories: sampled tokens, draws that were trained on, and whether policies changed.
TRAJECTORIES = """
    SELECT group_id, position, min_policy_version < max_policy_version,
           (SELECT sum(num_loss_tokens) FROM turn_overview t WHERE NOT t.is_discarded
            AND t.group_id = e.group_id AND t.position = e.position),
           (SELECT count(*) FROM training_history h
            WHERE h.group_id = e.group_id AND h.outcome = 'acked')
    FROM episode_overview e ORDER BY group_id, position
"""


async def report(database: Database, in_loss: TokensInLoss) -> None:
    """Compare the tokens in the losses with those in the database."""
    for agent, part, num_turns, num_tokens in await database.query(TURNS):
        print(f"{agent}, {part}: {num_turns} turns, {num_tokens} sampled tokens")
    rows = await database.query(TRAJECTORIES)
    assert {(group_id, position): n for group_id, position, _, n, _ in rows} == in_loss
    assert {times_trained for *_, times_trained in rows} == {1}
    print(f"{len(rows)} trajectories, {sum(row[2] for row in rows)} of several policy versions")
    print(f"{in_loss.total()} sampled tokens, each in the loss once")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.agents")
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    with contextlib.ExitStack() as stack:
        if parser.parse_args().database == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            database: Database = stack.enter_context(sqlite_file(Path(folder)))
        else:  # at $REPLAYDB_URL, or a new server
            database = stack.enter_context(postgresql_server(None, keep_running=False))
        url, parent = database.url, os.getpid()
        asyncio.run(open_groups(url))
        fork = multiprocessing.get_context("fork").Process  # everything is imported already
        for _ in range(WORKERS):
            worker = fork(target=lambda: asyncio.run(work(url, parent)))
            worker.start()
            stack.callback(worker.join)
            stack.callback(worker.kill)
        asyncio.run(report(database, asyncio.run(train(url))))


if __name__ == "__main__":
    main()
