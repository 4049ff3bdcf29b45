"""The integrations are tested with the packages that they are for: `make integrations`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of other packages are theirs; those of replaydb fail the test, as everywhere."""
    config.addinivalue_line("filterwarnings", "default")
    config.addinivalue_line("filterwarnings", r"error:::replaydb(\.|$)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker has the tests that need a Ray: it takes long to start, with what runs on it."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("cluster"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A small Ray; a process can have one."""
    import ray  # here, where warnings of other packages are theirs

    ray.init(
        address="local",
        num_cpus=2,  # one for each actor of a TransferQueue; as many workers start at once
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()
