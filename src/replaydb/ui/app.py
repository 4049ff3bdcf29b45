"""The application: a route for each view, and the store that they read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import URL
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from replaydb.decoding import decoder
from replaydb.store import Store
from replaydb.ui import downloads, failures, library, safety
from replaydb.ui.pages import FOLDER
from replaydb.ui.shared import Shared
from replaydb.ui.views import group as group_view
from replaydb.ui.views import groups as groups_view
from replaydb.ui.views import step as step_view
from replaydb.ui.views.episode import compare, episode
from replaydb.ui.views.group import group
from replaydb.ui.views.groups import groups
from replaydb.ui.views.overview import live, overview
from replaydb.ui.views.prompt import prompt
from replaydb.ui.views.runs import run, runs
from replaydb.ui.views.step import step, steps

View = Callable[[Request], Awaitable[Response]]

#: The path of a view is its name: `address("groups")` is /groups. What it shows is in the query.
ROUTES: dict[str, View] = {
    "": overview,
    "groups": groups,
    "group": group,
    "episode": episode,
    "compare": compare,
    "prompt": prompt,
    "run": run,
    "runs": runs,
    "step": step,
    "steps": steps,
    "live": live,
}
#: Views of which there are downloads: each at its path and the kind, as `/groups.parquet`.
DOWNLOADS: dict[str, View] = {
    "group": group_view.download,
    "groups": groups_view.download,
    "step": step_view.download,
}
ROUTES |= {
    f"{name}.{kind}": view for name, view in DOWNLOADS.items() for kind in downloads.MEDIA_TYPES
}

#: Connections to the database: requests beyond that wait for one.
POOL_SIZE = 4


def application(
    url: str | URL, *, token: str | None = None, tokenizer: Path | None = None
) -> Starlette:
    """The pages over a store, as an ASGI application.

    The store is opened, read-only, when the server starts the application, and closed when it ends.
    Without a token only requests to this machine by a name of itself are answered: see
    `docs/ui.md` for what a server of your own has to see to.

    Args:
        url: The store, as for `Store.open`.
        token: What whoever looks has to say first; at least 16 characters. None: nothing.
        tokenizer: A tokenizer of Hugging Face on this machine, a file or a folder, that decodes the
            tokens of episodes.

    Raises:
        InvalidInputError: The token is too short, or there is no such tokenizer.
        NotSupportedError: Nothing is installed that reads the tokenizer.
    """
    door = None if token is None else safety.Door(token)
    decode = None if tokenizer is None else decoder(tokenizer)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            Store.open(url, read_only=True, pool_size=POOL_SIZE) as store,
            Shared() as shared,
        ):
            app.state.store, app.state.shared, app.state.looks = store, shared, {}
            app.state.decode = decode
            app.state.url = url
            yield

    return Starlette(
        routes=[
            *(Route(f"/{name}", view) for name, view in ROUTES.items()),
            Route(f"/{library.PATH}", library.plotly_js),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ],
        middleware=[
            Middleware(safety.Guard, door=door),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
        exception_handlers=failures.HANDLERS,
        lifespan=lifespan,
    )
