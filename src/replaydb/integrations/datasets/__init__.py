"""Hugging Face datasets: completions in, training sets in TRL's formats out.

Completions that were generated elsewhere become groups with `put_dataset`; what is stored becomes
sets for supervised fine-tuning, preferences or prompts with `sft_dataset`, `dpo_dataset` and
`grpo_dataset`. Neither holds more than a page of groups in memory.
"""

from __future__ import annotations

from replaydb.integrations.datasets.incoming import put_dataset
from replaydb.integrations.datasets.outgoing import dpo_dataset, grpo_dataset, sft_dataset

__all__ = ["dpo_dataset", "grpo_dataset", "put_dataset", "sft_dataset"]
