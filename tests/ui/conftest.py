"""HTTP clients of the web UI, without a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from replaydb import Store
from replaydb.ui import application
from replaydb.ui.views import groups

OpenClient = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
def engine_name(request: pytest.FixtureRequest) -> str:
    """The engine under test. Tests of pages whose queries differ are marked `both_engines`."""
    name: str = request.param
    return name


@pytest.fixture
def open_client(url: str, monkeypatch: pytest.MonkeyPatch) -> OpenClient:
    """Return a context manager that opens a client; its arguments are those of `application`."""
    for limit in ("COUNT_SECONDS", "SEARCH_SECONDS"):
        monkeypatch.setattr(groups, limit, 60.0)  # the machine may be busy

    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
        app = application(url, **options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost:8765") as client,
        ):
            yield client

    return opened


@pytest.fixture
async def browser(store: Store, open_client: OpenClient) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the web UI of `store`, without a token."""
    async with open_client() as client:
        yield client
