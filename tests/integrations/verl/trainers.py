"""The example's trainer for tests: several in one process, one after another, on one queue."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import transfer_queue as tq
from examples.verl_cpu import Trainer, configuration
from examples.verl_restart import durable
from omegaconf import DictConfig


def configured(mode: str, url: str, folder: Path) -> DictConfig:
    """Return the example's configuration. It is cached: Hydra takes most of a second for one."""
    config = copy.deepcopy(_composed(mode))
    config.trainer.default_local_dir = str(folder / "checkpoints")
    config.trainer.v1.sampler.sampler_kwargs.url = url
    return config


def leave(trainer: Trainer) -> None:
    """Close connections and threads, as the end of a process does; nothing is saved."""
    trainer.sampler.close()
    trainer.manager._journal.close()


def forget() -> None:
    """Empty the queue, as its death does."""
    for partition, keys in tq.kv_list().items():
        if keys:
            tq.kv_clear(list(keys), partition)


@cache
def _composed(mode: str) -> DictConfig:
    return configuration(mode, Path("folder"), durable("url", mode))
