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


class SampleUis:
    """Web UIs of read-only sample stores, each made when a test first needs it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._roots: dict[str, str] = {}

    async def root(self, url: str, engine: str) -> str:
        """Return the URL of the web UI of an engine. Its store is at `url`, if it is a new one."""
        if engine not in self._roots:
            await migrations.upgrade(url)
            await fill_sample_store(url)
            self._roots[engine] = await self._stack.enter_async_context(serving(url))
        return self._roots[engine]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _sample_uis() -> AsyncIterator[SampleUis]:
    async with AsyncExitStack() as stack:
        yield SampleUis(stack)


@pytest.fixture(scope="session")
def _sample_sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('sample') / 'replay.db'}"


@pytest.fixture(scope="session")
def _sample_postgresql_url(postgres: PostgresServer) -> str:
    return postgres.create_database("sample")


@pytest.fixture
def _sample_url(engine_name: str, request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"_sample_{engine_name}_url")
    return url


@pytest_asyncio.fixture(loop_scope="session")
async def sample_tab(
    engine_name: str, _sample_url: str, _sample_uis: SampleUis, _browser: Browser
) -> AsyncIterator[Tab]:
    """A tab on the web UI of the sample store, which tests must not write to."""
    async with tab(_browser, await _sample_uis.root(_sample_url, engine_name)) as opened:
        yield opened
