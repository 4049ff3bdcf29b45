"""Is it learning, is anything stuck, what was just trained?"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from replaydb.ui.pages import buffer_of, page, store_of


async def overview(request: Request) -> Response:
    """The buffers and runs of the store."""
    store = store_of(request)
    if "buffer" in request.query_params:
        await buffer_of(request)
    return page(request, "overview.html", buffers=await store.buffers(), runs=await store.runs())
