"""Trainer: all ranks lease a step's groups, train on them, write a checkpoint, and ack.

The checkpoint is written before the ack, whose transaction makes it valid. If any rank is killed
before the ack, all ranks start again from the previous checkpoint and repeat the step with the same
groups: they resume its lease, or draw again what the first rank has released. If it is killed after
the ack, they continue with the next step. The number of ranks may change at every start.

The supervisor starts the ranks as torchrun does:

    torchrun --nproc-per-node 4 -m examples.async_grpo.trainer --url URL --folder FOLDER --steps N
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import replaydb as rdb
from examples.async_grpo import checkpoint
from examples.async_grpo.job import (
    BUFFER,
    GROUPS_PER_STEP,
    MAX_STALENESS,
    RUN,
    STEP,
    parser_of,
    phase,
)
from examples.grpo_digits.grpo import clipped_loss, token_logprobs
from examples.grpo_digits.model import Policy
from replaydb import blocking
from replaydb.training import advantages
from replaydb.training.distributed import ShardedBuffer

# It warns of in-place operations on outputs, which the model does not use.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module")


def train(url: str, folder: Path, num_steps: int) -> None:
    """Train to the last step, from the valid checkpoint. Every rank calls this."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    policy = new_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95))
    with blocking.Store.open(url, run=RUN, migrate=True) as store:
        buffer = store.buffer(BUFFER, max_staleness=MAX_STALENESS)
        step = resume(buffer, folder, policy, optimizer)
        shared = ShardedBuffer(buffer)
        while step < num_steps:
            with shared.lease(GROUPS_PER_STEP, ttl=60, step=step) as lease:
                if buffer.cursor(STEP) != step:
                    raise RuntimeError("a killed trainer's ack arrived after the start of this one")
                phase(folder, f"leased-{step}-rank{rank}")
                update(policy, optimizer, lease.batch)
                phase(folder, f"computed-{step}-rank{rank}")
                checkpoint.save(folder, step + 1, policy, optimizer)
                phase(folder, f"checkpointed-{step}-rank{rank}")
                # One transaction: these groups are used, and the checkpoint that has them is valid.
                lease.ack(cursor={STEP: step + 1}, advance_policy=step + 1)
                phase(folder, f"acked-{step}-rank{rank}")
            step += 1
            if rank == 0:
                checkpoint.keep_only(folder, step)
    dist.destroy_process_group()


def new_policy() -> Policy:
    """Return the initial policy, the same on all ranks, divided among them."""
    torch.manual_seed(0)
    policy = Policy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in policy.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    return policy


def resume(
    buffer: blocking.Buffer, folder: Path, policy: Policy, optimizer: torch.optim.Optimizer
) -> int:
    """Load the checkpoint that the cursor names. Return its step."""
    step: int | None = buffer.cursor(STEP)
    if step is None:
        checkpoint.save(folder, 0, policy, optimizer)
        if dist.get_rank() == 0:
            buffer.put([], cursor={STEP: 0})
        return 0
    checkpoint.load(folder, step, policy, optimizer)
    if dist.get_rank() == 0:
        checkpoint.keep_only(folder, step)
        for lease in buffer.leases():  # the lease of this step is resumed
            if lease.owner == RUN and lease.step != step:
                buffer.revoke(lease.id, reason=f"the trainer resumes from step {step}")
    return step


def update(policy: Policy, optimizer: torch.optim.Optimizer, batch: rdb.Batch) -> None:
    """Take one optimizer step on the groups of all ranks, of which this one has `batch`."""
    tensors = batch.padded(pad_token_id=0)
    gain = advantages.grpo(tensors.rewards, tensors.group_index)
    loss = clipped_loss(token_logprobs(policy, tensors.token_ids), tensors, gain)
    # The loss is a mean over the tokens of this rank, and gradients become means over ranks. Ranks
    # have different numbers of tokens, and each token must count the same.
    tokens = tensors.loss_mask.sum()
    all_tokens = tokens.clone()
    dist.all_reduce(all_tokens)
    optimizer.zero_grad()
    (loss * tokens * dist.get_world_size() / all_tokens.clamp(min=1)).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    parser = parser_of("examples.async_grpo.trainer")
    parser.add_argument("--steps", type=int, required=True, help="number of steps in all")
    options = parser.parse_args()
    train(options.url, options.folder, options.steps)
