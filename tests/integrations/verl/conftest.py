"""A TransferQueue on a Ray of this machine, one for each worker of pytest-xdist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a small Ray."""
    import ray  # here, where warnings of other packages are theirs

    context = ray.init(
        address="local",
        num_cpus=2,  # one for each actor of the queue; Ray starts as many workers at once
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield context.address_info["address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def _queue(cluster: str) -> Iterator[None]:
    import transfer_queue as tq

    from integrations.verl.trainer import STORAGE

    tq.init(STORAGE)
    yield
    tq.close()


@pytest.fixture
def queue(_queue: None) -> Iterator[None]:
    """An empty TransferQueue."""
    from integrations.verl.trainer import forget

    forget()
    yield
    forget()
