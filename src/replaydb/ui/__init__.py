"""Read-only web UI of a store. Needs the extra `replaydb[ui]`."""

from replaydb.util import extras

extras.need("ui", "replaydb ui")

from replaydb.ui.app import application
from replaydb.ui.serving import serve
from replaydb.util.publishing import publish

__all__ = ["application", "serve"]

publish(__name__, __all__)
del extras, publish
