"""TRL's GRPO trainer with replay, on a tiny model that is created here: nothing is downloaded.

A policy over eight words learns to say "yes". A completion that contains "yes" is rewarded, so soon
the rewards of most groups are all equal (zero-variance groups). These are replaced by stored
groups.

    python -m examples.trl_grpo
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from replaydb import blocking
from replaydb.integrations.trl import ReplayGRPOTrainer

STEPS = 30
WORDS = ["<pad>", "<eos>", "yes", "no", "maybe", "is", "it", "so"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")  # noqa: S106


def policy() -> LlamaForCausalLM:
    """Return a randomly initialized transformer of one layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def says_yes(completions: list[str], **kwargs: Any) -> list[float]:
    """Return the reward of each completion."""
    return [float("yes" in completion) for completion in completions]


def train(url: str, folder: str, steps: int = STEPS) -> list[dict[str, float]]:
    """Train. Return the trainer's log entry of each step."""
    with blocking.Store.open(url, run="says-yes") as store:
        trainer = ReplayGRPOTrainer(
            model=policy(),
            reward_funcs=says_yes,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=16,
                num_generations=4,
                max_completion_length=4,
                learning_rate=0.01,
                logging_steps=1,
                disable_tqdm=True,
                report_to=[],
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["is it so", "is it", "so it is", "so"]}),
            processing_class=tokenizer(),
            buffer=store.buffer("grpo"),
        )
        trainer.train()
        return [log for log in trainer.state.log_history if "reward" in log]


def main() -> None:
    """Train, and print how rewards and replay changed."""
    with tempfile.TemporaryDirectory() as folder:
        logs = train(f"sqlite:///{folder}/grpo.db", folder)
    for name in ("reward", "replay/uninformative", "replay/replayed"):
        first, last = (sum(log[name] for log in part) / 10 for part in (logs[:10], logs[-10:]))
        print(f"{name}: {first:.2f} in the first ten steps, {last:.2f} in the last ten")


if __name__ == "__main__":
    main()
