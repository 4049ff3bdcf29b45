"""A tiny policy, created without downloads, and trainers for it. Imports TRL."""

from __future__ import annotations

import os
import queue
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from replaydb import InvalidInputError, blocking
from replaydb.integrations.trl import ReplayGRPOTrainer, ReplayMixin
from replaydb.integrations.trl.async_grpo import RolloutBuffer
from support.groups import GENERATED

torch.set_num_threads(1)

#: One is a NUL character, which byte-level vocabularies have as well.
WORDS = ["<pad>", "<eos>", "a", "b", "c", "d", "e", "\0"]
PROMPTS = ["a b", "c", "d e e", "b"] * 4
Rewards = Callable[..., list[float | None]]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")  # noqa: S106
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def by_step(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float | None]:
    """Rewards that differ in even steps, and are all 0.1 (float32 std is not 0) in odd ones."""
    odd = trainer_state.global_step % 2
    return [0.1 if odd else float(i % 2) for i in range(len(completions))]


def trainer(
    folder: Path | str,
    buffer: blocking.Buffer,
    *,
    kind: type[Any] = ReplayGRPOTrainer,
    reward: Rewards | list[Rewards] = by_step,
    replay: Any = None,
    callbacks: list[Any] | None = None,
    prompts: list[Any] = PROMPTS,
    **options: Any,
) -> Any:
    """A trainer with replay, with two groups of four completions per step."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 4,
        "save_strategy": "no",
        "max_steps": 6,
    }
    args = GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        learning_rate=0.01,
        **given | options,
    )
    model = policy()
    if args.beta:  # the reference model is loaded from the policy's folder
        model.save_pretrained(Path(folder) / "model")
    return kind(
        model=str(Path(folder) / "model") if args.beta else model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        callbacks=callbacks,
        buffer=buffer,
        replay=replay,
    )


class Scripted(ReplayMixin, GRPOTrainer):
    """A real trainer with scripted generations and rewards.

    `script` has a row per completion: the ids of prompt and completion, and the reward. `sampled`
    sets whether an inference engine returned logprobs, `tools_called` whether tools were called.
    `chat` has the messages that follow the first message of each completion; prompts are chats
    then.
    """

    script: list[tuple[list[int], list[int], float | None]]
    sampled = tools_called = False
    chat: list[dict[str, Any]] | None = None
    added: dict[str, Callable[[dict[str, Any]], Any]] = {}  # noqa: RUF012

    def _generate(self, prompts: list[Any]) -> Any:
        rows = [ids for _, ids, _ in self.script]
        logps = [[-0.5 - 0.01 * token for token in ids] for ids in rows] if self.sampled else None
        masks = [[i % 2 for i in range(len(ids))] for ids in rows] if self.tools_called else None
        texts: list[Any] = [" ".join(WORDS[token] for token in ids) for ids in rows]
        if self.chat is not None:
            texts = [[{"role": "assistant", "content": text}, *self.chat] for text in texts]
        return [p for p, _, _ in self.script], rows, masks, texts, logps, {}, None, None

    def step(self, step: int, script: list[Any], mode: str = "train") -> dict[str, Any]:
        """Return the outputs of one call of the trainer for a script."""
        self.script, self.state.global_step = script, step
        self.model.train(mode == "train")
        prompt = "a" if self.chat is None else [{"role": "user", "content": "a"}]
        inputs = [{"prompt": prompt} for _ in script]
        outputs: dict[str, Any] = self._generate_and_score_completions(inputs)
        return outputs


class WithFields(GRPOTrainer):
    """A trainer with additional fields, as TRL's has with a GPU."""

    added: dict[str, Callable[[dict[str, Any]], Any]] = {}  # noqa: RUF012

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        outputs = super()._generate_and_score_completions(inputs)
        return {**outputs, **{name: make(outputs) for name, make in self.added.items()}}


class ScriptedFields(Scripted, WithFields):
    """Scripted, with fields added."""


def scripted_rewards(trainer: Scripted) -> Rewards:
    """Return a reward function with the rewards of the trainer's script."""
    return lambda completions, **kwargs: [reward for _, _, reward in trainer.script]


class Killed(TrainerCallback):
    """SIGKILL during a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(url: str, folder: str, *, kill_at: int | None = None, resume: bool = False) -> None:
    """A training process: six steps, two per generation, with a checkpoint after step 3."""
    with blocking.Store.open(url, run="tiny") as store:
        made = trainer(
            folder,
            store.buffer("grpo"),
            save_strategy="steps",
            save_steps=3,
            per_device_train_batch_size=4,
            steps_per_generation=2,
            callbacks=[] if kill_at is None else [Killed(kill_at)],
        )
        made.train(resume_from_checkpoint=resume)


def train_rank(url: str, folder: str, port: int, *, rank: int) -> None:
    """One of two training processes, with two steps."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in where.items()})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
    with blocking.Store.open(url, run="tiny") as store:
        buffer = store.buffer("grpo")
        with pytest.raises(InvalidInputError, match="whole groups"):
            trainer(folder, buffer, per_device_train_batch_size=2)
        made = trainer(folder, buffer, max_steps=2)
        made.train()
        assert made.accelerator.num_processes == 2


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Attention over packed segments, in place of the GPU kernel that TRL uses."""
    starts, paths = (bounds.tolist() for bounds in args[:2])
    made = []
    for i in range(len(starts) - 1):
        q = query[starts[i] : starts[i + 1]].transpose(0, 1)
        k, v = (x[paths[i] : paths[i + 1]].transpose(0, 1) for x in (key, value))
        seen = q.new_ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
        made.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=kwargs["softmax_scale"], enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(made)


class Idle:
    """A worker or weight transfer that does nothing; the tests put the samples."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def asynchronous(
    folder: Path | str,
    buffer: RolloutBuffer,
    *,
    steps: int,
    callbacks: list[TrainerCallback] | None = None,
) -> Any:
    """An `AsyncGRPOTrainer` of steps of two micro-batches of two samples, saved after each."""
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attention)
    torch.cuda.get_device_name = lambda device=None: "a CPU"  # TRL always requests it
    model = Path(folder) / "model"
    if not model.exists():
        policy().save_pretrained(model)
    made = AsyncGRPOTrainer(
        model=str(model),
        args=AsyncGRPOConfig(
            output_dir=str(folder),
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            max_steps=steps,
            save_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            token_budget=-1,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer(),
        rollout_worker=Idle(),
        weight_transfer=Idle(),
        callbacks=callbacks,
    )
    buffer.attach(made)
    return made


def sample(i: int, group_id: int = 0) -> RolloutSample:
    """A sample that is identified by its advantage."""
    import numpy as np

    return RolloutSample(
        prompt=[{"role": "user", "content": "a"}],
        completion=[{"role": "assistant", "content": GENERATED}],
        input_ids=np.array([2 + i % 6, 3, 4, 1]),
        completion_mask=np.array([0, 0, 1, 1]),
        old_log_probs=np.array([0.0, 0.0, -0.5, -0.25], np.float32),
        advantage=float(i),
        model_version=0,
        group_id=group_id,
        metrics={"reward": 0.5, "reward_std": 0.25, "rewards/unscored": float("nan")},
        enqueued_at=1.5,
    )


def train_async(url: str, folder: str, steps: int, kill_at: int) -> None:
    """A training process that takes samples from a store."""
    buffer = RolloutBuffer(url, run="tiny")
    asynchronous(folder, buffer, steps=steps, callbacks=[Killed(kill_at)]).train()


def put_samples(buffer: RolloutBuffer, first: int, count: int) -> None:
    """A worker process, which received the buffer as a pickle."""
    for i in range(first, first + count):
        buffer.put_nowait(sample(i, group_id=i // 4))
    buffer.close()
