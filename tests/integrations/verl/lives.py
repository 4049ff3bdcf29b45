"""Lives of the example's trainer, as tests need them: many in one process, on one queue."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import transfer_queue as tq
from examples.verl_cpu import Trainer, configuration
from examples.verl_restart import durable
from omegaconf import DictConfig


def configured(mode: str, url: str, folder: Path) -> DictConfig:
    """The example's configuration; Hydra takes most of a second to compose one."""
    config = copy.deepcopy(_composed(mode))
    config.trainer.default_local_dir = str(folder / "checkpoints")
    config.trainer.v1.sampler.sampler_kwargs.url = url
    return config


def leave(trainer: Trainer) -> None:
    """Let go of connections and threads, as the end of the process does; nothing is saved."""
    trainer.sampler.close()
    trainer.manager._journal.close()


def forget() -> None:
    """What a queue that died is: empty."""
    for partition, keys in tq.kv_list().items():
        if keys:
            tq.kv_clear(list(keys), partition)


@cache
def _composed(mode: str) -> DictConfig:
    return configuration(mode, Path("folder"), durable("url", mode))
