"""Real browsers: one for each worker of pytest-xdist, in the loop of the session, as all here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from replaydb.database import migrations
from support.browsing import CHROMIUM, MISSING, Tab, chromium, serving, tab
from support.exhibits import exhibit
from support.postgres import PostgresServer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All in one event loop; where there is no browser it is said in red when all is done."""
    for item in items:
        if HERE in item.path.parents:
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason=MISSING))
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def looked_at(url: str, _browser: Browser) -> AsyncIterator[Tab]:
    """A tab on the pages over `url`, which tests write to."""
    async with serving(url) as root, tab(_browser, root) as opened:
        yield opened


@pytest.fixture(scope="session")
def _exhibits(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        "sqlite": f"sqlite:///{tmp_path_factory.mktemp('exhibit') / 'replay.db'}",
        "postgresql": postgres.create_database("exhibit"),
    }


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _served(_exhibits: dict[str, str]) -> AsyncIterator[dict[str, str]]:
    """Where the pages are over a store with something of everything, which nobody writes to."""
    async with AsyncExitStack() as stack:
        roots = {}
        for engine, url in _exhibits.items():
            await migrations.upgrade(url)
            await exhibit(url)
            roots[engine] = await stack.enter_async_context(serving(url))
        yield roots


@pytest_asyncio.fixture(loop_scope="session")
async def exhibited(
    engine_name: str, _served: dict[str, str], _browser: Browser
) -> AsyncIterator[Tab]:
    """A tab on the pages over that store."""
    async with tab(_browser, _served[engine_name]) as opened:
        yield opened
