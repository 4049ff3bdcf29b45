"""Hugging Face datasets: import of completions, and export of training sets in TRL's formats.

`put_dataset` stores completions that were generated elsewhere as groups. `sft_dataset`,
`dpo_dataset` and `grpo_dataset` convert stored groups to datasets for supervised fine-tuning,
preference optimization and GRPO. At most one page of groups is in memory at a time.
"""

from __future__ import annotations

from replaydb.integrations.datasets.incoming import put_dataset
from replaydb.integrations.datasets.outgoing import dpo_dataset, grpo_dataset, sft_dataset

__all__ = ["dpo_dataset", "grpo_dataset", "put_dataset", "sft_dataset"]
