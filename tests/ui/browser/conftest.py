"""Browser fixtures: one Chromium for each worker of pytest-xdist, in the session's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from replaydb.database import migrations
from support.browsing import CHROMIUM, MISSING, Tab, chromium, serving, tab
from support.postgres import PostgresServer
from support.sample_store import fill_sample_store

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests in one event loop; skip them, with a red summary, without a browser."""
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
async def live_tab(url: str, _browser: Browser) -> AsyncIterator[Tab]:
    """A tab on the web UI of `url`, a store that the test may write to."""
    async with serving(url) as root, tab(_browser, root) as opened:
        yield opened


@pytest.fixture(scope="session")
def _sample_urls(
    postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return {
        "sqlite": f"sqlite:///{tmp_path_factory.mktemp('sample') / 'replay.db'}",
        "postgresql": postgres.create_database("sample"),
    }


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _sample_uis(_sample_urls: dict[str, str]) -> AsyncIterator[dict[str, str]]:
    """URLs of the web UIs of read-only sample stores, by engine."""
    async with AsyncExitStack() as stack:
        roots = {}
        for engine, url in _sample_urls.items():
            await migrations.upgrade(url)
            await fill_sample_store(url)
            roots[engine] = await stack.enter_async_context(serving(url))
        yield roots


@pytest_asyncio.fixture(loop_scope="session")
async def sample_tab(
    engine_name: str, _sample_uis: dict[str, str], _browser: Browser
) -> AsyncIterator[Tab]:
    """A tab on the web UI of the sample store, which tests must not write to."""
    async with tab(_browser, _sample_uis[engine_name]) as opened:
        yield opened
