"""Demo: a small transformer learns to sort digits by GRPO, and recovers from `kill -9`.

Two rollout workers put groups of completions into one buffer; one trainer leases them. Halfway
the trainer and a worker are killed with SIGKILL and started again. Run it from the checkout:

    python -m examples.grpo_digits --database sqlite

The modules, in reading order: `task`, `model` (the policy), `grpo` (the loss), `rollout` (the
worker) and `trainer`, which together are the complete training. `supervisor` starts the processes,
kills two, and monitors the buffer. `report` queries the outcome of every group from the database.
"""
