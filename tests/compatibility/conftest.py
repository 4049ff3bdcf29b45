"""Clients of several releases, and a store that the previous release has created."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from compatibility.clients import Client, next_release, previous_release, running


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The previous release."""
    with running(previous_release(tmp_path_factory.mktemp("previous")), "previous") as client:
        yield client


@pytest.fixture(scope="session")
def additive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The next release, whose revision only adds, and which has a payload format of its own."""
    with running(next_release(tmp_path_factory.mktemp("additive")), "additive") as client:
        yield client


@pytest.fixture(scope="session")
def breaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The release after it, with a revision that older clients cannot live with."""
    folder = next_release(tmp_path_factory.mktemp("breaking"), is_breaking=True)
    with running(folder, "breaking") as client:
        yield client


@pytest.fixture
def old_url(empty_url: str, previous: Client) -> str:
    """A store without groups, with the tables of the previous release."""
    assert asyncio.run(previous.run("db", "upgrade", "--url", empty_url)).code == 0
    return empty_url
