"""A small transformer learns to sort digits by GRPO, from a buffer that survives `kill -9`.

Two rollout workers put groups of completions into one buffer; one trainer leases them. Halfway
the trainer and a worker are killed with SIGKILL and started again. Run it from the checkout:

    python -m examples.grpo_digits --database sqlite

The modules, in reading order: `task` (what is learned), `model` (the policy), `grpo` (the loss),
`rollout` (the worker) and `trainer`, which together are the whole of the training. `supervisor`
starts them, kills two, and watches; `report` asks the database what became of every group.
"""
