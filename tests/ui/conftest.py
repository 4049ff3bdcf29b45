"""The pages, as a browser asks for them, without one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from replaydb import Store
from replaydb.ui import application
from replaydb.ui.views import groups

Looking = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
def engine_name(request: pytest.FixtureRequest) -> str:
    """The engine under test. Tests of pages whose queries differ are marked `both_engines`."""
    name: str = request.param
    return name


@pytest.fixture
def looking(url: str, monkeypatch: pytest.MonkeyPatch) -> Looking:
    """Makes a browser, of sorts, on the pages over `url`; arguments as of `application`."""
    monkeypatch.setattr(groups, "COUNT_SECONDS", 60)  # the machine may be busy

    @asynccontextmanager
    async def made(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
        app = application(url, **options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost:8765") as client,
        ):
            yield client

    return made


@pytest.fixture
async def browser(store: Store, looking: Looking) -> AsyncIterator[httpx.AsyncClient]:
    """On the pages over `store`, which need no token."""
    async with looking() as client:
        yield client
