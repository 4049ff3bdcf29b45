"""Blocking stores, for trainers without an event loop."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replaydb import blocking

Child = Callable[..., list[Any]]


@pytest.fixture
def store(url: str) -> Iterator[blocking.Store]:
    """An open store, of the run `tiny`."""
    with blocking.Store.open(url, run="tiny") as opened:
        yield opened


@pytest.fixture
def buffer(store: blocking.Store) -> blocking.Buffer:
    """An empty buffer."""
    return store.buffer("grpo")


@pytest.fixture
def child() -> Child:
    """Run a function in another process, or in several that get their `rank`.

    Returns the exit codes.
    """
    context = multiprocessing.get_context("forkserver")
    # These take seconds to import. The server cannot find the module of the tests.
    context.set_forkserver_preload(["trl.trainer.grpo_trainer", "trl.experimental.async_grpo"])

    def run(function: Callable[..., Any], *args: Any, ranks: int = 0, **kwargs: Any) -> list[Any]:
        options = [{"rank": rank} for rank in range(ranks)] or [{}]
        processes = [
            context.Process(target=function, args=args, kwargs=kwargs | more) for more in options
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        return [process.exitcode for process in processes]

    return run
