"""verl's V1 trainer without a GPU: its own code, except for the workers and the generation.

The stand-ins learn nothing. They record the prompts that were trained on, and the prompts that were
generated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.import_utils import load_class_from_fqn

from replaydb.integrations.verl import DurableGeneration
from replaydb.integrations.verl.trajectories import rows

BATCH_SIZE = 4
PROMPTS = 40

logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)


def configuration(mode: str, folder: Path, overrides: Sequence[str]) -> DictConfig:
    """Return verl's configuration for a small run, with these Hydra overrides."""
    small = [
        f"trainer.v1.trainer_mode={mode}",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.save_freq=2",
        "critic.enable=false",
        f"data.train_batch_size={BATCH_SIZE}",
        f"+data.gen_batch_size={BATCH_SIZE if mode == 'sync' else 1}",
    ]
    if mode == "separate_async":  # generates on separate GPUs, and trains twice per step
        small += [
            "trainer.v1.separate_async.parameter_sync_step=2",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH_SIZE // 2}",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        ]
    defaults = Path(verl.__file__).parent / "trainer/config"
    with initialize_config_dir(str(defaults), version_base=None):
        return compose("ppo_trainer", [*small, *overrides])


def start_queue() -> None:
    """Start a TransferQueue on the Ray instance of this process."""
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))


def prompt(number: int) -> dict[str, Any]:
    """Return a row of the dataset."""
    return {
        "raw_prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "index": number,
        "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
    }


def trajectory(number: int, session: int, index: int = 0, step: int = 1) -> dict[str, Any]:
    """Return the fields that an agent loop puts into the queue, without those of the prompt."""
    length = 3 + (number + session + index) % 3
    prompts, responses = torch.arange(2) + number, torch.arange(length) + 100 * number
    mask = torch.ones(length, dtype=torch.int64)
    mask[1] = index  # in the first turn, a tool response, without loss
    scores = torch.zeros(length)
    scores[-1] = float((number + session) % 2)
    tokens = torch.cat([prompts, responses])
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": tokens,
        "position_ids": torch.arange(len(tokens)),
        "rollout_log_probs": -torch.rand(length),
        "rm_scores": scores,
        "num_turns": 2 + index,
        "metrics": {"generate_sequences": 0.5},
        "extra_fields": {"min_global_steps": step - 1, "reward_extra_info": {"acc": 1.0}},
    }


def generated(log: Path) -> list[int]:
    """Return the prompts that were generated, in all runs."""
    return [int(line) for line in log.read_text().split()]


def put(keys: list[str], fields: Sequence[dict[str, Any]], tags: list[dict[str, Any]]) -> None:
    """Put the trajectories of one session into the queue, as agent loops do."""
    tq.kv_batch_put(keys, "train", fields=tu.list_of_dict_to_tensordict(fields), tags=tags)


class Generator:
    """Agent loops of two sessions; every other prompt has two turns in its first session.

    Up to `limit` prompts are finished. The others stay in progress, with only their first session.
    """

    def __init__(self, config: DictConfig, log: Path, limit: int) -> None:
        self.log, self.limit = log, limit
        self.stuck: list[dict[str, Any]] = []

    def generate_sequences(self, prompts: TensorDict) -> None:
        step = tu.get(prompts, "global_steps")
        for row in rows(prompts):
            row["global_steps"] = step
            tq.kv_put(row["uid"], "train", tag={"status": "running"})
            self._put(row, 0)
            self.stuck.append(row)
            if self.limit:
                self.limit -= 1
                self.finish(self.stuck.pop())

    def finish(self, row: dict[str, Any]) -> None:
        """Put the second session of a prompt, and mark the prompt as finished."""
        self._put(row, 1)
        with self.log.open("a") as log:
            log.write(f"{row['index']}\n")
        tq.kv_put(row["uid"], "train", tag={"status": "finished"})

    def _put(self, row: dict[str, Any], session: int) -> None:
        number, step = row["index"], row["global_steps"]
        turns = 2 if session == 0 and number % 2 else 1
        fields = [trajectory(number, session, turn, step) | row for turn in range(turns)]
        keys = [f"{row['uid']}_{session}_{turn}" for turn in range(turns)]
        tag = {"status": "success", "min_global_steps": step - 1, "global_steps": step}
        put(keys, fields, [tag] * turns)


class DurableGenerator(DurableGeneration, Generator):
    """The generator with durable generation."""


class Model:
    """Stand-in for the workers: it records the prompts that it was trained on."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    def save_checkpoint(self, path: str, *others: Any, **options: Any) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "trained.json").write_text(json.dumps(self.trained))

    def load_checkpoint(self, local_path: str, **options: Any) -> None:
        self.trained = json.loads((Path(local_path) / "trained.json").read_text())


class Trainer:
    """One run of a trainer: calls the methods of verl's trainer in the order of its `fit`."""

    def __init__(self, config: DictConfig, log: Path, limit: int = PROMPTS) -> None:
        self.verl: PPOTrainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        self.sampler = self.verl.replay_buffer
        name = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
        kind: Any = load_class_from_fqn(name) if name else Generator
        self.manager = kind(config, log, limit)
        self.model = self.verl.actor_rollout_wg = Model()
        self.verl.agent_loop_manager = self.manager
        self.verl.current_mode = HybridEngineMode.TRAINER  # no GPUs are shared with generation
        self.verl.train_dataloader = StatefulDataLoader(
            [prompt(number) for number in range(PROMPTS)],
            batch_size=config.data.gen_batch_size,
            collate_fn=collate_fn,
        )
        self.verl.train_dataloader_it = None
        self.verl._load_checkpoint()
        self.verl.global_steps += 1
        self.verl._reissue_inflight_prompts()
        self.verl.on_train_begin()

    def step(self) -> None:
        trainer = self.verl
        trainer.prepare_step()
        keys: list[str] = []
        for _ in range(trainer.parameter_sync_step):
            size = BATCH_SIZE // trainer.parameter_sync_step
            batch, _ = self.sampler.sample(trainer.global_steps, "train", size)
            self.model.trained += sorted(set(tq.kv_batch_get(batch.keys, "train")["index"]))
            keys += batch.keys
        if trainer.global_steps % trainer.config.trainer.save_freq == 0:
            trainer._save_checkpoint()
        tq.kv_clear(keys, "train")
        trainer.global_steps += 1
