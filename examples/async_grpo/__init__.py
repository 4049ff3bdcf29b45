"""Asynchronous GRPO on many ranks, in which any process can be killed at any time.

Rollout workers put groups while a trainer of several ranks (FSDP2) leases them, step by step. A
small transformer learns to sort digits; task, model and loss are those of `examples.grpo_digits`.
Run it from the checkout, on CPUs:

    python -m examples.async_grpo --url sqlite:///grpo.db --folder grpo --steps 20 \
        --kill checkpointed-3-rank0 leased-5-rank2 generated-8-worker0

Read the modules in this order: `job` (names and sizes, and where processes are killed), `worker`,
`trainer`, `checkpoint`, and `__main__`, the supervisor that restarts what has died.

Two transactions make every prompt be generated, and every group be trained on, exactly once:

- A worker's put stores groups and, as a cursor, the position after their prompts.
- A trainer's ack marks the groups of a step as used, writes the step as a cursor, and advances the
  policy version. It comes after the checkpoint, and makes it the valid one.

Whatever is killed before its transaction is repeated; whatever is killed after it is not.
"""
