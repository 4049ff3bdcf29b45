"""A TransferQueue on the Ray cluster of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def _queue(cluster: None) -> Iterator[None]:
    import transfer_queue as tq
    from examples.verl_cpu import start_queue

    start_queue()
    yield
    tq.close()


@pytest.fixture
def queue(_queue: None) -> Iterator[None]:
    """An empty TransferQueue."""
    from integrations.verl.trainers import forget

    forget()
    yield
    forget()
