"""plotly.js, served from the installed package so that no network access is needed."""

from __future__ import annotations

import gzip
import re
from functools import cache

from plotly import __version__
from plotly.offline import get_plotlyjs
from starlette.requests import Request
from starlette.responses import Response

#: Path of the library. It contains the version, so browsers may cache it.
PATH = f"plotly-{__version__}.js"


@cache
def styles() -> list[str]:
    """Return the ids of the `<style>` elements that Plotly adds to a page.

    The content security policy forbids them. Plotly adds none if an element with the id exists;
    `ui.css` contains the rules that are needed.
    """
    found = re.findall(r'getElementById\("([0-9a-f]{64})"\)', get_plotlyjs())
    return ["plotly.js-style-global", *found]


@cache
def _compressed() -> bytes:
    return gzip.compress(get_plotlyjs().encode(), compresslevel=6)


async def plotly_js(request: Request) -> Response:
    """Serve the library, compressed if the client accepts gzip."""
    headers = {"Cache-Control": "private, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(_compressed(), media_type="text/javascript", headers=headers)
    return Response(get_plotlyjs(), media_type="text/javascript", headers=headers)
