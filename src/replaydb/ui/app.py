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
from replaydb.ui.views import episode as episode_view
from replaydb.ui.views import group as group_view
from replaydb.ui.views import groups as groups_view
from replaydb.ui.views import overview as overview_view
from replaydb.ui.views import prompt as prompt_view
from replaydb.ui.views import runs as runs_view
from replaydb.ui.views import step as step_view

View = Callable[[Request], Awaitable[Response]]

#: The path of a view is its name: `address("groups")` is /groups. What it shows is in the query.
ROUTES: dict[str, View] = {
    "": overview_view.overview,
    "groups": groups_view.groups,
    "group": group_view.group,
    "episode": episode_view.episode,
    "compare": episode_view.compare,
    "prompt": prompt_view.prompt,
    "run": runs_view.run,
    "runs": runs_view.runs,
    "step": step_view.step,
    "steps": step_view.steps,
    "live": overview_view.live,
}
#: What each view shows, to be taken along: at its name and the kind, as `/groups.parquet`.
DOWNLOADS: dict[str, View] = {
    "overview": overview_view.download,
    "groups": groups_view.download,
    "group": group_view.download,
    "episode": episode_view.download,
    "compare": episode_view.download_two,
    "prompt": prompt_view.download,
    "run": runs_view.download,
    "runs": runs_view.download_all,
    "step": step_view.download,
    "steps": step_view.download_all,
}
ROUTES |= {
    f"{name}.{kind}": view for name, view in DOWNLOADS.items() for kind in downloads.MEDIA_TYPES
}
#: What no SQL gives.
ROUTES |= {f"tokens.{kind}": episode_view.download_tokens for kind in ("parquet", "json")}

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

    app = Starlette(
        routes=[
            *(Route(f"/{name}", view) for name, view in ROUTES.items()),
            Route(f"/{library.PATH}", library.plotly_js),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ],
        middleware=[
            Middleware(safety.Guard, door=door, is_scan=groups_view.may_read_all),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
        exception_handlers=failures.HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # to an absolute address, which a proxy may not know
    return app
