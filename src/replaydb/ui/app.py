"""ASGI application of the web UI: one route per view, over one read-only store."""

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

from replaydb.buffer.store import Store
from replaydb.domain.decoding import decoder
from replaydb.ui import downloads, failures, library, safety
from replaydb.ui.pages import FOLDER
from replaydb.ui.shared import SharedCache
from replaydb.ui.views import episode, group, groups, overview, prompt, runs, step

View = Callable[[Request], Awaitable[Response]]

#: Views by name, which is also their path: `address("groups")` is /groups.
ROUTES: dict[str, View] = {
    "": overview.overview,
    "groups": groups.groups,
    "group": group.group,
    "episode": episode.episode,
    "compare": episode.compare,
    "prompt": prompt.prompt,
    "run": runs.run,
    "runs": runs.runs,
    "step": step.step,
    "steps": step.steps,
    "live": overview.live,
}
#: Downloads of the rows of a view, at its name and the file type, such as `/groups.parquet`.
DOWNLOADS: dict[str, View] = {
    "groups": groups.download,
    "group": group.download,
    "episode": episode.download,
    "compare": episode.download_two,
    "prompt": prompt.download,
    "runs": runs.download,
    "step": step.download,
    "steps": step.download_all,
    "tokens": episode.download_tokens,
}
ROUTES |= {
    f"{name}.{kind}": view for name, view in DOWNLOADS.items() for kind in downloads.MEDIA_TYPES
}

#: Connections to the database. Further requests wait for a free one.
POOL_SIZE = 4


def application(
    url: str | URL, *, token: str | None = None, tokenizer: Path | None = None
) -> Starlette:
    """Return the web UI of a store as an ASGI application.

    The application opens the store read-only at startup and closes it at shutdown, so its lifespan
    must be run. Without a token it answers only requests whose host is `localhost`, `127.0.0.1` or
    `[::1]`. `docs/ui.md` lists what a server of your own must take care of.

    Args:
        url: URL of the store, as for `Store.open`.
        token: Access token that clients must send; at least 16 characters. None: no authentication.
        tokenizer: Path of a local Hugging Face tokenizer, a file or a folder, to decode the tokens
            of episodes. None: token ids are shown.

    Returns:
        The application.

    Raises:
        InvalidInputError: The token is too short, or there is no such tokenizer.
        NotSupportedError: No installed package can read the tokenizer.
    """
    auth = None if token is None else safety.TokenAuth(token)
    decode = None if tokenizer is None else decoder(tokenizer)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            Store.open(url, read_only=True, pool_size=POOL_SIZE) as store,
            SharedCache() as cache,
        ):
            app.state.store, app.state.cache, app.state.snapshots = store, cache, {}
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
            Middleware(safety.Guard, auth=auth, is_scan=groups.may_read_all),
            Middleware(GZipMiddleware, minimum_size=1000),
        ],
        exception_handlers=failures.HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # absolute redirects are wrong behind a path prefix
    return app
