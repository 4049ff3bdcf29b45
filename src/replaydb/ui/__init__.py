"""Pages over a store, to be looked at with a browser; nothing is ever written.

Needs the extra `replaydb[ui]`.
"""

from replaydb.errors import NotSupportedError

try:
    import jinja2  # noqa: F401
    import plotly  # noqa: F401
    import pyarrow  # noqa: F401
    import rapidfuzz  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise NotSupportedError(
        f"the pages need {error.name}: pip install 'replaydb[ui]'",
    ) from error

from replaydb.publishing import publish
from replaydb.ui.app import application
from replaydb.ui.serving import serve

__all__ = ["application", "serve"]

publish(__name__, __all__)
del publish
