"""Tests of the integrations, with the real third-party packages: `make integrations`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Ignore warnings of other packages. Warnings of replaydb fail the test, as everywhere."""
    config.addinivalue_line("filterwarnings", "default")
    config.addinivalue_line("filterwarnings", r"error:::replaydb(\.|$)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that need Ray in one worker, because a cluster takes long to start."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("cluster"))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
def engine_name(request: pytest.FixtureRequest) -> str:
    """The engine under test. Integrations call the public API, whose tests run on both engines.

    Of each integration some tests are marked `both_engines`, or name an engine.
    """
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A small Ray cluster; a process can have one."""
    import ray  # not at module level, where its warnings would be errors

    ray.init(
        address="local",
        num_cpus=2,  # one per actor of a TransferQueue; this many workers start at once
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()
