"""SFT and DPO on completions that were generated elsewhere and are stored once.

A dataset of sums with right and wrong answers is put into a buffer. The best answers form a dataset
for supervised fine-tuning; the best and the worst answer of each prompt form a dataset of
preferences. TRL trains a tiny model, created here, on both.

    pip install trl
    python -m examples.datasets_sft_dpo
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import datasets
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import replaydb as rdb
from replaydb import blocking
from replaydb.integrations.datasets import dpo_dataset, put_dataset, sft_dataset

SPECIAL = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}


def completions() -> datasets.Dataset:
    """Return all sums of two digits below five, with three answers each, one of which is right."""
    sums = [(a, b) for a in range(5) for b in range(5)]
    return datasets.Dataset.from_list(
        [
            {
                "prompt": f"{a} + {b} =",
                "completions": [str(a + b + off) for off in (1, 0, 2)],
                "rewards": [0.0, 1.0, -1.0],
                "level": "hard" if a + b > 4 else "easy",
            }
            for a, b in sums
        ]
    )


def words() -> Any:
    """Return a word-level tokenizer for sums."""
    known = [*SPECIAL.values(), "+", "=", *map(str, range(12))]
    vocabulary = {word: i for i, word in enumerate(known)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def tiny_model(tokenizer: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(url: str, folder: str, steps: int = 20) -> tuple[float, float]:
    """Train. Return the last loss of SFT, and how often DPO prefers the right answer at the end."""
    tokenizer = words()
    with blocking.Store.open(url, run="import") as store:
        buffer = store.buffer("sums")
        put_dataset(buffer, completions(), "sums", tokenizer=tokenizer, tags=["level"])
        print(
            f"{buffer.count()} groups stored; again: {put_dataset(buffer, completions(), 'sums')}"
        )

    options: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    best = sft_dataset(url, "sums", min_reward=1.0, cache_dir=folder)
    sft = SFTTrainer(
        tiny_model(tokenizer), SFTConfig(**options), train_dataset=best, processing_class=tokenizer
    )
    sft.train()

    pairs = dpo_dataset(
        url, "sums", min_margin=0.5, where=rdb.col.tags["level"] == "hard", cache_dir=folder
    )
    print(pairs[0])
    dpo = DPOTrainer(
        sft.model,
        ref_model=copy.deepcopy(sft.model),
        args=DPOConfig(**options),
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    dpo.train()
    return _last(sft, "loss"), _last(dpo, "rewards/accuracies")


def _last(trainer: Any, name: str) -> float:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry][-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loss, accuracy = train(f"sqlite:///{folder}/replay.db", folder)
    print(f"SFT: loss {loss:.2f}; DPO: the right answer is preferred in {accuracy:.0%} of pairs")


if __name__ == "__main__":
    main()
