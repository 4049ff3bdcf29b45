"""A TransferQueue on a Ray of this machine, one for each worker of pytest-xdist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a small Ray."""
    import ray  # here, where warnings of other packages are theirs
    from examples.verl_cpu import start_ray

    yield start_ray()
    ray.shutdown()


@pytest.fixture(scope="session")
def _queue(cluster: str) -> Iterator[None]:
    import transfer_queue as tq
    from examples.verl_cpu import start_queue

    start_queue()
    yield
    tq.close()


@pytest.fixture
def queue(_queue: None) -> Iterator[None]:
    """An empty TransferQueue."""
    from integrations.verl.lives import forget

    forget()
    yield
    forget()
