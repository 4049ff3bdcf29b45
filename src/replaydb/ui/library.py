"""plotly.js, which draws the charts: from the installed package, so that no network is needed."""

from __future__ import annotations

import gzip
import re
from functools import cache

from plotly import __version__
from plotly.offline import get_plotlyjs
from starlette.requests import Request
from starlette.responses import Response

#: Where it is served; another version is at another address, so browsers may keep it.
PATH = f"plotly-{__version__}.js"


@cache
def styles() -> list[str]:
    """Ids of the styles that it would write into a page, which the content policy forbids.

    It does not where something has their id; `ui.css` has what is needed of them.
    """
    found = re.findall(r'getElementById\("([0-9a-f]{64})"\)', get_plotlyjs())
    return ["plotly.js-style-global", *found]


@cache
def _compressed() -> bytes:
    return gzip.compress(get_plotlyjs().encode(), compresslevel=6)


async def plotly_js(request: Request) -> Response:
    """The library."""
    headers = {"Cache-Control": "private, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(_compressed(), media_type="text/javascript", headers=headers)
    return Response(get_plotlyjs(), media_type="text/javascript", headers=headers)
